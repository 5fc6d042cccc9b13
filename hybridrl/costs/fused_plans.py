"""Seconds of several roles' updates, or forward passes, as one pipeline plan on the same ranks.

Updates: RLHFuse (arXiv 2409.13221, section 5). Forward passes: Optimus (arXiv 2408.03505). Every
other role runs in the other direction, as in runs (`engines.train.fused_update`).
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hybridrl.costs.mapping import PlannedRole, SampleTotals, TrainLayout
from hybridrl.costs.model import CostModel, SampleLengths, even_rows
from hybridrl.layout.fsdp_groups import stays_unsharded
from hybridrl.pipelines.evaluation import lower_bound
from hybridrl.pipelines.problem import PipelinedModel, PipelineProblem

Layouts = Mapping[str, TrainLayout]
"""By role."""

OVER_BOUND = 1.02
"""A plan's seconds over the lower bound of its problem. In the short time that a run has, searches
end there (tests/costs/test_fused_plans.py)."""


def can_share_a_plan(roles: Sequence[PlannedRole], layouts: Layouts) -> bool:
    """Whether these roles may train in one plan, and some pipeline has gaps to fill.

    As runs decide it (`preflight.fused_updates`): one tp, neither ep nor cp, and no large model
    without a pipeline.
    """
    own = [layouts[role.name] for role in roles]
    if len(roles) < 2 or len({layout.tp for layout in own}) > 1:
        return False
    if any(layout.ep * layout.cp > 1 for layout in own):
        return False
    kept = [stays_unsharded(r.shape.parameters, x.pp) for r, x in zip(roles, own, strict=True)]
    return any(layout.pp > 1 for layout in own) and all(kept)


def shared_problem(
    costs: CostModel,
    roles: Sequence[PlannedRole],
    layouts: Layouts,
    ranks: range,
    samples: SampleLengths,
    trains: bool = True,
    own: Mapping[str, SampleLengths] | None = None,
) -> PipelineProblem:
    """The pipelines of the ranks that have most work, of one optimizer step or of one pass.

    `own` has the samples of roles that train on others. Ranks whose pipelines meet are a problem.
    Example: pp 4 on 8 ranks beside pp 2 has two of them. Each has one pipeline of the first role
    and two of the second.
    """
    tp = layouts[roles[0].name].tp
    widths = [layouts[role.name].data_ranks for role in roles]
    apart = math.gcd(*widths)
    groups: list[list[PipelinedModel]] = [[] for _ in range(apart)]
    nbytes: dict[str, float] = {}
    for number, (role, width) in enumerate(zip(roles, widths, strict=True)):
        layout = layouts[role.name]
        totals = SampleTotals.of((own or {}).get(role.name, samples))
        rows = even_rows(layout, totals)
        nbytes[role.name] = costs.message_bytes(role, layout, rows.work[0])
        (model,) = costs.pipeline(role, layout, ranks, rows, trains)[0].models
        for index in range(width):
            stages = model.ranks
            if number % 2:
                stages = tuple(layout.pp - 1 - stage for stage in stages)
            places = tuple((stage * width + index) // apart for stage in stages)
            groups[index % apart].append(replace(model, ranks=places))
    problems = []
    for index, models in enumerate(groups):
        starts = range(index * tp, len(ranks), apart * tp)
        sends_s = _sends(costs, models, nbytes, [ranks[start : start + tp] for start in starts])
        problems.append(PipelineProblem(models=models, num_ranks=len(starts), sends_s=sends_s))
    return max(problems, key=lower_bound)


def _sends(
    costs: CostModel,
    models: Sequence[PipelinedModel],
    nbytes: Mapping[str, float],
    places: Sequence[range],
) -> list[list[float]]:
    """Seconds of the messages between places of neighbouring chunks, each way; `nbytes` by role."""
    sends_s = [[0.0] * len(places) for _ in places]
    for model in models:
        for a, b in itertools.pairwise(model.ranks):
            seconds = costs.links.between(places[a], places[b]).send_s(nbytes[model.name])
            sends_s[a][b] = sends_s[b][a] = max(sends_s[a][b], seconds)
    return sends_s


def shared_update_s(
    costs: CostModel,
    roles: Sequence[PlannedRole],
    layouts: Layouts,
    ranks: range,
    samples: SampleLengths,
    own: Mapping[str, SampleLengths] | None = None,
) -> float:
    """Seconds of one optimizer step of each role on these samples, or its `own`, in one plan."""
    problem = shared_problem(costs, roles, layouts, ranks, samples, own=own)
    steps = sum(costs.step_s(role, layouts[role.name], ranks) for role in roles)
    return costs.scales.train * OVER_BOUND * lower_bound(problem) + steps


def updates_s(
    costs: CostModel,
    roles: Sequence[PlannedRole],
    layouts: Layouts,
    ranks: range,
    samples: SampleLengths,
    *,
    mini_batches: int = 1,
    epochs: int = 1,
) -> float:
    """Seconds of all epochs and mini-batches of a role, with its way onto the device and off.

    Several share a plan (`can_share_a_plan`), the k-th mini-batch of one with the k-th of the
    others; what is left over is trained alone. A role may have its own numbers of both.
    """
    seconds = 0.0
    for batches, times in joint_steps(roles, samples, mini_batches, epochs):
        if len(batches) > 1:
            own = {role.name: batch for role, batch in batches.items()}
            seconds += times * shared_update_s(costs, [*batches], layouts, ranks, (), own)
        for role, batch in batches.items() if len(batches) == 1 else ():
            seconds += times * costs.update_s(role, layouts[role.name], ranks, batch)
    for role in roles:
        layout = layouts[role.name]
        seconds += costs.activate_s(role, layout) + costs.deactivate_s(role, layout)
    return seconds


def joint_steps(
    roles: Sequence[PlannedRole], samples: SampleLengths, mini_batches: int, epochs: int
) -> Iterator[tuple[dict[PlannedRole, SampleLengths], int]]:
    """The samples of each role's k-th optimizer step, for every k, and how often these occur.

    Roles without a k-th step are left out.
    """
    steps = [_steps(role, len(samples), mini_batches, epochs) for role in roles]
    for bounds, times in Counter(itertools.zip_longest(*steps, fillvalue=(0, 0))).items():
        batches = {
            role: samples[start:stop]
            for role, (start, stop) in zip(roles, bounds, strict=True)
            if start < stop
        }
        yield batches, times


def _steps(
    role: PlannedRole, samples: int, mini_batches: int, epochs: int
) -> list[tuple[int, int]]:
    """The first sample of each optimizer step, and the end of it."""
    number = role.mini_batches or mini_batches
    bounds = [samples * i // number for i in range(number + 1)]
    return list(itertools.pairwise(bounds)) * (role.epochs or epochs)


def shared_score_s(
    costs: CostModel,
    roles: Sequence[PlannedRole],
    layouts: Layouts,
    ranks: range,
    samples: SampleLengths,
) -> float:
    """Seconds of one forward-only stage of each role on these samples, in one plan."""
    problem = shared_problem(costs, roles, layouts, ranks, samples, trains=False)
    once = sum(costs.pass_s(role, layouts[role.name], ranks) for role in roles)
    return once + costs.scales.forward * OVER_BOUND * lower_bound(problem)
