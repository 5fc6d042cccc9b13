"""What happens to the tail of a step: one choice among plans, by a small model of the step.

RLHFuse (arXiv 2409.13221, section 4): once few samples are left they move to few instances. The
freed ones run the forward-only stages of finished samples, or train on them. Too soon and the
gathered batch slows the longest; too late and the freed instances have no time left. Or several
instances decode the tail as one. All of these want the same ranks, so that a model compares them.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np

from hybridrl.costs.instance import Costs

_EXACT = 64  # every threshold up to here is tried; above it some, and those near the best
_NEAR = 64  # at most, of those near it
_ROUNDS = 4  # until rows and pace agree
_LEAST_S = 1e-9  # of a token
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


class _Course(NamedTuple):
    """Samples in the order of their ends, and the intervals before these; arrays [samples].

    Where none waits a sample's end is its length, and all that have not ended are rows.
    """

    ends: np.ndarray
    steps: np.ndarray
    alive: np.ndarray
    """Samples that have not ended."""
    tokens: np.ndarray
    """Response tokens of each sample at its end."""
    going: np.ndarray
    """The share of their time in which those that have not ended make tokens."""
    held: np.ndarray
    """Tokens of each of them, on average."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepModel:
    """A step as the choice of its plan sees it, with the lengths of one that was.

    `lengths` are response tokens, `prompt_tokens` those of a prompt on average. All forward-only
    stages together take `inference_s_per_token` on an instance. Rows guess ahead as the costs say,
    so a step may make more than a token of each.

    `waits` are seconds that each sample waits for its environment in all; none where none does. A
    sample waits for the same part of its time all along, and takes no row meanwhile. So its end is
    counted in tokens too: those of its wait, by the `usual_pace`, are added to its own.

    Calls have `call_steps` decode steps, and last `call_s`; 0 leaves out what they cost. How many
    samples are left is known at their ends. One that moves waits for half a call, or for a whole
    one until all members of a wide instance have ended theirs.

    With `training` (`training_arrivals`) instances without samples do that, too. Each gives up its
    generation weights and takes up its training shards before, in `switch_s`, and waits for half a
    call.

    With a `width` above 1 samples that move do so to wide instances of so many members, from their
    members too. No instance trains before, since it could not join.
    """

    lengths: Sequence[int]
    num_instances: int
    costs: Costs
    inference_s_per_token: float = 0.0
    prompt_tokens: float = 0.0
    call_steps: int = 0
    call_s: float = 0.0
    training: np.ndarray | None = None
    switch_s: float = 0.0
    width: int = 1
    waits: Sequence[float] = ()

    def serial_seconds(self) -> float:
        """Generation, then inference and training on all instances."""
        course = self._course()
        every = slice(len(self.lengths))
        decode = float(self._seconds(self.costs, course, every, self.num_instances).sum())
        work = self.inference_s_per_token * float((course.tokens + self.prompt_tokens).sum())
        return decode + (work + self.training_s) / self.num_instances

    @property
    def usual_pace(self) -> float:
        """Seconds in which a row makes a token while all samples are there."""
        num, tokens, waited = len(self.lengths), sum(self.lengths), sum(self.waits)
        rows, held = np.array(max(1.0, num / self.num_instances)), np.array(self.prompt_tokens)
        pace = max(_LEAST_S, float(self._pace(self.costs, rows, held)))
        for _ in range(_ROUNDS if waited else 0):  # those that wait are no rows
            going = tokens * pace / (tokens * pace + waited)
            pace = max(_LEAST_S, float(self._pace(self.costs, np.maximum(1.0, rows * going), held)))
        return pace

    def ends(self, lengths: Sequence[int], waits: Sequence[float]) -> list[float]:
        """The ends of samples with these tokens and waits, counted in tokens."""
        pace = self.usual_pace
        return [n + wait / pace for n, wait in zip(lengths, waits, strict=True)]

    def _course(self) -> _Course:
        ends = self.ends(self.lengths, self.waits) if self.waits else self.lengths
        return _course(ends, self.lengths, self.prompt_tokens)

    @property
    def training_s(self) -> float:
        """Seconds of all training on one instance."""
        return 0.0 if self.training is None else float(self.training.sum())

    def expected_seconds(
        self, thresholds: Sequence[int] | np.ndarray, caps: Sequence[int] | np.ndarray
    ) -> np.ndarray:
        """Seconds of generation, inference and training, for each threshold and its cap.

        Thresholds are below the number of samples. The model: samples are spread evenly over the
        instances and all decode from the start. When n are left they move to the fewest instances
        that take them, at most `cap` each. A keeper waits for the samples that it is sent. An
        instance without samples works on those that are done; when the last sample is done, all
        share the rest. Let s be the steps between two ends, r the rows of an instance that decodes,
        h the tokens a row. Decoding takes s (step_s + r (row_s + cached_token_s h)). The work left
        when all are done is a maximum over all ends i: the work from i on less the capacity after.
        It is infinite where wide instances have no room for all.
        """
        tried, most = np.asarray(thresholds, np.int64), np.asarray(caps, np.int64)
        num, num_instances = len(self.lengths), self.num_instances
        assert ((tried >= 1) & (tried < num)).all(), "a threshold that leaves no sample to wait for"
        course = self._course()
        done, alive = course.ends, course.alive
        work = self.inference_s_per_token * (course.tokens + self.prompt_tokens)
        work = work if self.training is None else work + self.training
        reached = done[num - tried - 1]
        # Several may end together, so fewer are left, or none.
        tried = num - np.searchsorted(done, reached, side="right")
        # So many may be left when they move, whatever the model expects of calls.
        fits = (self.width == 1) | (-(-tried // most) <= num_instances // self.width)
        if self.call_s:
            tried = self._left_when_known(tried, course)
            reached = done[num - tried - 1]
        reached = reached * course.going[np.minimum(num - tried, num - 1)]
        keepers = np.clip(-(-tried // most), 1, num_instances // self.width)
        # Many come to the same, since what is left is known at the ends of calls.
        same = tried * (num_instances + 1) + keepers
        _, distinct, which = np.unique(same, return_index=True, return_inverse=True)
        tried, keepers, reached = tried[distinct], keepers[distinct], reached[distinct]
        wide, free = self.costs.at_width(self.width), _FreeTime(self._way_to_training)
        # What comes before the first gathering is the same for all: [1, before] and [tried, after].
        start = num - max(1, int(tried.max()))
        gathered = alive[start:] <= tried[:, None]
        decoding = np.where(gathered, keepers[:, None], num_instances)
        taken, left = np.zeros(len(tried)), np.zeros(len(tried))
        for span, on, moved in (
            (slice(start), np.full((1, start), num_instances), np.zeros((1, start), bool)),
            (slice(start, num), decoding, gathered),
        ):
            seconds = self._seconds(self.costs, course, span, on)
            if self.width > 1:
                seconds = np.where(moved, self._seconds(wide, course, span, on), seconds)
            if span.start:
                moving = self._moving(tried, keepers, self.prompt_tokens + reached, wide)
                seconds[np.arange(len(tried)), np.minimum(num - tried, num - 1) - start] += moving
            busy = np.minimum(on, alive[span]) * np.where(moved, self.width, 1)
            idle = num_instances - busy
            if self.width > 1 and self.training is not None:  # who trains joins no more
                idle = np.where(moved, idle, 0)
            capacity = free.usable(seconds, seconds * idle)
            left = _left(left, work[span], capacity)
            taken = taken + seconds.sum(axis=1)
        return np.where(fits, (taken + left / num_instances)[which], np.inf)

    def leaving(self, most: np.ndarray) -> np.ndarray:
        """For each of `most` the largest threshold at which no more samples are left."""
        done, num = self._course().ends, len(self.lengths)
        return num - 1 - np.searchsorted(done, done[num - most - 1], side="left")

    @property
    def _way_to_training(self) -> float:
        return 0.0 if self.training is None else self.switch_s + self.call_s / 2

    def _seconds(
        self, costs: Costs, course: _Course, span: slice, instances: np.ndarray | int
    ) -> np.ndarray:
        """Seconds of the intervals of `span`, in which so many instances have all samples."""
        going = course.going[span]
        rows = np.maximum(1.0, course.alive[span] * going / instances)
        pace = self._pace(costs, rows, course.held[span])
        if self.waits:
            pace = going * pace + (1 - going) * self.usual_pace
        return course.steps[span] * pace

    def _left_when_known(self, tried: np.ndarray, course: _Course) -> np.ndarray:
        """Samples that are left when it is known that at most `tried` are."""
        num = len(course.steps)
        ends = self._seconds(self.costs, course, slice(num), self.num_instances).cumsum()
        known = np.ceil(ends[num - tried - 1] / self.call_s - 1e-9) * self.call_s
        return np.minimum(num - np.searchsorted(ends, known * (1 - 1e-9)), num - 1)

    def _pace(self, costs: Costs, rows: np.ndarray, held: np.ndarray) -> np.ndarray:
        """Seconds in which each of `rows` rows of an instance makes a token, with its calls."""
        call_s = costs.between_s / self.call_steps if self.call_steps else 0.0
        return np.asarray(costs.pace(rows, held, call_s))

    def _moving(
        self, tried: np.ndarray, keepers: np.ndarray, tokens: np.ndarray, costs: Costs
    ) -> np.ndarray:
        """Seconds that samples wait, at each threshold: for their keeper, and it for them.

        `tokens` are those of a sample when it moves, `costs` its keeper's. Those of a wide
        instance's members move, too.
        """
        staying = keepers * np.maximum(1.0, tried / self.num_instances) * (self.width == 1)
        moved = np.maximum(0.0, tried - staying)
        # Half a call until the keeper's own ends; the last of several members ends theirs later.
        wait_s = self.call_s * (1.0 if self.width > 1 else 0.5)
        return np.where(
            moved > 0, wait_s + costs.call_s + moved / keepers * costs.move(tokens), 0.0
        )


@dataclass(slots=True)
class _FreeTime:
    """The time of instances without samples, each of which needs its first `switch_s` otherwise.

    So of all that there was until t, what there was until t - switch_s is of use. Intervals are
    added span by span; `times` are their ends and `totals` the free time until then.
    """

    switch_s: float
    times: np.ndarray = field(default_factory=lambda: np.zeros(1))
    totals: np.ndarray = field(default_factory=lambda: np.zeros(1))

    def usable(self, seconds: np.ndarray, free: np.ndarray) -> np.ndarray:
        """Return the usable part of the `free` time in the next intervals [rows, intervals].

        A span of several rows is the last.
        """
        if not self.switch_s or not seconds.size:
            return free
        ends = self.times[-1] + seconds.cumsum(axis=1)
        totals = self.totals[-1] + free.cumsum(axis=1)
        times, known = _behind(self.times, ends), _behind(self.totals, totals)
        at = np.maximum(_behind(self.times[-1:], ends) - self.switch_s, 0.0)
        # One row after the other, so that one call interpolates all.
        apart = np.arange(len(ends))[:, None] * (times.max() + 1.0)
        at, times = at + apart, times + apart
        usable = np.diff(np.interp(at.ravel(), times.ravel(), known.ravel()).reshape(at.shape))
        self.times = np.concatenate([self.times, ends[0]])
        self.totals = np.concatenate([self.totals, totals[0]])
        return usable


def _behind(first: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Each of `rows` [rows, n] behind `first` [m]: [rows, m + n]."""
    return np.concatenate([np.broadcast_to(first, (len(rows), len(first))), rows], axis=1)


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
    pairs = [(tried, cap) for cap in caps for tried in _coarse(models, cap)]
    known = _mean_seconds(models, pairs)
    for cap in caps:
        _, (tried, _) = _best({pair: known[pair] for pair in pairs if pair[1] == cap})
        known |= _mean_seconds(models, [(near, cap) for near in _near(tried, num)])
    seconds, best = _best(known)
    return seconds, MigrationPlan(*best, first.width) if seconds < np.inf else NO_MIGRATION


def _mean_seconds(
    models: Sequence[StepModel], pairs: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], float]:
    """Return the mean seconds of the steps with each threshold and cap of `pairs`."""
    known = dict[tuple[int, int], float]()
    ordered = sorted(pairs)
    bounds = [bisect_right(ordered, (most, np.inf)) for most in (_EXACT * 4**n for n in range(8))]
    for low, high in pairwise([0, *bounds]):  # small thresholds look at little of the step
        if high > low:
            tried, caps = np.array(ordered[low:high]).T
            each = [model.expected_seconds(tried, caps) for model in models]
            known.update(zip(ordered[low:high], np.mean(each, axis=0).tolist(), strict=True))
    return known


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


def training_arrivals(
    ends: Sequence[float], ends_of_prompts: Sequence[float], train_s: float
) -> np.ndarray:
    """Seconds of training on one instance that become possible at each end of a sample [samples].

    A prompt's samples are trained when the last of them has ended; prompts have equally many tokens
    here. `train_s` are those of all samples on one instance.
    """
    seconds, done = np.zeros(len(ends)), np.sort(ends)
    if len(ends_of_prompts):
        at = np.searchsorted(done, np.asarray(ends_of_prompts)).clip(max=len(done) - 1)
        np.add.at(seconds, at, train_s / len(ends_of_prompts))
    return seconds


def _left(backlog: np.ndarray, work: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """The rest of `backlog` [rows] and of work that arrives at the end of each interval."""
    work_from = np.cumsum(work[::-1])[::-1]
    after = np.cumsum(capacity[:, ::-1], axis=1)[:, ::-1]
    at_once = backlog + work.sum() - after[:, 0]
    return np.asarray(np.maximum(at_once, (work_from - after + capacity).max(axis=1)))


def _course(ends: Sequence[float], lengths: Sequence[int], prompt_tokens: float) -> _Course:
    """The course of samples with these ends, which are their lengths where none waits."""
    order = np.argsort(ends, kind="stable")
    done, tokens = (np.asarray(values, np.float64)[order] for values in (ends, lengths))
    before = np.concatenate([[0.0], done[:-1]])
    alive = np.arange(len(done), 0, -1)
    shares = np.divide(tokens, done, out=np.ones(len(done)), where=done > 0)
    going = shares[::-1].cumsum()[::-1] / alive
    held = prompt_tokens + going * (done + before) / 2
    return _Course(done, done - before, alive, tokens, going, held)


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
