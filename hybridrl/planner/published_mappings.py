"""HybridFlow's setting under the search, with its published placements.

Setting (arXiv 2409.19256, section 8): 16 nodes of 8 A100 with 80 GB, 200 Gb/s a GPU between nodes.
PPO with a critic, a reference and a reward model of the actor's size, unless it is said. A step has
1,024 prompts of 1,024 tokens with a response of 1,024 tokens each.

Not published, and so assumed: one epoch of eight mini-batches, and the efficiency of kernels and
links, which is that of `accelerators.py`. The engines are those of this project: FSDP, its
micro-batches, and every role off the device that does not compute. No number is fitted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridrl.config import ScheduleConfig, SerialScheduleConfig
from hybridrl.planner.accelerators import ACCELERATORS, MODELS, layer_roofline
from hybridrl.planner.fitting_layouts import DoesNotFit
from hybridrl.planner.mapping import ACTOR, GenLayout, PlannedRole, cluster_of
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.mapping_memory import MappingMemory, StepLimits
from hybridrl.planner.mapping_price import MappingPrices
from hybridrl.planner.mapping_search import MappingResults, MappingSearch, PricedMapping
from hybridrl.planner.memory import GIB
from hybridrl.planner.model_shape import ModelShape
from hybridrl.planner.search_space import Pools, SearchSpace
from hybridrl.planner.workload import Group, Shape, Workload, read_workload

_PROMPTS, _PROMPT, _RESPONSE, _MINI_BATCHES = 1024, 1024, 1024, 8
_PER_NODE, _CAPACITY = 8, 80 * GIB
_RESERVED = round(0.04 * _CAPACITY)  # as `device_margin` leaves
_WORKLOAD = Workload(tuple(Group(_PROMPT, (_RESPONSE,)) for _ in range(_PROMPTS)), _PROMPTS, 1)
_SERIAL = (SerialScheduleConfig(),)

# Llama 2 (arXiv 2307.09288) 70B; CodeLlama 34B (arXiv 2308.12950), by its config.json.
_MODELS = {
    "7b": MODELS["7b"],
    "13b": MODELS["13b"],
    "34b": ModelShape(48, 8192, 22_016, 64, 8, 32_000),
    "70b": ModelShape(80, 8192, 28_672, 64, 8, 32_000),
}

PLACEMENTS: dict[str, Pools] = {
    "colocate": {"actor": ("actor", "critic", "reference", "reward")},
    "split": {"actor": ("actor", "reference"), "critic": ("critic", "reward")},
    "standalone": {name: (name,) for name in ("actor", "critic", "reference", "reward")},
}

PUBLISHED = {
    ("13b", 16): "colocate",
    ("13b", 32): "colocate",
    ("13b", 64): "colocate",
    ("13b", 96): "split",
    ("13b", 128): "standalone",
    ("34b", 32): "colocate",
    ("34b", 64): "colocate",
    ("34b", 96): "split",
    ("34b", 128): "split",
}
"""The best placement by model and GPUs (section 8.3)."""
PUBLISHED_STANDALONE = {"actor": 64, "critic": 32, "reference": 16, "reward": 16}
"""Its allocation for 13B on 128 GPUs, in whatever order of the last three."""
PUBLISHED_CRITIC_ALONE = 64
"""GPUs of the critic alone: a 13B actor and reference, a 70B critic and reward model, 128 GPUs."""
PUBLISHED_TP = {"7b": (2, 0.603), "13b": (4, 0.364)}
"""The best tensor parallelism of generation on 16 GPUs; the time that it saves over 8 (8.4)."""


@dataclass(frozen=True, slots=True)
class PlacementCase:
    """A case: seconds of a step by placement; None where it does not fit."""

    actor: str
    critic: str
    gpus: int
    seconds: dict[str, float | None]
    ranks: dict[str, dict[str, int]]
    best: str
    published: str


@dataclass(frozen=True, slots=True)
class GenerationCase:
    """Seconds of generation by tensor parallelism on 16 GPUs."""

    model: str
    seconds: dict[int, float]
    best: int
    saved: float
    """Of the time under a tensor parallelism of 8."""
    published: tuple[int, float]


def hybridflow(
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> tuple[list[PlacementCase], list[GenerationCase]]:
    """Every published case; `on_progress` gets the cases done and their total."""
    placed = []
    total = len(PUBLISHED) + 1
    for done, ((model, gpus), published) in enumerate(PUBLISHED.items(), 1):
        placed.append(place(model, model, gpus, published))
        on_progress(done, total)
    placed.append(place_any("13b", "70b", 128, f"critic alone on {PUBLISHED_CRITIC_ALONE}"))
    on_progress(total, total)
    return placed, [generate(model) for model in PUBLISHED_TP]


def place(actor: str, critic: str, gpus: int, published: str) -> PlacementCase:
    """The three named placements."""
    best = {name: _best(actor, critic, gpus, [pools]) for name, pools in PLACEMENTS.items()}
    return _case(actor, critic, gpus, best, published)


def place_any(actor: str, critic: str, gpus: int, published: str) -> PlacementCase:
    """One pool, the split, and the critic alone, which is published as the best."""
    pair = PLACEMENTS["split"]
    alone = {"actor": ("actor", "reference", "reward"), "critic": ("critic",)}
    named = {"colocate": PLACEMENTS["colocate"], "split": pair, "critic alone": alone}
    best = {name: _best(actor, critic, gpus, [pools]) for name, pools in named.items()}
    return _case(actor, critic, gpus, best, published)


def _case(
    actor: str, critic: str, gpus: int, best: dict[str, PricedMapping | None], published: str
) -> PlacementCase:
    seconds = {name: None if one is None else one.seconds.step_s for name, one in best.items()}
    ranks = {name: dict(one.mapping.ranks) for name, one in best.items() if one}
    quickest = min((s, name) for name, s in seconds.items() if s is not None)[1]
    return PlacementCase(actor, critic, gpus, seconds, ranks, quickest, published)


def generate(model: str) -> GenerationCase:
    """Tensor parallelism of generation on 16 GPUs, colocated, in training's own best layout."""
    search = _search(model, model, 16, [PLACEMENTS["colocate"]])
    actor = search.roles[0]
    seconds = {}
    for tp in (1, 2, 4, 8):
        gen = GenLayout(tp=tp)
        if search.memory.samples_held(actor, gen):
            seconds[tp] = search.prices.generation_s(gen, range(16))
    best = min(seconds, key=lambda tp: seconds[tp])
    saved = 1 - seconds[best] / seconds[8]
    return GenerationCase(model, seconds, best, saved, PUBLISHED_TP[model])


def all_placements(
    gpus: int,
    number: int = 1,
    *,
    schedules: Sequence[ScheduleConfig] = _SERIAL,
    workload: Workload = _WORKLOAD,
    fuses: bool = False,
    placement: str | None = None,
) -> MappingResults:
    """13B models under all 15 partitions into pools: what a search takes, in `seconds`.

    For the best `number` of mappings. `fuses` adds updates in one plan, with layouts that pay only
    together. `placement` is one of `PLACEMENTS` in place of all.
    """
    allowed = None if placement is None else [PLACEMENTS[placement]]
    search = _search("13b", "13b", gpus, allowed, schedules, workload, fuses=fuses)
    return search.run(number, budget_s=600.0)


def long_tailed() -> Workload:
    """Of responses up to eight times the median."""
    lengths = f"lognormal:median={_RESPONSE // 8},p99={_RESPONSE}"
    shape = Shape(
        prompts_per_step=_PROMPTS,
        group_size=1,
        num_steps=1,
        prompt_tokens=_PROMPT,
        max_tokens=_RESPONSE,
    )
    workload = read_workload(lengths, shape)
    return replace(workload, groups=workload.groups[:_PROMPTS])


def _best(actor: str, critic: str, gpus: int, allowed: Sequence[Pools]) -> PricedMapping | None:
    try:
        result = _search(actor, critic, gpus, allowed).run(1, budget_s=120.0)
    except DoesNotFit:
        return None
    return result.best[0] if result.best else None


def _search(
    actor: str,
    critic: str,
    gpus: int,
    allowed: Sequence[Pools] | None,
    schedules: Sequence[ScheduleConfig] = _SERIAL,
    workload: Workload = _WORKLOAD,
    *,
    fuses: bool = False,
) -> MappingSearch:
    """Of the `allowed` placements; None: of all."""
    accelerator = ACCELERATORS["a100"]
    own, other = _MODELS[actor], _MODELS[critic]
    roles = [
        PlannedRole(name=ACTOR, shape=own, trained=True),
        PlannedRole(name="critic", shape=other, trained=True, passes=("values",), value_head=True),
        PlannedRole(name="reference", shape=own, passes=("reference",)),
        PlannedRole(name="reward", shape=other, passes=("reward",), value_head=True),
    ]
    cluster = cluster_of(accelerator, gpus // _PER_NODE, _PER_NODE)
    memory = MappingMemory(
        limits=StepLimits(
            prompt_tokens=_PROMPT,
            new_tokens=_RESPONSE,
            samples=_PROMPTS,
            mini_batches=_MINI_BATCHES,
        ),
        capacity=_CAPACITY,
        reserved=_RESERVED,
    )
    prices = MappingPrices(
        MappingCosts(layer_roofline(accelerator), cluster),
        memory,
        roles,
        workload,
        mini_batches=_MINI_BATCHES,
    )

    def pools(partition: Sequence[Sequence[str]]) -> Pools | None:
        if allowed is None:
            return {names[0]: tuple(names) for names in partition}
        sets = {frozenset(names) for names in partition}
        same = (one for one in allowed if {frozenset(names) for names in one.values()} == sets)
        return next(same, None)

    space = SearchSpace(
        pools=pools,
        schedules=schedules,
        micro_batch_tokens=(4096, 8192, 16_384),
        fuses=fuses,
    )
    return MappingSearch(roles, prices, memory, gpus, space)


def table(placed: Sequence[PlacementCase]) -> list[tuple[str, ...]]:
    """A header and a line for each case."""
    names = list(dict.fromkeys(name for one in placed for name in one.seconds))
    lines: list[tuple[str, ...]] = [("actor", "critic", "GPUs", *names, "best", "published")]
    for one in placed:
        seconds = [one.seconds.get(name) for name in names]
        texts = ["-" if s is None else f"{s:.4g}" for s in seconds]
        best = f"{one.best} {' + '.join(map(str, one.ranks[one.best].values()))}"
        lines.append((one.actor, one.critic, str(one.gpus), *texts, best, one.published))
    return lines


def remarks(placed: Sequence[PlacementCase], generated: Sequence[GenerationCase]) -> list[str]:
    """Allocations, generation, and what the columns are."""
    lines = ["seconds of a step by placement, each with its best allocation and layouts"]
    for one in placed:
        if (one.actor, one.critic, one.gpus) == ("13b", "13b", 128):
            lines.append(
                f"standalone of 13B on 128 GPUs: {_allocation(one.ranks['standalone'])}"
                f" (published: {_allocation(PUBLISHED_STANDALONE)})"
            )
        if "critic alone" in one.ranks:
            lines.append(
                f"13B with a 70B critic alone: {_allocation(one.ranks['critic alone'])}"
                f" (published: critic {PUBLISHED_CRITIC_ALONE})"
            )
    for case in generated:
        seconds = ", ".join(f"tp {tp} {s:.3g} s" for tp, s in case.seconds.items())
        tp, saved = case.published
        lines.append(
            f"generation of {case.model} on 16 GPUs: {seconds}; best tp {case.best}, "
            f"{case.saved:.1%} less than 8 (published: tp {tp}, {saved:.1%})"
        )
    return [*lines, "published: arXiv 2409.19256, section 8; docs/planner.md has what is assumed"]


def _allocation(ranks: Mapping[str, int]) -> str:
    return ", ".join(f"{pool} {number}" for pool, number in ranks.items())
