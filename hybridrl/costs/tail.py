"""Seconds of a step by what its last samples do: they stay, migrate, or decode on wide instances.

The choice of a step's plan (`flow.migration`) asks for them. All samples of a step are on its
instances from the start, in equal numbers, so that a closed form over the costs of one instance is
enough. The replay by the scheduler itself is `plan.schedule`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hybridrl.costs.instance import Costs

_ROUNDS = 4  # until rows and pace agree
_LEAST_S = 1e-9  # of a token


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
        decode = float(self._seconds(self.costs, course, self.num_instances).sum())
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
        num, width, course = len(self.lengths), self.width, self._course()
        assert ((tried >= 1) & (tried < num)).all(), "a threshold that leaves no sample to wait for"
        work = self.inference_s_per_token * (course.tokens + self.prompt_tokens)
        work = work if self.training is None else work + self.training
        units = self.num_instances // width
        # when they move, and to how many instances; several may have ended at once
        at = np.searchsorted(course.ends, course.ends[num - tried - 1], side="right")
        # So many may be left then, whatever the model expects of calls.
        fits = (width == 1) | (-(-(num - at) // most) <= units)
        if self.call_s:
            at = self._end_known(at, course)
        tried, reached = num - at, course.ends[at - 1] * course.going[np.minimum(at, num - 1)]
        keepers = np.clip(-(-tried // most), 1, units)
        # the intervals of each plan [plans, samples]
        moved = np.arange(num) >= at[:, None]
        on = np.where(moved, keepers[:, None], self.num_instances)
        wide = self.costs.at_width(width)
        seconds = self._seconds(self.costs, course, on)
        if width > 1:
            seconds = np.where(moved, self._seconds(wide, course, on), seconds)
        moving = self._moving(tried, keepers, self.prompt_tokens + reached, wide)
        seconds[np.arange(len(tried)), np.minimum(at, num - 1)] += moving
        # what instances without samples do meanwhile
        idle = self.num_instances - np.minimum(on, course.alive) * np.where(moved, width, 1)
        if width > 1 and self.training is not None:  # who trains joins no more
            idle = np.where(moved, idle, 0)
        left = _left(work, self._usable(seconds, seconds * idle))
        return np.where(fits, seconds.sum(axis=1) + left / self.num_instances, np.inf)

    def leaving(self, most: np.ndarray) -> np.ndarray:
        """For each of `most` the largest threshold at which no more samples are left."""
        done, num = self._course().ends, len(self.lengths)
        return num - 1 - np.searchsorted(done, done[num - most - 1], side="left")

    def _seconds(self, costs: Costs, course: _Course, instances: np.ndarray | int) -> np.ndarray:
        """Seconds of all intervals, in which so many instances have all samples."""
        rows = np.maximum(1.0, course.alive * course.going / instances)
        pace = self._pace(costs, rows, course.held)
        if self.waits:
            pace = course.going * pace + (1 - course.going) * self.usual_pace
        return course.steps * pace

    def _end_known(self, at: np.ndarray, course: _Course) -> np.ndarray:
        """How many samples have ended when a call tells that `at` have."""
        ends = self._seconds(self.costs, course, self.num_instances).cumsum()
        known = np.ceil(ends[at - 1] / self.call_s - 1e-9) * self.call_s
        return np.maximum(1, np.searchsorted(ends, known * (1 - 1e-9)))

    def _usable(self, seconds: np.ndarray, free: np.ndarray) -> np.ndarray:
        """The part of the `free` time in which instances work [plans, samples].

        Each needs its way to training first. So of all that there was until t, what there was until
        then less the way is of use.
        """
        way_s = 0.0 if self.training is None else self.switch_s + self.call_s / 2
        if not way_s:
            return free
        ends, totals = (np.pad(each.cumsum(axis=1), ((0, 0), (1, 0))) for each in (seconds, free))
        # One plan after the other, so that one call interpolates all.
        apart = np.arange(len(ends))[:, None] * (ends.max() + 1.0)
        begun = np.maximum(ends - way_s, 0.0) + apart
        return np.diff(np.interp(begun, (ends + apart).ravel(), totals.ravel()))

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


def _left(work: np.ndarray, capacity: np.ndarray) -> np.ndarray:
    """The rest of work that arrives at the end of each interval, at the end of all [plans]."""
    work_from = np.cumsum(work[::-1])[::-1]
    after = np.cumsum(capacity[:, ::-1], axis=1)[:, ::-1]
    return np.asarray(np.maximum(0.0, (work_from - after + capacity).max(axis=1)))


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
