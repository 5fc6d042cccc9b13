"""RLHFuse's iterations under the planner's costs: fused updates, and both fusions together.

Setting: see `published.py`. Pipelines are those of FlexFusion, RLHFuse's public code: 4, 8 and 16
stages for 13B, 33B and 65B, tensor parallelism within a node. A mini-batch has 64 samples (arXiv
2409.13221, section 7), each a micro-batch. So a pipeline has as many as in FlexFusion's problems.

Not published, and so assumed: lengths below the limit, kernels and links as in `accelerators.py`.
Separate updates are 1F1B. No number is fitted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hybridrl.config import FusedScheduleConfig, ScheduleConfig, SerialScheduleConfig
from hybridrl.pipelines.evaluation import evaluate, lower_bound
from hybridrl.pipelines.search import search
from hybridrl.planner.accelerators import ACCELERATORS, MODELS, layer_roofline
from hybridrl.planner.fused_plans import shared_problem
from hybridrl.planner.mapped_work import MappedWork, step_samples
from hybridrl.planner.mapping import (
    ACTOR,
    DeviceMapping,
    GenLayout,
    PlannedRole,
    TrainLayout,
    cluster_of,
)
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.published import LIMITS, PAIRS, PUBLISHED_ITERATION, paper_setting
from hybridrl.planner.schedule import Outcome, mapped_setting, replay
from hybridrl.planner.workload import Workload

PUBLISHED_TRAINING = (1.2, 1.3)
"""RLHFuse-Base over RLHFuse in training, by intra-stage fusion (section 7)."""

_STAGES = {"13b": 4, "33b": 8, "65b": 16}
_NODES, _PER_NODE, _MINI_BATCHES = 32, 8, 8
_ROUNDS = 1


@dataclass(frozen=True, slots=True)
class FusedIteration:
    """One pair of models under one limit. Ratios are separate over fused: above 1 is sooner."""

    actor: str
    critic: str
    limit: int
    training: float
    """Both updates."""
    training_bound: float
    """No plan saves more: by the lower bound of the fused pipelines."""
    front: float
    """All that comes before the updates, by inter-stage fusion."""
    iteration: float
    """All of it with both fusions."""


def rlhfuse_iterations(
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[FusedIteration]:
    """Every pair and limit; `on_progress` gets the cases done and their total."""
    cases = [(*pair, limit) for pair in PAIRS for limit in LIMITS]
    compared = []
    for done, case in enumerate(cases, 1):
        compared.append(compare(*case))
        on_progress(done, len(cases))
    return compared


def compare(actor: str, critic: str, limit: int) -> FusedIteration:
    """One pair of models, responses of at most `limit` tokens."""
    setting = paper_setting(actor, critic, limit)
    accelerator = ACCELERATORS["hopper-200g"]
    costs = MappingCosts(layer_roofline(accelerator), cluster_of(accelerator, _NODES, _PER_NODE))
    roles = _roles(actor, critic)
    layouts = {ACTOR: _layout(actor), "critic": _layout(critic)}
    samples = step_samples(setting.workload, 1)
    batch = samples[: len(samples) // _MINI_BATCHES]
    trained = [role for role in roles if role.trained]

    # One mini-batch of each, apart and together.
    apart = 0.0
    for role in trained:
        layout, ranks = layouts[role.name], range(costs.cluster.ranks)
        pairs = costs.pipelines(role, layout, ranks, batch)
        apart += max(evaluate(*pair).seconds for pair in pairs)
    ranks = range(costs.cluster.ranks)
    steps = sum(costs.step_s(role, layouts[role.name], ranks) for role in trained)
    problem = shared_problem(costs, trained, layouts, ranks, batch)
    fused = search(problem, rounds=_ROUNDS).times.seconds
    bound = lower_bound(problem)

    # The whole iteration: generation and inference by the schedules, training as above.
    serial, streamed = (
        _replayed(costs, roles, layouts, setting.max_held, setting.workload, schedule)
        for schedule in (SerialScheduleConfig(), FusedScheduleConfig())
    )
    ways = sum(_ways_s(costs, role, layouts[role.name]) for role in trained)
    trains = [ways + _MINI_BATCHES * (steps + seconds) for seconds in (apart, fused)]
    before = [
        one.step_s - sum(s for name, s in one.stages.items() if name.startswith("update_"))
        for one in (serial, streamed)
    ]
    iterations = [own + train for own, train in zip(before, trains, strict=True)]
    return FusedIteration(
        actor,
        critic,
        limit,
        training=trains[0] / trains[1],
        training_bound=trains[0] / (ways + _MINI_BATCHES * (steps + bound)),
        front=before[0] / before[1],
        iteration=iterations[0] / iterations[1],
    )


def _roles(actor: str, critic: str) -> list[PlannedRole]:
    own, other = MODELS[actor], MODELS[critic]
    return [
        PlannedRole(name=ACTOR, shape=own, trained=True),
        PlannedRole(name="critic", shape=other, trained=True, passes=("values",), value_head=True),
        PlannedRole(name="reference", shape=own, passes=("reference",)),
        PlannedRole(name="reward", shape=other, passes=("reward",), value_head=True),
    ]


def _layout(model: str) -> TrainLayout:
    stages = _STAGES[model]
    return TrainLayout(
        pp=stages,
        fsdp=_NODES // stages,
        tp=_PER_NODE,
        sequence_parallel=True,
        micro_batch_tokens=1,  # each sample is a row
    )


def _ways_s(costs: MappingCosts, role: PlannedRole, layout: TrainLayout) -> float:
    """Onto the device and off."""
    return costs.activate_s(role, layout) + costs.deactivate_s(role, layout)


def _replayed(
    costs: MappingCosts,
    roles: Sequence[PlannedRole],
    layouts: dict[str, TrainLayout],
    max_held: int,
    workload: Workload,
    schedule: ScheduleConfig,
) -> Outcome:
    """A step of the schedule, all roles on all ranks, instances of a node."""
    mapping = DeviceMapping(
        pools={ACTOR: tuple(role.name for role in roles)},
        ranks={ACTOR: costs.cluster.ranks},
        train={name: replace(x, micro_batch_tokens=8192) for name, x in layouts.items()},
        gen=GenLayout(tp=_PER_NODE),
        schedule=schedule,
    )
    work = MappedWork(costs=costs, mapping=mapping, roles=roles, mini_batches=_MINI_BATCHES)
    return replay(mapped_setting(work, workload, 1, max_held=max_held, decode_steps=16), schedule)


def table(compared: Sequence[FusedIteration]) -> list[tuple[str, ...]]:
    """A header and a line for each case."""
    head = ("actor", "critic", "limit", "training", "at most", "front", "iteration")
    lines: list[tuple[str, ...]] = [head]
    for one in compared:
        ratios = (one.training, one.training_bound, one.front, one.iteration)
        texts = (f"{ratio:.2f}" for ratio in ratios)
        lines.append((one.actor, one.critic, str(one.limit), *texts))
    return lines


def remarks(compared: Sequence[FusedIteration]) -> list[str]:
    """The ranges beside the published ones."""

    def span(values: Sequence[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}"

    training = span([one.training for one in compared])
    iteration = span([one.iteration for one in compared])
    low, high = PUBLISHED_TRAINING
    least, most = PUBLISHED_ITERATION
    return [
        "how many times sooner with fusion",
        f"training: {training} (published: {low} to {high})",
        f"iterations with both fusions: {iteration} (published: {least} to {most})",
        "published: arXiv 2409.13221, section 7; docs/planner.md has what is assumed",
    ]
