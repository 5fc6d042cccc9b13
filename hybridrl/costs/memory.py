"""The memory of a rank in each phase of a step, before a run: sums over sizes in bytes.

    phase         on the device
    load          the trained model's shards and its largest parameter, or the new rollout engine
    switch        training state, generation weights, two buckets
    prefill       generation weights, KV cache, activations of the prompts
    decode        generation weights, KV cache, logits or a layer's keys and values once more
    generate      vLLM's share of the device, in place of prefill and decode
    score ROLE    generation weights, the role's weights, activations of a row; the KV cache, where
                  the weights that generate score prompts of a server's clients
    train ROLE    training state, gathered weights, activations, gradients, at the largest moment
    train together  the same of all roles that one pipeline plan trains, at once
    save ROLE     training state, one parameter whole
    push actor    training state, an array of weights for a rank that generates alone

Ranks on GPUs offload what a phase does not need, but for trained roles that can stay in all of
them (`MemoryPlan.staying`). Ranks on CPUs keep all of it: there the training state of every role
and the generation weights are in each phase. A pool of ranks without the actor neither switches nor
generates. Keys and values of conversations that give way are in host memory, on CPUs in the phases
of generation. For ranks on GPUs they count apart, with weights and moments of the roles that wait
there (`MemoryPlan.on_host`). So do pushed weights (`costs.push_memory`). A model that reads images
has its tower in all phases but the first loads (`costs.image_memory`).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from hybridrl.costs.generation_memory import GenerationSizes
from hybridrl.costs.image_memory import ENGINE_FEATURES, ImageSizes
from hybridrl.costs.push_memory import ADAPTERS, LOADED, PACKED, ReceivedSizes, SentSizes
from hybridrl.costs.train_memory import MASTER, MOMENTS, TrainSizes

GIB = 2**30
TOGETHER = "together"
WAITING = "keys and values of waiting conversations"
SCORING = "scoring weights"
KEPT_IDS, KEPT_ID_ROWS = "kept ids of samples", "kept ids of rows"
FILE = 2
"""Bytes of a parameter in a file of bfloat16 weights."""
LEFT_FOR = {
    "cuda": "communicators, CUDA's context, what the allocator cannot give back",
    "cpu": "Python and its libraries",
}
"""What is not counted, by device: a margin is left free for it."""


@dataclass(frozen=True, slots=True)
class ScoringSizes:
    """A role that only scores, in bytes: its weights, and the activations of a row.

    `kept_ids` are those of a row (`KeptIdSizes`).
    """

    weights: int
    activations: int
    kept_ids: int = 0


@dataclass(frozen=True, slots=True)
class KeptIdSizes:
    """The ids that truncated sampling has kept (`rollout.sampling_replay`), in bytes.

    Those of a step's `samples` are on the host, those of all rows of an update on the device.
    """

    samples: int = 0
    trained: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSizes:
    """Everything on a rank of a pool."""

    trained: Mapping[str, TrainSizes]
    """The trained models by role, the actor first."""
    scoring: Mapping[str, ScoringSizes]
    """Each role that only scores."""
    generation: GenerationSizes | None
    """The rollout engine, where the pool has the actor."""
    from_actor: Collection[str] = ()
    """Trained roles that begin as the actor."""
    together: Sequence[Collection[str]] = ()
    """Trained roles that are on the device at once (`trainer.fuse_updates`)."""
    staying: Sequence[str] | None = None
    """Trained roles that are never offloaded; None: those for which there is room."""
    sent: SentSizes | None = None
    """Weights that the pool pushes to instances on ranks of their own."""
    received: ReceivedSizes | None = None
    """Weights that come so, where the pool generates alone."""
    images: ImageSizes | None = None
    """Images of prompts, for a model that reads them."""
    kept_ids: KeptIdSizes = KeptIdSizes()
    """The ids that truncated sampling has kept, where training knows them."""


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
    """The phases of a rank, in a room of `capacity` bytes, `reserved` of them for other users.

    `cache_tokens` of the KV cache; None where nothing generates. `advice` names settings that
    reduce the largest phase. `on_host` are bytes by owner that a rank on a GPU has in its node's
    memory while it generates, when all roles wait there. Those of `staying` never leave the device;
    the values are their bytes.
    """

    device: str
    phases: Sequence[MemoryPhase]
    capacity: int
    reserved: int
    cache_tokens: int | None
    advice: str = ""
    on_host: Mapping[str, int] = field(default_factory=dict)
    staying: Mapping[str, int] = field(default_factory=dict)

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
        """Phase, sum, and the sizes that make it up, the largest first.

        Then what every phase leaves free, and the verdict.
        """
        rows = [(phase.name, _gib(phase.total), _owners(phase.sizes)) for phase in self.phases]
        if self.staying:
            names = " and ".join(self.staying)
            text = f"weights and moments of {names} are on the device in every phase"
            rows.append(("stays", _gib(sum(self.staying.values())), text))
        if self.on_host:
            rows.append(("on the host", _gib(sum(self.on_host.values())), _owners(self.on_host)))
        margin = ("besides", _gib(self.reserved), f"left for {LEFT_FOR[self.device]}")
        return [*rows, margin, ("", "", self.verdict())]

    def verdict(self) -> str:
        """Whether it fits, and what helps where it does not."""
        room = f"{_gib(self.capacity - self.reserved)} of {_gib(self.capacity)} for it"
        peak = f"the largest phase, {self.peak.name}, needs {_gib(self.peak.total)}"
        if self.fits:
            return f"fits: a rank has {room}, and {peak}"
        help_ = f"; less with {self.advice}" if self.advice else ""
        return f"does not fit: a rank has {room}, and {peak}{help_}"

    def record(self) -> dict[str, object]:
        """As JSON data."""
        return asdict(self) | {
            "phases": {phase.name: dict(phase.sizes) for phase in self.phases},
            "totals": {phase.name: phase.total for phase in self.phases},
            "peak": self.peak.name,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The plan of a rank of each pool, by the pool's name, and the attention that it assumes."""

    pools: Mapping[str, MemoryPlan]
    attention: str
    """A value of `model.attention` besides auto, in training and scoring."""
    reason: str
    """Why."""
    node_host: int = 0
    """Bytes that all ranks of a node on GPUs have in its memory, of the node that has most."""
    activations: str = ""
    """What `trainer.activations=auto` is here, and why."""

    @property
    def fits(self) -> bool:
        """Whether it fits in every pool."""
        return all(plan.fits for plan in self.pools.values())

    @property
    def impossible(self) -> bool:
        """Whether it cannot fit in some pool."""
        return any(plan.impossible for plan in self.pools.values())

    def rows(self) -> list[tuple[str, str, str]]:
        """Return the rows of each pool, under its name if there are several; then the attention."""
        rows = []
        for name, plan in self.pools.items():
            rows += [(f"pool {name}", "", "")] if len(self.pools) > 1 else []
            rows += plan.rows()
        if self.node_host:
            rows.append(("a node's host", _gib(self.node_host), "of all its ranks, at most"))
        if self.activations:
            rows.append(("", "", self.activations))
        return [*rows, ("", "", f"attention: {self.attention}, {self.reason}")]

    def verdict(self) -> str:
        """Return the verdict of the only pool, or of each pool that the run does not fit in.

        If it fits in all, each pool has a verdict.
        """
        if len(self.pools) == 1:
            return next(iter(self.pools.values())).verdict()
        plans = {name: p for name, p in self.pools.items() if self.fits or not p.fits}
        return "; ".join(f"in pool {name} it {plan.verdict()}" for name, plan in plans.items())

    def record(self) -> dict[str, object]:
        """Return JSON data: the record of the only pool, or a record of each of the `pools`."""
        records = {name: plan.record() for name, plan in self.pools.items()}
        plans = {"pools": records} if len(records) > 1 else next(iter(records.values()))
        ends = {"attention": self.attention, "fits": self.fits, "node_host": self.node_host}
        auto = {"activations": self.activations} if self.activations else {}
        return plans | ends | auto


def plan_memory(run: PoolSizes, device: str, capacity: int, reserved: int) -> MemoryPlan:
    """The phases of a step on a rank of the `device` type, `cuda` or `cpu`."""
    updates = {role: trained.update() for role, trained in run.trained.items()}
    room = capacity - reserved

    def plan(staying: Sequence[str]) -> MemoryPlan:
        return _planned(run, updates, device, capacity, reserved, staying)

    if device == "cpu":
        return plan(())
    if run.staying is not None:
        return plan(run.staying)
    best = all_leave = plan(())
    for role in run.trained:
        more = plan([*best.staying, role])
        pairs = zip(more.phases, all_leave.phases, strict=True)
        if all(x.total <= max(room, y.total) for x, y in pairs) and _serves(run, room, more):
            best = more
    return best


def _serves(run: PoolSizes, room: int, plan: MemoryPlan) -> bool:
    """Whether the KV cache has room enough beside the roles that stay."""
    if run.generation is None:
        return True
    alone = room - run.generation.weights - run.generation.buckets
    images = _image_bytes(run, run.generation)
    return run.generation.serves(alone - reserved_bytes(run, plan.staying), alone - images)


def reserved_bytes(run: PoolSizes, staying: Collection[str]) -> int:
    """Bytes that the KV cache leaves to images and to roles that stay.

    These have their state, and what saving takes: a checkpoint may be written while samples wait
    for their next step.
    """
    if run.generation is None:
        return 0
    images = _image_bytes(run, run.generation)
    if not staying:
        return images
    trained = [run.trained[role] for role in staying]
    saved = max(sum(sizes.saving().values()) for sizes in trained)
    states = sum(sum(sizes.state.values()) for sizes in trained)
    return images + states + max(0, saved - run.generation.idle)


def _image_bytes(run: PoolSizes, generation: GenerationSizes) -> int:
    """Bytes that the KV cache leaves to images."""
    return run.images.beside_cache(generation.prefill) if run.images else 0


def _planned(
    run: PoolSizes,
    updates: Mapping[str, Mapping[str, int]],
    device: str,
    capacity: int,
    reserved: int,
    staying: Sequence[str],
) -> MemoryPlan:
    """The plan where `staying` are never offloaded; with the largest moments of `updates`."""
    stays: dict[str, int] = {}
    images = run.images.stays if run.images else {}
    prefill, scored, trained_rows = run.images.features if run.images else (0, 0, 0)
    samples = {KEPT_IDS: run.kept_ids.samples}
    if device == "cpu":
        base = run.received.stays if run.received else {}
        stored = run.sent.stored if run.sent else {}
        stays = _total(_states(run, run.trained), _scoring_weights(run), base, stored)
        stays = _total(stays, images, samples)

    def of_others(*roles: str) -> dict[str, int]:
        """What stays of other roles than these."""
        if stays:
            return {}
        return _total(images, _states(run, [role for role in staying if role not in roles]))

    def reading(features: int, activations: int) -> Mapping[str, int]:
        """What the images of a phase take more than its activations."""
        return run.images.reading(features, activations) if run.images else {}

    phases = []
    for number, (role, sizes) in enumerate(_loading(run, device).items()):
        before = [name for name in list(run.trained)[:number] if name in staying]
        phases.append(_phase(f"load {role}", sizes, {} if stays else _weights(run, before)))
    gen, weights, tokens, waiting_bytes = run.generation, {}, None, 0
    if gen is not None:
        weights = {"generation weights": gen.weights}
        if run.received is not None and run.received.adapters:
            weights[ADAPTERS] = run.received.adapters
        left = None
        if device == "cuda":
            taken = sum(weights.values()) + gen.buckets + reserved_bytes(run, staying)
            left = capacity - reserved - taken
        tokens = gen.cache_tokens(left)
        if run.images is not None and run.images.engine:
            weights[ENGINE_FEATURES] = run.images.engine
        loaded = stays or _weights(run, {"actor"}.intersection(staying))
        phases.append(_phase("load rollout engine", loaded, weights, gen.at_start(left)))
        if run.received is None:
            state = stays or _sum(run.trained["actor"].state, of_others("actor"))
            phases.append(_phase("switch", state, weights, {"buckets": gen.moving}))
        else:  # weights come from host memory, without buckets
            moving = {"joined weights": gen.joined}
            arrays = {LOADED: run.received.arrays if device == "cpu" else 0}
            cache = gen.at_start(left)
            phases.append(_phase("load weights", stays or images, weights, cache, moving, arrays))
        waiting_bytes = gen.on_host(left)
        waiting = {WAITING: waiting_bytes if device == "cpu" else 0}
        for name, own in gen.phases(left).items():
            read = reading(prefill, gen.prefill) if name == "prefill" else {}
            phases.append(_phase(name, stays or of_others(), weights, own, waiting, read))
    for role, scorer in run.scoring.items():
        moved = {} if stays else {SCORING: scorer.weights}
        # The weights that generate score prompts while samples wait for their next token.
        cache = gen.at_start(left) if gen is not None and role == "actor" else {}
        row = {"activations": scorer.activations, KEPT_ID_ROWS: scorer.kept_ids}
        read = reading(scored, scorer.activations)
        owners = weights, moved, cache, row, read
        phases.append(_phase(f"score {role}", stays or of_others(), *owners))
    for role, trained in run.trained.items():
        state = _sum(stays, weights) if stays else _sum(trained.state, of_others(role))
        rows = reading(trained_rows, sum(updates[role].values()))
        ids = {KEPT_ID_ROWS: run.kept_ids.trained if role == "actor" else 0}
        phases.append(_phase(f"train {role}", state, updates[role], rows, ids))
        phases.append(_phase(f"save {role}", state, trained.saving()))
        if role == "actor" and run.sent is not None:
            arrays = run.sent.packed if device == "cpu" else {PACKED: run.sent.largest}
            phases.append(_phase("push actor", state, arrays))
    for roles in run.together:
        states = [_sum(stays, weights)] if stays else [_states(run, roles), of_others(*roles)]
        ids = {KEPT_ID_ROWS: run.kept_ids.trained if "actor" in roles else 0}
        phases.append(_phase(f"train {TOGETHER}", *states, *(updates[role] for role in roles), ids))
    on_host: Mapping[str, int] = {}
    if device == "cuda":
        leaving = _states(run, [role for role in run.trained if role not in staying])
        moved = _sum(leaving, _scoring_weights(run))
        on_host = _total(moved, {WAITING: waiting_bytes}, samples, _pushed_on_host(run))
    sizes_of = {role: sum(run.trained[role].state.values()) for role in staying}
    return MemoryPlan(device, phases, capacity, reserved, tokens, on_host=on_host, staying=sizes_of)


def _pushed_on_host(run: PoolSizes) -> dict[str, int]:
    """What pushed weights take in the memory of a GPU's node."""
    sent, received = run.sent, run.received
    return _total(
        {**sent.stored, **sent.packed} if sent else {},
        {LOADED: received.arrays, **received.stays} if received else {},
    )


def _states(run: PoolSizes, roles: Collection[str]) -> dict[str, int]:
    """Weights and moments of trained roles."""
    states: dict[str, int] = {}
    for role in roles:
        states = _sum(states, run.trained[role].state)
    return states


def _weights(run: PoolSizes, roles: Collection[str]) -> dict[str, int]:
    """Weights of trained roles, whose moments no update has made yet."""
    states = _states(run, roles)
    return {owner: size for owner, size in states.items() if owner != MOMENTS}


def _scoring_weights(run: PoolSizes) -> dict[str, int]:
    return {SCORING: sum(s.weights for s in run.scoring.values())}


def _loading(run: PoolSizes, device: str) -> dict[str, dict[str, int]]:
    """What building each trained model takes.

    An actor with adapters then moves the frozen weights to generation's layout in host memory. On
    CPUs the pages of the weights' file are in memory once, and count for each rank that reads them.
    """
    if device == "cuda":
        loading = {role: s.loading(role in run.from_actor) for role, s in run.trained.items()}
        if run.generation is not None and run.generation.passing and "actor" in loading:
            passing = {"generation weights": run.generation.passing}
            loading["actor"] = _sum(loading["actor"], passing)
        return loading
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
    return MemoryPhase(name, _total(*sizes))


def _total(*sizes: Mapping[str, int]) -> dict[str, int]:
    """The sums by owner, of owners that have any."""
    total: dict[str, int] = {}
    for mapping in sizes:
        total = _sum(total, mapping)
    return {owner: size for owner, size in total.items() if size}


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {name: first.get(name, 0) + second.get(name, 0) for name in [*first, *second]}


def _owners(sizes: Mapping[str, int]) -> str:
    """The largest first."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    return ", ".join(f"{owner} {_gib(size)}" for owner, size in ordered)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB // 10 else f"{size / 2**20:.1f} MiB"
