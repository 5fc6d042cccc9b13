"""The memory of a rank in each phase of a step, before a run: sums over sizes in bytes.

    phase         on the device
    load          the trained model's shards and its largest parameter, or the new rollout engine
    switch        training state, generation weights, two buckets
    prefill       generation weights, KV cache, activations of the prompts
    decode        generation weights, KV cache, logits, a layer's keys and values once more
    score ROLE    generation weights, the role's weights, activations of a row
    train ROLE    training state, gathered weights, activations, gradients, at the largest moment

Ranks on GPUs offload what a phase does not need. Ranks on CPUs keep all of it: there the training
state of every role and the generation weights are in each phase.

Training has three moments, by FSDP2's order of work (torch 2.13). When the forward pass ends, all
activations are kept. Then the head or the last layer computes its gradients, or the root group is
gathered again. When the backward pass
ends, the layers' gradients are reduced, and those of the root group (embedding and head) are
copied for their reduction. In the optimizer's step every parameter has its gradient.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

GIB = 2**30
MASTER = 4
"""Bytes of a trained parameter in float32, and of each of AdamW's two moments."""
EIGHT_BIT_MOMENT = 1 + 4 / 256
"""Bytes of an element of a moment of 8 bits, with a scale for each block of 256."""
FILE = 2
"""Bytes of a parameter in a file of bfloat16 weights."""

_SHARDS = "more cluster.ranks, trainer.layout.tp or .pp, or adapters (actor.lora.rank)"
KEYS = {
    "float32 weights": _SHARDS,
    "frozen weights": "trainer.layout.tp or .pp",
    "moments": _SHARDS,
    "whole matrices": "more cluster.ranks",
    "gathered weights": "trainer.layout.tp or .pp",
    "activations": "trainer.activations=recompute or offload, or a smaller"
    " trainer.max_tokens_per_micro_batch or rollout.max_new_tokens",
    "gradients": _SHARDS,
    "shards": _SHARDS,
    "whole parameters": "trainer.layout.tp",
    "generation weights": "rollout.layout.tp or .pp, or rollout.dtype=bfloat16",
    "KV cache": "rollout.kv_cache_tokens, rollout.max_running or rollout.max_new_tokens",
    "logits": "rollout.max_running",
    "copied keys and values": "rollout.kv_cache_tokens",
    "scoring weights": "rollout.layout.tp or .pp",
    "buckets": "rollout.layout.bucket_mb",
}
"""Settings that reduce each size."""


@dataclass(frozen=True, slots=True)
class ActivationSizes:
    """Bytes of a row's activations on a rank, without weights and the module's input.

    `kept` from forward to backward, with the result. `backward` is the most within backward, with
    the gradients of the module's weights. `scoring` is the most of a forward pass that has none.
    """

    kept: int
    backward: int
    scoring: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSizes:
    """A trained model on one pipeline stage, on the rank that has most of it. In elements:

    `trained` and `frozen` are the rank's shards. `layer` and `root` are gathered over FSDP: one of
    `layers` layers, and the root group. `trained_layer` and `trained_root` of them get gradients.
    `largest` is the largest parameter on this stage. `read` is what the rank reads of the weights'
    file: whole rows, since pages are larger than a rank's columns.
    """

    trained: int
    frozen: int
    layer: int
    layers: int
    root: int
    trained_layer: int
    trained_root: int
    largest: int
    read: int
    itemsize: int
    """Bytes of an element in the compute format."""
    fsdp: int
    tp: int
    keep_unsharded: bool
    """Whether weights and gradients stay gathered from the first row of an update to the last."""
    head: int
    """Elements of the vocabulary's head, where it gets a gradient on this stage."""
    several_rows: bool
    """Whether gradients of rows add up."""
    earlier_gradients: bool
    """Whether some are there when most activations are kept."""
    layer_activations: ActivationSizes
    ends: ActivationSizes
    """Of embedding, last norm and head, where this stage has them."""
    in_flight: float = 1
    """Rows whose activations a stage of a pipeline keeps."""
    offloads: bool = False
    """Whether activations of layers are on the host, but for the layer that computes last or next.
    """
    moment: float = MASTER
    """Bytes of an element of each of AdamW's two moments."""
    matrices: int = 0
    """Elements of `trained` that Muon trains, which has one moment of them."""
    owned_matrices: int = 0
    """Elements that Muon makes orthogonal on a rank, whole matrices."""
    largest_matrix: int = 0
    """The largest of them, or of their batches."""

    @property
    def state(self) -> dict[str, int]:
        """What stays between updates."""
        return {
            "float32 weights": MASTER * self.trained,
            "frozen weights": self.itemsize * self.frozen,
            "moments": round(2 * self.moment * self.trained) - MASTER * self.matrices,
        }

    def update(self) -> dict[str, int]:
        """Besides the state, the largest moment of an update."""
        moments = [
            self._at_head(),
            self._at_root(),
            self._at_last_layer(),
            self._backward_ends(),
            self._step(),
        ]
        return max(moments, key=lambda sizes: sum(sizes.values()))

    def scoring(self) -> dict[str, int]:
        """Besides the state, a forward pass without gradients."""
        activations = max(self.layer_activations.scoring, self.ends.scoring) + self.ends.kept
        return {"gathered weights": self._gathered(2), "activations": activations}

    def loading(self, from_actor: bool = False) -> dict[str, int]:
        """On a GPU while the model is built, which each rank gets its own boxes of.

        A model that begins as the actor gets each of the actor's parameters whole, one after the
        other.
        """
        shards = {"shards": MASTER * self.trained + self.itemsize * self.frozen}
        return shards | ({"whole parameters": MASTER * self.largest} if from_actor else {})

    def _at_head(self) -> dict[str, int]:
        kept = self._kept_layers(1) * self.layer_activations.kept + self.ends.backward
        return self._forward_ends(self._gathered(0), round(kept))

    def _at_root(self) -> dict[str, int]:
        """Backward gathers the root group again: in one buffer first, then by parameter.

        The shard of it that is trained is converted before.
        """
        kept = round(self._kept_layers(1) * self.layer_activations.kept)
        if self.keep_unsharded or self.fsdp == 1:
            return self._forward_ends(self._gathered(0), kept)
        converted = self.trained_root // self.fsdp
        return self._forward_ends(self.itemsize * (2 * self.root + converted), kept)

    def _at_last_layer(self) -> dict[str, int]:
        layer = self.layer_activations
        kept = (self._kept_layers(2) - 1) * layer.kept + layer.backward
        head = self.itemsize * self.head - self.ends.kept  # the head's own are gone
        return self._forward_ends(self._gathered(2), round(kept) + head)

    def _kept_layers(self, offloading: int) -> float:
        """Layers, of all rows in flight, whose activations are there; so many while they leave."""
        return min(offloading, self.layers) if self.offloads else self.in_flight * self.layers

    def _forward_ends(self, gathered: int, activations: int) -> dict[str, int]:
        return {
            "gathered weights": gathered,
            "activations": activations + self.ends.kept,
            "gradients": self._earlier_gradients(),
        }

    def _gathered(self, layers: int) -> int:
        """In the compute format: all, or the root group and `layers`, one being prefetched."""
        layers = self.layers if self.keep_unsharded else min(layers, self.layers + 1)
        return self.itemsize * (self.root + layers * self.layer)

    def _earlier_gradients(self) -> int:
        """Gradients of the rows before."""
        if not self.earlier_gradients:
            return 0
        if self.keep_unsharded:
            return MASTER * (self.trained_root + self.layers * self.trained_layer)
        return MASTER * self.trained

    def _backward_ends(self) -> dict[str, int]:
        copied, own = MASTER * self.trained_root, self.itemsize * self.trained_root
        previous = MASTER * self.trained_layer
        layers = MASTER * self.layers * self.trained_layer // self.fsdp
        if self.keep_unsharded and self.several_rows:  # sums, which are reduced one by one
            own = copied
        # A vocabulary's gradient under tp is whole before it is cut.
        whole = self.itemsize * self.largest if self.tp > 1 and self.trained_root else 0
        arriving = self.itemsize * self.root + own + previous + whole
        return {"gradients": layers + max(arriving, own + copied, copied + copied // self.fsdp)}

    def _step(self) -> dict[str, int]:
        """Muon has whole matrices, orthogonal shards, and four products of the largest matrix."""
        gradients = {"gradients": MASTER * self.trained}
        if not self.matrices:
            return gradients
        elements = self.matrices + self.owned_matrices + 4 * self.largest_matrix
        return gradients | {"whole matrices": self.itemsize * elements}


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSizes:
    """A rollout engine on a rank; bytes besides the numbers of tokens."""

    weights: int
    token: int
    """Keys and values of a token."""
    gathered: int
    """The same of one layer, which decoding copies."""
    prefill: int
    """Activations of a prefill."""
    logits: int
    """Of a decode step, while it samples."""
    joined: int
    """The largest tensor that is joined of several while weights are allocated or merged."""
    buckets: int
    longest: int
    """Tokens of a full sample."""
    most: int
    """Tokens of `rollout.max_running` full samples."""
    wanted: int
    """`rollout.kv_cache_tokens`."""

    def cache_tokens(self, left: int) -> int:
        """Tokens of the KV cache where the weights leave `left` bytes; a full sample at least."""
        fits = max(left - self.logits - self.prefill, 0) // (self.token + self.gathered)
        return self.wanted or max(self.longest, min(self.most, fits))

    def prefill_arrays(self) -> dict[str, int]:
        """Besides weights and cache, while prompts are read."""
        return {"activations": self.prefill}

    def decode_arrays(self, tokens: int) -> dict[str, int]:
        """Besides weights and cache, at most while `tokens` are in the cache."""
        return {"logits": self.logits, "copied keys and values": tokens * self.gathered}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSizes:
    """Everything on a rank."""

    trained: Mapping[str, TrainSizes]
    """The trained models by role, the actor first."""
    scoring: Mapping[str, int]
    """Bytes of the weights of each role that only scores."""
    scoring_activations: int
    """Bytes of a row, in the layout of generation."""
    generation: GenerationSizes
    from_actor: Collection[str] = ()
    """Trained roles that begin as the actor."""


@dataclass(frozen=True, slots=True)
class MemoryPhase:
    """Bytes by owner."""

    name: str
    sizes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self.sizes.values())


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The phases of a rank, in a room of `capacity` bytes, `reserved` of them for other users."""

    device: str
    phases: Sequence[MemoryPhase]
    capacity: int
    reserved: int
    cache_tokens: int

    @property
    def peak(self) -> MemoryPhase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether every phase leaves what is reserved."""
        return self.peak.total + self.reserved <= self.capacity

    @property
    def impossible(self) -> bool:
        """Whether a phase is larger than all there is."""
        return self.peak.total > self.capacity

    def rows(self) -> list[tuple[str, str, str]]:
        """Phase, sum, and the sizes that make it up, the largest first; then the verdict."""
        rows = [
            (
                phase.name,
                _gib(phase.total),
                ", ".join(
                    f"{owner} {_gib(size)}"
                    for owner, size in sorted(phase.sizes.items(), key=lambda item: -item[1])
                ),
            )
            for phase in self.phases
        ]
        return [*rows, ("", "", self.verdict())]

    def verdict(self) -> str:
        """Whether it fits, and what helps where it does not."""
        room = f"{_gib(self.capacity - self.reserved)} of {_gib(self.capacity)} for it"
        peak = f"the largest phase, {self.peak.name}, needs {_gib(self.peak.total)}"
        if self.fits:
            return f"fits: a rank has {room}, and {peak}"
        return f"does not fit: a rank has {room}, and {peak}; less with {self.advice()}"

    def advice(self) -> str:
        """Settings that reduce the two largest sizes of the largest phase."""
        sizes = self.peak.sizes
        largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:2]
        return "; ".join(dict.fromkeys(KEYS[name] for name in largest if name in KEYS))

    def record(self) -> dict[str, object]:
        """As JSON data."""
        return asdict(self) | {
            "phases": {phase.name: dict(phase.sizes) for phase in self.phases},
            "totals": {phase.name: phase.total for phase in self.phases},
            "peak": self.peak.name,
            "fits": self.fits,
        }


def plan_memory(run: RunSizes, device: str, capacity: int, reserved: int) -> MemoryPlan:
    """The phases of a step on a rank of the `device` type, `cuda` or `cpu`."""
    stays = _stays(run) if device == "cpu" else {}
    gen = run.generation
    left = capacity - reserved - sum(stays.values()) - gen.weights - gen.buckets
    tokens = gen.wanted or gen.most if device == "cpu" else gen.cache_tokens(left)
    weights, cache = {"generation weights": gen.weights}, {"KV cache": tokens * gen.token}

    phases = [_phase(f"load {role}", sizes) for role, sizes in _loading(run, device).items()]
    phases.append(_phase("load rollout engine", stays, weights, cache))
    moving = {"buckets": max(gen.buckets, gen.joined)}
    phases.append(_phase("switch", stays or run.trained["actor"].state, weights, moving))
    phases.append(_phase("prefill", stays, weights, cache, gen.prefill_arrays()))
    phases.append(_phase("decode", stays, weights, cache, gen.decode_arrays(tokens)))
    row = {"activations": run.scoring_activations}
    for role, size in run.scoring.items():
        own = {} if stays else {"scoring weights": size}
        phases.append(_phase(f"score {role}", stays, weights, own, row))
    for role, sizes in run.trained.items():
        state = _sum(stays, weights) if stays else sizes.state
        phases.append(_phase(f"train {role}", state, sizes.update()))
    return MemoryPlan(device, phases, capacity, reserved, tokens)


def _stays(run: RunSizes) -> dict[str, int]:
    """What ranks on CPUs never give up."""
    stays: dict[str, int] = {}
    for sizes in run.trained.values():
        stays = _sum(stays, sizes.state)
    return _sum(stays, {"scoring weights": sum(run.scoring.values())})


def _loading(run: RunSizes, device: str) -> dict[str, dict[str, int]]:
    """What building each trained model takes.

    On CPUs the pages of the weights' file are in memory once, and count for each rank that reads
    them.
    """
    if device == "cuda":
        return {role: s.loading(role in run.from_actor) for role, s in run.trained.items()}
    loading = {}
    before: dict[str, int] = {}
    for role, sizes in run.trained.items():
        own = {
            "float32 weights": MASTER * sizes.trained,
            "frozen weights": sizes.itemsize * sizes.frozen,
        }
        before = _sum(before, own)
        loading[role] = _sum(before, {"weights file": FILE * sizes.read})
    return loading


def _phase(name: str, *sizes: Mapping[str, int]) -> MemoryPhase:
    total: dict[str, int] = {}
    for mapping in sizes:
        total = _sum(total, mapping)
    return MemoryPhase(name, {owner: size for owner, size in total.items() if size})


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in [*first, *second]}


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / 2**20:.1f} MiB"
