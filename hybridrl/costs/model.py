"""Seconds of work under a mapping, by role and layout, from what a layer costs."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from hybridrl.config import ActivationMode
from hybridrl.costs.chunk_passes import (
    ChunkPasses,
    ChunkSetting,
    Elements,
    StageElements,
    chunk_layers,
    chunk_passes,
    largest_stage,
)
from hybridrl.costs.instance import Costs
from hybridrl.costs.layers import LayerCosts, LayerWork, LinearPass
from hybridrl.costs.links import LinkSpeed
from hybridrl.costs.mapping import (
    ACTOR,
    ClusterShape,
    DeviceMapping,
    GenLayout,
    LayoutLinks,
    PlannedRole,
    SampleLength,
    SampleTotals,
    TrainLayout,
)
from hybridrl.costs.model_shape import ModelShape, matrices
from hybridrl.costs.scales import CostScales
from hybridrl.layout.fsdp_groups import stays_unsharded
from hybridrl.layout.switching import plan_switch
from hybridrl.pipelines.balance import balance
from hybridrl.pipelines.evaluation import evaluate
from hybridrl.pipelines.problem import (
    PassCosts,
    PassKind,
    PipelinedModel,
    PipelinePlan,
    PipelineProblem,
)
from hybridrl.pipelines.standard import least_micro_batches, standard_plan

SampleLengths = Sequence[SampleLength]
"""Lengths of the samples of a micro-batch, or of a batch."""

UNSCALED = CostScales()
MASTER = 4
_MOMENTS = 2 * MASTER
_SCORED_TOKENS = 8192  # of a micro-batch of a forward-only stage


class EvenRows(NamedTuple):
    """The micro-batches of a data-parallel rank: `filled` equal ones, the rest of them empty.

    Example: of 20 samples of 1,000 tokens two ranks have 10 each: with 4,096 tokens in a
    micro-batch these are 3 of 3,333 tokens.
    """

    number: int
    filled: int
    work: tuple[float, float, float]
    """Tokens, scored tokens, and pairs of a query and a key of one that is filled."""


def even_rows(layout: TrainLayout, totals: SampleTotals) -> EvenRows:
    """The share of the busiest rank, which is the mean one's, or that of the longest sample.

    Ranks of cp compute their parts of every sample of their block, as if all were long enough.
    """
    share = max(1 / layout.data_ranks, totals.longest / layout.cp / max(1, totals.tokens))
    samples = max(1, math.ceil(totals.samples * share * layout.cp))
    least = min(samples, max(1, math.ceil(totals.tokens * share / layout.micro_batch_tokens)))
    number, filled = least, least
    if layout.pp > 1:
        number = least_micro_batches(layout.schedule.value, layout.pp, least)
        filled = min(number, samples)
    work = (totals.tokens * share, totals.scored * share, totals.pairs * share)
    return EvenRows(number, filled, (work[0] / filled, work[1] / filled, work[2] / filled))


def _exchange(link: LinkSpeed, token_bytes: float, ranks: int) -> LinearPass:
    """An all-to-all of so many bytes of each token of a rank."""
    call_s = link.gather_s(0, ranks)
    return LinearPass(call_s, link.gather_s(token_bytes, ranks) - call_s)


class _Chunk(NamedTuple):
    """A pipeline chunk: its passes, and the seconds of FSDP's traffic for each micro-batch."""

    passes: ChunkPasses
    together: LinearPass
    """All of them."""
    gather_s: float
    reduce_s: float


class CostModel:
    """Predicts seconds of roles in layouts on a cluster.

    `ranks` are always the cluster's ranks of the role's pool: they decide which links are crossed.
    Example: `update_s(actor, TrainLayout(fsdp=2), range(2), lengths)` is the time of an optimizer
    step on the first two ranks of a node.
    """

    def __init__(
        self,
        layer_costs: LayerCosts,
        cluster: ClusterShape,
        scales: CostScales = UNSCALED,
    ) -> None:
        self.layer_costs, self.cluster, self.scales = layer_costs, cluster, scales
        self.links = LayoutLinks(cluster)
        # A search asks for the same ones again and again.
        self._chunks = lru_cache(4096)(self._make_chunks)
        self._moved = lru_cache(4096)(self._switch_traffic_s)
        self._rows = lru_cache(4096)(self._all_rows_s)
        self._reduce = lru_cache(4096)(self._hidden_reduce)
        self._passes = lru_cache(4096)(self._passes_at)
        self._elements = lru_cache(4096)(largest_stage)

    # Training

    def row_passes(
        self,
        role: PlannedRole,
        layout: TrainLayout,
        ranks: range,
        tokens: float,
        scored: float,
        pairs: float,
    ) -> tuple[PassCosts, ...]:
        """Return the costs of a micro-batch, by pipeline chunk in forward order.

        It has so many tokens, scored tokens, and pairs of a query and a key. Tensor-parallel
        traffic is in the costs, that of FSDP where weights are gathered for each micro-batch. With
        recomputation a backward pass has a forward pass in it.
        """
        sizes = layout.layers_of_chunks(role.shape.layers)
        chunks = self._chunks(role, layout, ranks, sizes)
        return tuple(self._chunk_passes(chunk, tokens, scored, pairs) for chunk in chunks)

    def _chunk_passes(self, chunk: _Chunk, *work: float) -> PassCosts:
        return PassCosts(
            # Weights are gathered, and gradients reduced, while other layers compute.
            forward_s=max(chunk.passes.forward(*work), chunk.gather_s),
            backward_s=max(chunk.passes.backward(*work), chunk.reduce_s),
            weights_s=chunk.passes.weights(*work),
        )

    def _make_chunks(
        self, role: PlannedRole, layout: TrainLayout, ranks: range, sizes: Sequence[int]
    ) -> tuple[_Chunk, ...]:
        """Chunks of `sizes` layers."""
        setting = ChunkSetting(
            shape=role.shape,
            value_head=role.value_head,
            adapters=role.adapters,
            tp=layout.tp,
            recomputes=layout.activations is ActivationMode.recompute,
            splits_backward=layout.splits_backward,
            reduce=self._tp_reduce(role.shape, layout, ranks),
            traffic=self._layer_exchanges(role.shape, layout, ranks),
        )
        gather_s, reduce_s = self._layer_traffic(role, layout, ranks)
        places = [(n, k == 0, k == len(sizes) - 1) for k, n in enumerate(sizes)]
        each = {
            place: _Chunk(
                *self._passes(setting, *place),
                place[0] * gather_s,
                place[0] * (gather_s + reduce_s),
            )
            for place in set(places)  # most are alike
        }
        return tuple(each[place] for place in places)

    def _passes_at(
        self, setting: ChunkSetting, layers: int, is_first: bool, is_last: bool
    ) -> tuple[ChunkPasses, LinearPass]:
        passes = chunk_passes(self.layer_costs, setting, layers, is_first, is_last)
        return passes, passes.together

    def _tp_reduce(
        self, shape: ModelShape, layout: TrainLayout | GenLayout, ranks: range
    ) -> LinearPass:
        """One all-reduce of hidden states among tp ranks; of two in a layer's forward pass."""
        if layout.tp == 1:
            return LinearPass()
        trains, ranks = isinstance(layout, TrainLayout), self.cluster.aligned(ranks)
        return self._reduce(shape.hidden, layout.tp, trains, ranks)

    def _hidden_reduce(self, hidden: int, tp: int, trains: bool, ranks: range) -> LinearPass:
        nbytes = hidden * self.layer_costs.itemsize
        # Generation deals its groups out node by node, as `plan_switch` orders ranks.
        placed = list(ranks) if trains else sorted(ranks, key=self.cluster.node)
        groups = [placed[start : start + tp] for start in range(0, len(placed), tp)]
        link = self.cluster.slowest(groups)
        call_s = link.all_reduce_s(0, tp)
        return LinearPass(call_s, link.all_reduce_s(nbytes, tp) - call_s)

    def _layer_exchanges(self, shape: ModelShape, layout: TrainLayout, ranks: range) -> LinearPass:
        """What a layer's forward pass sends between ranks of tp, of ep and of cp, by own token.

        Each token goes to the ranks of its experts and comes back. Ranks of cp exchange tokens for
        heads before attention and back, or gather keys and values where the heads are not enough.
        """
        traffic = self._tp_reduce(shape, layout, ranks).times(2)
        nbytes = shape.hidden * self.layer_costs.itemsize / layout.tp
        if layout.ep > 1:
            link = self.links.along(layout, ranks, "ep")
            traffic += _exchange(link, shape.experts_per_token * nbytes, layout.ep).times(2)
        if layout.cp > 1:
            link, head = self.links.along(layout, ranks, "cp"), shape.features / shape.hidden
            heads, keys = shape.heads // layout.tp, -(-shape.kv_heads // layout.tp)
            head *= layout.tp * nbytes
            if heads % layout.cp:
                traffic += _exchange(link, 2 * keys * head * layout.cp, layout.cp)
            else:
                keys = math.lcm(keys, layout.cp)
                traffic += _exchange(link, (heads + 2 * keys) * head, layout.cp)
                traffic += _exchange(link, heads * head, layout.cp)
        return traffic

    def _layer_traffic(
        self, role: PlannedRole, layout: TrainLayout, ranks: range
    ) -> tuple[float, float]:
        """Seconds to gather a layer for a micro-batch, and seconds to reduce its gradients."""
        if stays_unsharded(role.shape.parameters, layout.pp):
            return 0.0, 0.0
        weights = Elements(role.shape.dense_parameters, role.shape.expert_parameters)
        trained = Elements(role.adapters, 0) if role.adapters else weights
        gather = self._gather_s(weights, layout, ranks, self.layer_costs.itemsize)
        return gather, self._gather_s(trained, layout, ranks, MASTER)

    def _gather_s(
        self, elements: Elements, layout: TrainLayout, ranks: range, itemsize: int
    ) -> float:
        """Seconds to gather weights over FSDP, or to reduce their gradients."""
        seconds, efsdp = 0.0, layout.axes.efsdp
        if elements.dense and layout.fsdp > 1:
            link = self.links.along(layout, ranks, "fsdp")
            seconds += link.gather_s(itemsize * elements.dense / layout.tp, layout.fsdp)
        if elements.experts and efsdp > 1:
            link = self.links.along(layout, ranks, "efsdp")
            seconds += link.gather_s(itemsize * elements.experts / layout.ep, efsdp)
        return seconds

    def balanced_layers(
        self, role: PlannedRole, layout: TrainLayout, ranks: range, totals: SampleTotals
    ) -> tuple[int, ...]:
        """Layers of each chunk such that the head makes no slowest stage; empty if even ones do.

        See `chunk_layers`; seconds are those of a micro-batch with a part of `totals`.
        """
        if layout.pp == 1:
            return ()
        layout = layout.sharing(totals.longest)
        row = even_rows(layout, totals).work

        def of_chunks(layers: int) -> list[float]:
            """Seconds of each chunk, where all chunks have so many layers."""
            chunks = self._chunks(role, layout, ranks, (layers,) * layout.chunks)
            passes = [self._chunk_passes(chunk, *row) for chunk in chunks]
            return [each.forward_s + each.backward_s + each.weights_s for each in passes]

        one, two = of_chunks(1), of_chunks(2)
        layer_s = two[0] - one[0]
        stages = [layout.stage_of_chunk(chunk) for chunk in range(layout.chunks)]
        sizes = chunk_layers(role.shape.layers, stages, layer_s, [s - layer_s for s in one])
        return () if sizes == layout.layers_of_chunks(role.shape.layers) else sizes

    def message_bytes(self, role: PlannedRole, layout: TrainLayout, tokens: float) -> float:
        """Bytes of a micro-batch's hidden states, which a rank sends to the next stage."""
        parts = layout.tp if layout.sequence_parallel else 1
        return tokens * role.shape.hidden * self.layer_costs.itemsize / parts

    def pipeline(
        self,
        role: PlannedRole,
        layout: TrainLayout,
        ranks: range,
        rows: EvenRows,
        trains: bool = True,
    ) -> tuple[PipelineProblem, PipelinePlan]:
        """The micro-batches of a data-parallel rank, and the order that the engine takes."""
        costs = [self.row_passes(role, layout, ranks, *rows.work)] * rows.filled
        costs += [self.row_passes(role, layout, ranks, 1, 0, 1)] * (rows.number - rows.filled)
        stages = tuple(layout.stage_of_chunk(chunk) for chunk in range(layout.chunks))
        kinds: tuple[PassKind, ...] = (PassKind.backward,) if trains else ()
        if trains and layout.splits_backward:
            kinds = (PassKind.backward_input, PassKind.backward_weights)
        model = PipelinedModel(name=role.name, ranks=stages, costs=costs, backward=kinds)
        nbytes = self.message_bytes(role, layout, rows.work[0])
        hops = self.links.hops(layout, ranks) if layout.pp > 1 else ()
        sends_s = [[link.send_s(nbytes) for link in row] for row in hops]
        problem = PipelineProblem(models=[model], num_ranks=layout.pp, sends_s=sends_s)
        return problem, standard_plan(model, layout.schedule.value)

    def gradient_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        """Seconds to gather weights and reduce gradients over fsdp and replicas, once an update."""
        costs = self.layer_costs
        trained, _ = self._stage_elements(role, layout)
        seconds = costs.gradient_element_s * trained.gathered(layout)
        seconds += self._weights_s(role, layout, ranks)
        if stays_unsharded(role.shape.parameters, layout.pp):
            seconds += self._gather_s(trained, layout, ranks, MASTER)
        if layout.replicas > 1:
            link = self.links.along(layout, ranks, "replica")
            seconds += link.all_reduce_s(MASTER * trained.shard(layout), layout.replicas)
        return seconds

    def _weights_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        """Seconds to gather all weights over FSDP once; 0 where each row gathers its layers."""
        if not stays_unsharded(role.shape.parameters, layout.pp):
            return 0.0
        elements, itemsize = self._stage_elements(role, layout), self.layer_costs.itemsize
        return sum(self._gather_s(each, layout, ranks, itemsize) for each in elements)

    def _stage_elements(self, role: PlannedRole, layout: TrainLayout) -> StageElements:
        return self._elements(role, layout.pp, layout.schedule, layout.chunk_layers)

    def optimizer_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        """Seconds of an optimizer step, with the clipping of gradients."""
        elements = self._stage_elements(role, layout).trained.shard(layout)
        norm = self.links.among(ranks).all_reduce_s(0, layout.ranks)
        return self.layer_costs.optimizer_element_s * elements + norm

    def update_s(
        self, role: PlannedRole, layout: TrainLayout, ranks: range, samples: SampleLengths
    ) -> float:
        """Seconds of one optimizer step on these samples on all ranks.

        Pipelines count action by action.
        """
        seconds = self._rows_s(role, layout, ranks, samples, trains=True)
        return self.scales.train * seconds + self.step_s(role, layout, ranks)

    def step_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        """Seconds that an update takes once, besides its rows."""
        once = self.layer_costs.update_s + self.gradient_s(role, layout, ranks)
        return self.scales.train * (once + self.optimizer_s(role, layout, ranks))

    def _rows_s(
        self,
        role: PlannedRole,
        layout: TrainLayout,
        ranks: range,
        samples: SampleLengths,
        trains: bool,
    ) -> float:
        """Seconds of the micro-batches of the rank that takes longest."""
        totals = SampleTotals.of(samples)
        return self._rows(role, layout, self.cluster.aligned(ranks), totals, trains)

    def _all_rows_s(
        self,
        role: PlannedRole,
        layout: TrainLayout,
        ranks: range,
        totals: SampleTotals,
        trains: bool,
    ) -> float:
        layout = layout.sharing(totals.longest)
        rows = even_rows(layout, totals)
        problem, plan = self.pipeline(role, layout, ranks, rows, trains)
        return evaluate(problem, plan).seconds

    def bound_of(
        self,
        role: PlannedRole,
        layout: TrainLayout,
        ranks: range,
        totals: SampleTotals,
        *,
        filled: bool = False,
    ) -> float:
        """A closed form that `update_s` is never below: the busiest stage without a gap.

        `filled`: the mean stage, since others' work fills gaps. The sum of roles is what no plan of
        all (`fused_plans.shared_update_s`) is below.
        """
        layout = layout.sharing(totals.longest)
        rows = even_rows(layout, totals)
        stages = [0.0] * layout.pp
        sizes = layout.layers_of_chunks(role.shape.layers)
        for number, chunk in enumerate(self._chunks(role, layout, ranks, sizes)):
            seconds = rows.filled * chunk.together(*rows.work)
            stages[layout.stage_of_chunk(number)] += seconds
        work = sum(stages) / layout.pp if filled else max(stages)
        return self.scales.train * work + self.step_s(role, layout, ranks)

    # Forward-only stages

    def score_s(
        self,
        role: PlannedRole,
        layout: TrainLayout | GenLayout,
        ranks: range,
        samples: SampleLengths,
    ) -> float:
        """Seconds of a forward-only stage on these samples.

        With a `GenLayout` of one instance, whose `ranks` these are; else of all ranks of the pool.
        """
        if not samples:
            return 0.0
        if isinstance(layout, GenLayout):
            layout = TrainLayout(pp=layout.pp, tp=layout.tp, micro_batch_tokens=_SCORED_TOKENS)
        once = self.pass_s(role, layout, ranks)
        return once + self.scales.forward * self._rows_s(role, layout, ranks, samples, trains=False)

    def pass_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        """Seconds that a forward-only stage takes once, besides its rows."""
        return self.scales.forward * self._weights_s(role, layout, ranks)

    # Between phases

    def activate_s(self, role: PlannedRole, layout: TrainLayout | GenLayout) -> float:
        """Seconds to bring a role's shards and moments from host memory onto the device."""
        if isinstance(layout, GenLayout):
            nbytes = self.layer_costs.itemsize * role.shape.parameters / layout.ranks
            return self.cluster.host.send_s(nbytes)
        return self._shards_s(role, layout, MASTER + _MOMENTS)

    def _shards_s(self, role: PlannedRole, layout: TrainLayout, itemsize: int) -> float:
        """Seconds to bring shards onto the device, with `itemsize` bytes of what is trained."""
        trained, frozen = self._stage_elements(role, layout)
        nbytes = itemsize * trained.shard(layout)
        nbytes += self.layer_costs.itemsize * frozen.shard(layout)
        return self.cluster.host.send_s(nbytes)

    def deactivate_s(self, role: PlannedRole, layout: TrainLayout | GenLayout) -> float:
        """Seconds to bring a role back; weights that no update changes are only freed."""
        if isinstance(layout, GenLayout):
            return 0.0
        trained = self._stage_elements(role, layout).trained.shard(layout)
        return self.cluster.host.send_s((MASTER + _MOMENTS) * trained)

    def switch_s(
        self, role: PlannedRole, train: TrainLayout, gen: GenLayout, ranks: range
    ) -> float:
        """Seconds of the weight switch from training to generation: its plan's bytes by link.

        Adapters alone move to a copy of the weights below them, which comes from host memory.
        """
        own = role.shape.parameters / gen.ranks * self.layer_costs.itemsize
        seconds = self.layer_costs.switch_byte_s * own
        if role.adapters:
            nbytes = role.adapters * role.shape.layers / gen.pp * self.layer_costs.itemsize
            seconds += self.cluster.host.send_s(own)
            seconds += self.links.among(ranks).gather_s(nbytes, train.ranks)
        else:
            seconds += self._moved(role.shape, train, gen, ranks)
        return self.scales.switch * seconds

    def _switch_traffic_s(
        self, shape: ModelShape, train: TrainLayout, gen: GenLayout, ranks: range
    ) -> float:
        """Seconds of the rank that sends or receives longest, within its node and across nodes."""
        numbers = train.layers_of_chunks(shape.layers)
        stages = [train.stage_of_chunk(chunk) for chunk, n in enumerate(numbers) for _ in range(n)]
        nodes = [self.cluster.node(rank) for rank in ranks]
        switch = plan_switch(
            matrices(shape, train.tp, gen.tp),
            train.axes,
            gen.pp,
            gen.tp,
            stage_of_layer=stages,
            gen_ep=gen.ep,
            nodes=nodes,
        )
        seconds: dict[tuple[int, bool], float] = {}
        for (sender, receiver), elements in switch.plan.traffic.links.items():
            link = self.cluster.link([ranks[sender], ranks[receiver]])
            each = elements * self.layer_costs.itemsize / link.bytes_per_s
            for end in ((sender, True), (receiver, False)):
                seconds[end] = seconds.get(end, 0.0) + each
        return max(seconds.values(), default=0.0)

    # Generation

    def generation(self, role: PlannedRole, gen: GenLayout, ranks: range) -> Costs:
        """Return the costs of one rollout instance: of decode steps, rows and cached tokens.

        Stages of a pipeline decode as many batches in turns. So a step takes the time of one rank
        that reads all weights, and rows and cached tokens a stage's part of theirs.
        """
        costs, shape, scales = self.layer_costs, role.shape, self.scales
        reduce = self._tp_reduce(shape, gen, ranks).times(2 * shape.layers)
        read = shape.layers * shape.layer_parameters + shape.head_parameters
        active = shape.layers * shape.active_layer_parameters + shape.head_parameters
        send = 0.0
        if gen.pp > 1:
            placed = sorted(ranks, key=self.cluster.node)
            send = self.cluster.link((placed[0], placed[gen.tp])).send_s(0) * gen.pp
        host = costs.replay if costs.replay and gen.pp == 1 else costs.host
        step = host.seconds(shape.layers, costs.launch_s) * gen.pp + reduce.call_s + send
        step += costs.byte_s * costs.itemsize * read / gen.tp
        row = costs.forward_flop_s * 2 * active / gen.tp + reduce.token_s
        state_bytes = 0
        if shape.recurrent:  # a step reads and writes them
            state_bytes = shape.recurrent.state_bytes
            operations = costs.forward_flop_s * shape.recurrent.state_flops
            row += (2 * costs.byte_s * state_bytes + operations) / gen.tp
        prefill = LinearPass.of_layer(costs.forward_flop_s, LayerWork.of(shape, gen.tp))
        prefill = prefill.times(shape.layers)
        kv_bytes = shape.kv_elements * costs.itemsize
        apart = self.cluster.within if self.cluster.nodes == 1 else self.cluster.between
        return Costs(
            step_s=scales.decode * step,
            row_s=scales.decode * row / gen.pp,
            cached_token_s=scales.decode * costs.byte_s * kv_bytes / gen.ranks,
            prefill_token_s=scales.prefill * (prefill.token_s + reduce.token_s) / gen.pp,
            kv_call_s=scales.kv * (apart.message_s + state_bytes / gen.ranks / apart.bytes_per_s),
            kv_token_s=scales.kv * kv_bytes / gen.ranks / apart.bytes_per_s,
            round_trip_s=costs.round_trip_s,
        )

    # The scheduler's view

    def stage_layout(
        self, role: PlannedRole, mapping: DeviceMapping
    ) -> tuple[TrainLayout | GenLayout, bool]:
        """The layout of a role's forward-only stages, and whether its pool is the actor's.

        As runs have it (`PlannedRole.scores_with_shards`). Others have generation's layout, and a
        copy on every instance.
        """
        home = mapping.pool_of(role.name) == mapping.pool_of(ACTOR)
        if role.scores_with_shards:
            return mapping.train[role.name], home
        return mapping.gen, home

    def stage_s(self, role: PlannedRole, mapping: DeviceMapping, samples: SampleLengths) -> float:
        """Seconds of a call of a role's forward-only stage on one instance, or on a pool's ranks.

        In a separate pool the copies of a role that only scores share the samples.
        """
        layout, home = self.stage_layout(role, mapping)
        ranks = mapping.ranks_of(role.name)
        if isinstance(layout, TrainLayout):
            return self.score_s(role, layout, ranks, samples)
        ranks = ranks[: layout.ranks]
        if home:
            return self.score_s(role, layout, ranks, samples)
        copies = len(mapping.ranks_of(role.name)) // layout.ranks
        shares = balance([sample.tokens for sample in samples], copies)
        return max(
            self.score_s(role, layout, ranks, [samples[i] for i in share]) for share in shares
        )

    def to_generation_s(self, actor: PlannedRole, mapping: DeviceMapping) -> float:
        """From training to generation: the actor's shards come, its weights move, they leave."""
        train, home = mapping.train[ACTOR], mapping.ranks_of(ACTOR)
        onload = self._shards_s(actor, train, MASTER)
        return onload + self.switch_s(actor, train, mapping.gen, home)

    def to_generation_bound_s(self, actor: PlannedRole, mapping: DeviceMapping) -> float:
        """A closed form that `to_generation_s` is never below.

        A rank's generation weights are at least those that it has in training, and the others come
        over the fastest link (HybridFlow, arXiv 2409.19256, section 5.3).
        """
        train, gen = mapping.train[ACTOR], mapping.gen
        if actor.adapters:
            return self.to_generation_s(actor, mapping)
        elements = self._stage_elements(actor, train).trained.shard(train)
        own = actor.shape.parameters / gen.ranks
        received = max(0.0, own - elements) * self.layer_costs.itemsize
        fastest = max(self.cluster.within.bytes_per_s, self.cluster.between.bytes_per_s)
        local = self.layer_costs.switch_byte_s * own * self.layer_costs.itemsize
        moving = self.scales.switch * (local + received / fastest)
        return self._shards_s(actor, train, MASTER) + moving

    def on(self, cluster: ClusterShape) -> "CostModel":
        """Return the costs of the same layers on a cluster, or with other places of its ranks."""
        return CostModel(self.layer_costs, cluster, self.scales)
