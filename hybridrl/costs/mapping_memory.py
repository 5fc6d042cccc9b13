"""The memory of a rank under a mapping, in closed form: the phases of `costs/memory.py`.

Elements follow from a model's sizes and the axes of its layout, activations from `LayerBytes`. A
search asks for thousands of layouts. What it chooses is then planned by the parameters themselves
(`hybridrl plan memory`), from which this differs by a few percent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridrl.config import ActivationMode, OptimName
from hybridrl.costs.generation_memory import NativeSizes
from hybridrl.costs.mapping import (
    ACTOR,
    DeviceMapping,
    GenLayout,
    PlannedRole,
    TrainLayout,
)
from hybridrl.costs.memory import MemoryPlan, PoolSizes, ScoringSizes, plan_memory
from hybridrl.costs.model_shape import ModelShape
from hybridrl.costs.train_memory import (
    EIGHT_BIT_MOMENT,
    MASTER,
    ActivationSizes,
    TrainSizes,
    messages_kept,
    rows_in_flight,
)
from hybridrl.layout.fsdp_groups import is_one_group, stays_unsharded
from hybridrl.layout.transfer_rounds import BUCKET_BYTES
from hybridrl.pipelines.standard import least_micro_batches

_PREFILL_TOKENS = 4096  # `engines/rollout/batch.py`
_LOGITS_COPIES, _PLAIN_COPIES = 8, 3  # `engines/rollout/memory.py`


class LayerBytes(Protocol):
    """Bytes of activations on one of `tp` ranks, besides weights."""

    def layer(
        self,
        role: PlannedRole,
        tokens: int,
        tp: int,
        sequence_parallel: bool,
        mode: ActivationMode,
    ) -> ActivationSizes:
        """Bytes of a decoder layer over a row, from forward to backward."""
        ...

    def head(self, role: PlannedRole, scored: int, tp: int) -> ActivationSizes:
        """Bytes of the vocabulary's head in training."""
        ...

    def scoring(self, role: PlannedRole, tokens: int, scored: int, tp: int) -> int:
        """Bytes at the largest moment of a forward pass that has no backward pass."""
        ...

    def prefill(self, role: PlannedRole, tokens: int, tp: int) -> int:
        """Bytes of a decoder layer in a prefill."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """What a step has at most, by the config."""

    prompt_tokens: int
    new_tokens: int
    samples: int
    """Samples of a step."""
    mini_batches: int = 1
    max_running: int = 256
    bucket_bytes: int = 2 * 128 * 2**20
    """Bytes of the two buckets of the weight switch."""

    @property
    def longest(self) -> int:
        """Tokens of a full sample."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingMemory:
    """Plans of ranks with `capacity` bytes, of which `reserved` are not for the run."""

    limits: StepLimits
    capacity: int
    reserved: int
    layer_bytes: LayerBytes
    device: str = "cuda"
    itemsize: int = 2

    # A trained role

    def train_sizes(self, role: PlannedRole, layout: TrainLayout) -> TrainSizes:
        """Return the sizes of the pipeline stage that needs most."""
        stages = [self._stage_sizes(role, layout, stage) for stage in range(layout.pp)]
        return max(stages, key=lambda s: sum(s.state.values()) + sum(s.update().values()))

    def train_peak(self, role: PlannedRole, layout: TrainLayout) -> dict[str, int]:
        """Bytes by owner at the largest moment of an update, alone on the device."""
        sizes = self.train_sizes(role, layout)
        return sizes.state | sizes.update()

    def fits_training(self, role: PlannedRole, layout: TrainLayout) -> bool:
        """Whether a rank that holds nothing else can train it."""
        peak = self.train_peak(role, layout)
        return sum(peak.values()) + self.reserved <= self.capacity

    def _stage_sizes(self, role: PlannedRole, layout: TrainLayout, stage: int) -> TrainSizes:
        shape, tp = role.shape, layout.tp
        numbers = layout.layers_of_chunks(shape.layers)
        own = [n for chunk, n in enumerate(numbers) if layout.stage_of_chunk(chunk) == stage]
        is_last = layout.stage_of_chunk(len(numbers) - 1) == stage
        layer = shape.layer_parameters // tp + 2 * shape.hidden
        rows = -(-shape.vocabulary // tp)
        head = rows * shape.hidden * (is_last and not role.value_head)
        embedding = rows * shape.hidden * (stage == 0)
        is_tied = shape.tied and layout.pp == 1 and not role.value_head
        root = max(head, embedding) if is_tied else head + embedding
        root += 2 * shape.hidden * is_last
        if is_one_group(shape.parameters):
            root, layer = root + sum(own) * layer, 0
        tokens, scored, number = self._row(layout)
        in_flight = rows_in_flight(layout.pp, layout.schedule, stage, number)
        if layout.zigzag:  # and one between the halves of its backward pass
            in_flight += 1
        setting = tokens, tp, layout.sequence_parallel, layout.activations
        activations = self.layer_bytes.layer(role, *setting)
        widest = max(shape.ffn, shape.heads * shape.features) * shape.hidden
        largest = max(shape.head_parameters, widest)
        bucket = min(BUCKET_BYTES, round(self.itemsize * shape.parameters))
        matrices = sum(own) * shape.layer_parameters if role.optim is OptimName.muon else 0
        return TrainSizes(
            trained=-(-(root + sum(own) * layer) // layout.fsdp),
            frozen=0,
            layer=layer,
            layers=sum(own),
            root=root,
            trained_layer=layer,
            trained_root=root,
            reduced_layer=layer // layout.fsdp,
            largest=largest,
            read=-(-(root + sum(own) * layer) // layout.fsdp),
            itemsize=self.itemsize,
            fsdp=layout.fsdp,
            tp=tp,
            keep_unsharded=stays_unsharded(shape.parameters, layout.pp),
            head=head,
            several_rows=number != 1,
            earlier_gradients=not number or number > in_flight,
            layer_activations=activations,
            ends=self._ends(role, layout, is_last, tokens, scored),
            embedding=embedding * tp if tp > 1 else 0,
            in_flight=in_flight,
            received=self._received(role.shape, layout, stage, tokens, in_flight),
            saved=max(self.itemsize * largest, bucket) + 2 * bucket,
            moment=EIGHT_BIT_MOMENT if role.optim is OptimName.adamw8bit else MASTER,
            matrices=-(-matrices // (tp * layout.fsdp)),
            owned_matrices=max(-(-matrices // (tp * layout.data_ranks)), widest) if matrices else 0,
            largest_matrix=widest if matrices else 0,
        )

    def _row(self, layout: TrainLayout) -> tuple[int, int, int]:
        """Tokens of the longest row, those with a log-probability, and rows of an update.

        0 rows are unknown, and more than one (`PackedRow` in preflight/memory_inputs.py).
        """
        limits, most = self.limits, layout.micro_batch_tokens
        longest, replicas = limits.longest, layout.data_ranks
        share = -(-limits.samples * longest // replicas) + longest
        number = 1 if share <= most and layout.pp == 1 else 0
        if layout.pp > 1:
            of_update = -(-limits.samples // (replicas * limits.mini_batches)) + 1
            rows = of_update if longest > most else -(-of_update // (most // longest))
            number = least_micro_batches(layout.schedule.value, layout.pp, rows)
        tokens = max(min(most, share), longest)
        return tokens, -(-tokens * limits.new_tokens // longest), number

    def _ends(
        self, role: PlannedRole, layout: TrainLayout, is_last: bool, tokens: int, scored: int
    ) -> ActivationSizes:
        hidden = tokens * role.shape.hidden * self.itemsize
        hidden //= layout.tp if layout.sequence_parallel else 1
        if not is_last or role.value_head:
            return ActivationSizes(hidden * (1 + is_last), 0)
        head = self.layer_bytes.head(role, scored, layout.tp)
        selected = scored * role.shape.hidden * self.itemsize
        return ActivationSizes(head.kept + 2 * hidden + selected, head.backward)

    def _received(
        self, shape: ModelShape, layout: TrainLayout, stage: int, tokens: int, in_flight: float
    ) -> int:
        """As `TrainSizes.received`."""
        if layout.pp == 1:
            return 0
        hidden = tokens * shape.hidden * self.itemsize
        hidden //= layout.tp if layout.sequence_parallel else 1
        return hidden * messages_kept(layout.pp, layout.schedule, stage, in_flight)

    # Generation and scoring

    def generation_sizes(self, role: PlannedRole, gen: GenLayout) -> NativeSizes:
        """Return the sizes of the rollout engine, on the stage that has most."""
        shape, limits = role.shape, self.limits
        tokens = max(_PREFILL_TOKENS, limits.longest)
        heads = -(-shape.kv_heads // gen.tp)
        layers = -(-shape.layers // gen.pp)
        layer_token = 2 * heads * shape.features * self.itemsize
        hidden = tokens * shape.hidden * self.itemsize
        sent = gen.pp if gen.pp > 1 else 0
        widest = shape.ffn * shape.hidden // gen.tp
        logits = 4 * limits.max_running * shape.vocabulary
        return NativeSizes(
            weights=self.itemsize * self._gen_elements(role, gen),
            token=layers * layer_token,
            prefill=self.layer_bytes.prefill(role, tokens, gen.tp) + (2 + sent) * hidden,
            logits=_LOGITS_COPIES * logits,
            joined=2 * widest * self.itemsize,
            buckets=self.limits.bucket_bytes,
            longest=limits.longest,
            most=limits.max_running * limits.longest,
            wanted=0,
            gathered=layers * layer_token if self.device == "cpu" else layer_token,
            sampling=_PLAIN_COPIES * logits,
        )

    def scoring_sizes(
        self, role: PlannedRole, gen: GenLayout, micro_batch_tokens: int
    ) -> ScoringSizes:
        """Return the sizes of a role that only scores: it has the layout of generation."""
        limits = self.limits
        tokens = max(micro_batch_tokens, limits.longest)
        scored = -(-tokens * limits.new_tokens // limits.longest)
        most = self.layer_bytes.scoring(role, tokens, 0 if role.value_head else scored, gen.tp)
        hidden = tokens * role.shape.hidden * self.itemsize
        sent = gen.pp if gen.pp > 1 else 0
        weights = self.itemsize * self._gen_elements(role, gen)
        return ScoringSizes(weights, most + (2 + sent) * hidden)

    @staticmethod
    def _gen_elements(role: PlannedRole, gen: GenLayout) -> int:
        shape = role.shape
        layers = -(-shape.layers // gen.pp)
        rows = -(-shape.vocabulary // gen.tp) * shape.hidden
        has_two = not (shape.tied or role.value_head) and gen.pp == 1
        layer = shape.layer_parameters // gen.tp + 2 * shape.hidden
        return layers * layer + rows * (2 if has_two else 1)

    # All of it

    def plans(
        self, roles: Sequence[PlannedRole], mapping: DeviceMapping
    ) -> Mapping[str, MemoryPlan]:
        """The phases of a rank of each pool, of the rank that has most."""
        by_name = {role.name: role for role in roles}
        return {
            pool: self._plan([by_name[name] for name in names], mapping)
            for pool, names in mapping.pools.items()
        }

    def _plan(self, roles: Sequence[PlannedRole], mapping: DeviceMapping) -> MemoryPlan:
        trained = {
            role.name: self.train_sizes(role, mapping.train[role.name])
            for role in roles
            if role.trained
        }
        tokens = max(layout.micro_batch_tokens for layout in mapping.train.values())
        actor = next((role for role in roles if role.name == ACTOR), None)
        sizes = PoolSizes(
            trained=trained,
            scoring={
                role.name: self.scoring_sizes(role, mapping.gen, tokens)
                for role in roles
                if not role.trained
            },
            generation=None if actor is None else self.generation_sizes(actor, mapping.gen),
            from_actor=set(trained) - {ACTOR},
            together=(tuple(trained),) if mapping.fuses and len(trained) > 1 else (),
        )
        return plan_memory(sizes, self.device, self.capacity, self.reserved)

    def samples_held(self, actor: PlannedRole, gen: GenLayout) -> int:
        """Full samples that decode together on an instance; 0 where none fits."""
        sizes = self.generation_sizes(actor, gen)
        left = None
        if self.device == "cuda":
            left = self.capacity - self.reserved - sizes.weights - sizes.buckets
            needed = sizes.logits + sizes.prefill
            free = (left - needed) // (sizes.token + sizes.gathered)
            return max(0, min(self.limits.max_running, free // sizes.longest))
        return min(self.limits.max_running, sizes.cache_tokens(left) // sizes.longest)
