"""What happens to the tail of a step: one choice among plans, by a small model of the step.

RLHFuse (arXiv 2409.13221, section 4): once few samples are left they move to few instances. The
freed ones run the forward-only stages of finished samples, or train on them. Too soon and the
gathered batch slows the longest; too late and the freed instances have no time left. Or several
instances decode the tail as one. All of these want the same ranks, so that a model compares them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from hybridrl.costs.instance import Costs
from hybridrl.costs.tail import StepModel

_EXACT = 16  # every threshold up to here is tried; above it some, and those near the best
_NEAR = 24  # at most, of those near it
_WORTH = 0.01  # of the step: what a plan has to save over the plainest, since a model says it


class MigrationPlan(NamedTuple):
    """When the tail migrates, and how densely; (0, 0) is never."""

    threshold: int
    """Unfinished samples at which it migrates."""
    cap: int
    """Most samples that an instance keeps."""
    width: int = 1
    """Instances that become one, which keeps the samples."""

    @property
    def moves(self) -> bool:
        """Whether it can move anything: a single sample stays, unless it is to decode wide."""
        return self.threshold > (self.width == 1)


NO_MIGRATION = MigrationPlan(0, 0)


def best_threshold(
    models: Sequence[StepModel], max_held: int, threshold: int | None = None
) -> tuple[float, MigrationPlan]:
    """The mean seconds of steps that end soonest, and the threshold and cap with which they do.

    `models` are of steps with equally many samples, two or more. RLHFuse keeps a decode step flat
    (`Costs.flat_rows`): the smallest cap tried. The others are its doublings up to `max_held`
    (samples that an instance has memory for). Where rows are not free, a slower tail may still pay
    for a freed instance. Of equal choices the smallest threshold, then the smallest cap. With
    `threshold` only the cap is chosen.
    """
    first, num = models[0], len(models[0].lengths)
    longest = first.prompt_tokens + max(max(model.lengths) for model in models)
    caps = _caps(first.costs.at_width(first.width), max_held, longest)
    if threshold is not None:
        pairs = [(min(threshold, num - 1), cap) for cap in caps]
        seconds, (_, cap) = _best(_mean_seconds(models, pairs))
        return seconds, MigrationPlan(threshold, cap, first.width)
    known = _mean_seconds(models, [(n, cap) for cap in caps for n in _coarse(models, cap)])
    bests = [_best({pair: known[pair] for pair in known if pair[1] == cap})[1] for cap in caps]
    if near := [(n, cap) for tried, cap in bests for n in _near(tried, num)]:
        known |= _mean_seconds(models, near)
    seconds, best = _best(known)
    return seconds, MigrationPlan(*best, first.width) if seconds < np.inf else NO_MIGRATION


def _mean_seconds(
    models: Sequence[StepModel], pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Return the mean seconds of the steps with each threshold and cap of `pairs`."""
    tried, caps = np.array(pairs).T
    means = np.mean([model.expected_seconds(tried, caps) for model in models], axis=0)
    return dict(zip(pairs, means.tolist(), strict=True))


def _best(known: Mapping[tuple[int, int], float]) -> tuple[float, tuple[int, int]]:
    """The least seconds, and with them the smallest threshold, then cap."""
    enough = min(known.values()) * (1 + 1e-9)
    pair = min(pair for pair, seconds in known.items() if seconds <= enough)
    return known[pair], pair


class TailPlan(NamedTuple):
    """One choice for the tail of a step, and the seconds of the step by the model."""

    name: str
    seconds: float
    migration: MigrationPlan = NO_MIGRATION
    trains_early: bool = False
    overlaps: bool = True
    """Whether forward passes run while others decode."""


def tail_plans(
    models: Sequence[StepModel],
    max_held: int,
    *,
    stay_call_steps: int,
    threshold: int | None = None,
    widths: Sequence[int] = (1,),
    late_inference_s_per_token: float | None = None,
) -> list[TailPlan]:
    """The plans of a step, the plainest first, each with its best threshold.

    | plan | what |
    |---|---|
    | `stay` | no sample moves; passes and training begin when all samples are there |
    | `overlap` | instances that have no sample left, though none is freed, run forward passes |
    | `migrate` | freed instances run forward passes |
    | `train early`, `migrate, train early` | free, or freed, instances train as well |
    | `widen to K`, `widen to K, train early` | K instances decode the tail as one |

    `models` are the last steps, over which the seconds are means. One step with an extraordinary
    response would else decide for all. They have the short calls whose ends are awaited, and the
    `training` that may be early, or None. Calls have `stay_call_steps` where nobody does anything
    early, and passes `late_inference_s_per_token` on an instance, since all run at once; None is
    the models'. `threshold` is the user's own: then the tail migrates at it, at 0 never. `widths`
    without 1 want a wide tail.
    """
    late = [replace(model, training=None) for model in models]
    first, plans = models[0], list[TailPlan]()
    barrier_s = fmean(model.training_s for model in models) / first.num_instances
    at_once = late_inference_s_per_token
    if at_once is None:
        at_once = first.inference_s_per_token
    waiting = [
        replace(model, call_steps=stay_call_steps, inference_s_per_token=at_once) for model in late
    ]
    seconds = fmean(model.serial_seconds() for model in waiting) + barrier_s
    stay = TailPlan("stay", seconds, overlaps=False)
    if len(first.lengths) < 2 or first.num_instances < 2:
        return [stay]

    def add(name: str, width: int) -> None:
        for early in (False, True)[: 1 + (first.training is not None)]:
            tried = [replace(model, width=width) for model in (models if early else late)]
            seconds, migration = best_threshold(tried, max_held, threshold)
            seconds += 0.0 if early else barrier_s
            if seconds < np.inf:
                plans.append(TailPlan(name + ", train early" * early, seconds, migration, early))

    widths = [width for width in widths if width <= first.num_instances]
    passes = first.inference_s_per_token > 0
    if not threshold and (1 in widths or threshold == 0 or not widths):
        plans.append(stay)
        if passes:
            seconds, _ = best_threshold(late, max_held, 1)
            plans.append(TailPlan("overlap", seconds + barrier_s))
        if first.training is not None:
            seconds, _ = best_threshold(models, max_held, 1)
            plans.append(TailPlan("train early", seconds, NO_MIGRATION, True))
    for width in widths if threshold != 0 else ():
        if width > 1:
            add(f"widen to {width}", width)
        elif passes or threshold is not None or first.training is not None:
            add("migrate", width)
    return plans or [stay]


def best_plan(plans: Sequence[TailPlan]) -> TailPlan:
    """The plan with the least seconds; another than the first only where it saves a hundredth."""
    best = min(plans, key=lambda plan: plan.seconds)
    return best if best.seconds < (1 - _WORTH) * plans[0].seconds else plans[0]


def _caps(costs: Costs, max_held: int, tail_tokens: float) -> list[int]:
    """Numbers of samples to keep on an instance that are tried."""
    caps = [min(max_held, costs.flat_rows(cached_per_row=tail_tokens))]
    while caps[-1] < max_held:
        caps.append(min(max_held, 2 * caps[-1]))
    return caps


def _coarse(models: Sequence[StepModel], cap: int) -> list[int]:
    """Thresholds: a ladder, and before and after each at which another instance is needed."""
    most = len(models[0].lengths) - 1
    instances = _ladder(min(models[0].num_instances // models[0].width, most // cap))
    full = [n for model in models for n in model.leaving(cap * np.array(instances, int)).tolist()]
    return sorted({*_ladder(most), *full, *(min(most, n + 1) for n in full)})


def _ladder(most: int) -> list[int]:
    """From 1 to `most`: all small numbers, then each an eighth above the one before."""
    steps = [*range(1, min(_EXACT, most) + 1)]
    while steps and steps[-1] < most:
        steps.append(min(most, steps[-1] + steps[-1] // 8))
    return steps


def _near(best: int, num: int) -> list[int]:
    """Thresholds below `num` that differ from this one by up to an eighth, without it."""
    low, high = best - best // 8, min(num - 1, best + best // 8)
    near = np.linspace(low, high, min(_NEAR, high - low + 1)).astype(int)
    return sorted({*near.tolist()} - {best})


def gather(held: Mapping[int, int], max_held: int) -> frozenset[int]:
    """The fewest instances that can hold all samples: which of those in `held` keep theirs.

    `held` counts the samples of each instance that has some; none need move away from a keeper,
    which takes others up to `max_held`. Those that hold most keep theirs, so that few samples move;
    of equal ones the first.

    Example: {0: 1, 1: 3, 2: 2} is {1} with max_held 6, {1, 2} with 4, and all three with 2.
    """
    order = sorted(held, key=lambda instance: (-held[instance], instance))
    for num in range(1, len(order)):
        room = sum(max(0, max_held - held[instance]) for instance in order[:num])
        if room >= sum(held[instance] for instance in order[num:]):
            return frozenset(order[:num])
    return frozenset(order)
