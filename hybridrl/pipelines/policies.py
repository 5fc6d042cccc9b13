"""Rules of list scheduling at random, and small changes of a good one.

No single rule is best. Where bubbles are long, passes should start at once; where memory is short,
forward passes should wait until their backward pass is near. A policy is one point between these.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hybridrl.pipelines.dispatch import DispatchRule
from hybridrl.pipelines.operations import Operations
from hybridrl.pipelines.problem import PassKind, PipelineProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPolicy:
    """The part of a policy that is about the models of one name."""

    slope: float
    """Micro-batches in flight on a chunk, for each chunk from it to the last."""
    extra: int
    """Further micro-batches in flight on each chunk."""
    step: float
    """Time between micro-batches, in that of a micro-batch on a chunk; 0: no forward waits."""
    shared_step: bool
    """The time between micro-batches is a share of the whole plan's instead."""
    offset: float
    """First release, in the bound's time."""
    gap_after: float
    """A pause after this share of the micro-batches."""
    gap: float
    """Its time, in the bound's; 0: none."""
    urgency: float
    """Priority over other models, in the bound's time."""
    stretch: float
    """Time between micro-batches in its priorities, in that of the whole plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What is urgent: the share of an even pace, as against the longest way to the end."""

    pace: float
    backward_first: bool
    """Every backward pass is more urgent than any forward pass."""
    backward_lead: float
    """Else so much more, in the bound's time."""
    windowed: bool
    deadline: float
    """Passes wait for more urgent ones that this time, in the bound's, makes late; 0: never."""
    models: tuple[ModelPolicy, ...]


DrawValue = Callable[[random.Random], Any]

# What a field is drawn from. Values that often win are listed twice.
MODEL_FIELDS: dict[str, DrawValue] = {
    "slope": lambda rng: rng.choice([1.0, 1.0, 1.0, 0.9, 0.75, 0.5, 0.25, 1.5]),
    "extra": lambda rng: rng.choice([0, 0, 0, 1, 1, 2, 3]),
    "step": lambda rng: rng.choice([0.0, 0.0, 1.0, 1.0, 0.95, 0.9, 0.8, 0.7, 0.5, rng.random()]),
    "shared_step": lambda rng: rng.random() < 0.5,
    "offset": lambda rng: rng.choice([0.0, 0.0, 0.0, 0.15 * rng.random()]),
    "gap_after": lambda rng: rng.random(),
    "gap": lambda rng: rng.choice([0.0, 0.0, 0.0, 0.5 * rng.random()]),
    "urgency": lambda rng: rng.choice([0.0, 0.0, rng.uniform(-0.3, 0.3), rng.uniform(-2, 2)]),
    "stretch": lambda rng: rng.choice([1.0, 1.0, 0.5, 0.8, 1.2]),
}
FIELDS: dict[str, DrawValue] = {
    "pace": lambda rng: rng.choice([0.0, 0.0, 1.0, 1.0]) * rng.random(),
    "backward_first": lambda rng: rng.random() < 0.5,
    "backward_lead": lambda rng: rng.choice([0.0, 0.03, 0.1, 0.3]),
    "windowed": lambda rng: rng.random() < 0.9,
    "deadline": lambda rng: rng.choice([0.0, 0.0, 1.0, 1.0, 1.02, 1.05]),
}
assert set(MODEL_FIELDS) == {field.name for field in fields(ModelPolicy)}
assert set(FIELDS) == {field.name for field in fields(Policy)} - {"models"}


def draw_policy(rng: random.Random, models: int) -> Policy:
    """A policy at random for so many names."""
    own = [ModelPolicy(**_draw(MODEL_FIELDS, rng)) for _ in range(models)]
    return Policy(models=tuple(own), **_draw(FIELDS, rng))


def change_policy(rng: random.Random, policy: Policy) -> Policy:
    """A policy with one to three fields drawn again."""
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.3:
            name = rng.choice(list(FIELDS))
            policy = replace(policy, **{name: FIELDS[name](rng)})
        else:
            place = rng.randrange(len(policy.models))
            name = rng.choice(list(MODEL_FIELDS))
            own = replace(policy.models[place], **{name: MODEL_FIELDS[name](rng)})
            models = (*policy.models[:place], own, *policy.models[place + 1 :])
            policy = replace(policy, models=models)
    return policy


def _draw(draws: dict[str, DrawValue], rng: random.Random) -> dict[str, Any]:
    return {name: draw(rng) for name, draw in draws.items()}


class RuleMaker:
    """Turns policies into rules on the operations of a problem."""

    def __init__(self, problem: PipelineProblem, operations: Operations, bound: float) -> None:
        self.problem, self.operations, self.bound = problem, operations, bound
        names = sorted({model.name for model in problem.models})
        self.names = names
        self._place = [names.index(model.name) for model in problem.models]
        self._heads = operations.heads()
        rest = operations.mirrored().heads()
        self._tails = [s + tail for s, tail in zip(operations.seconds, rest, strict=True)]
        # Where a queue begins if its model runs alone.
        self._begin = [self._heads[queue[0]] for queue in operations.queues]
        self._mean_s = [_mean_seconds(problem, index) for index in range(len(problem.models))]

    def rule(self, policy: Policy) -> DispatchRule:
        """The priorities, releases and windows of a policy."""
        ops = self.operations
        priority = [self._priority(policy, i) for i in range(len(ops.actions))]
        if policy.backward_first:
            before = 4 * (max(priority) - min(priority))
            for i, action in enumerate(ops.actions):
                if action.kind in (PassKind.backward, PassKind.backward_input):
                    priority[i] -= before
        latest = None
        if policy.deadline:
            latest = [policy.deadline * self.bound - tail for tail in self._tails]
        return DispatchRule(
            priority=priority,
            releases=self._releases(policy),
            windows=self._windows(policy) if policy.windowed else None,
            latest=latest,
        )

    def _priority(self, policy: Policy, i: int) -> float:
        ops, bound = self.operations, self.bound
        action = ops.actions[i]
        own = policy.models[self._place[action.model]]
        number = len(self.problem.models[action.model].costs)
        even = action.micro_batch * bound / number * own.stretch + self._begin[ops.queue[i]]
        if action.kind is not PassKind.forward:
            even -= policy.backward_lead * bound
        return policy.pace * even - (1 - policy.pace) * self._tails[i] + own.urgency * bound

    def _releases(self, policy: Policy) -> Sequence[float]:
        releases = list(self._heads)
        for index, pairs in enumerate(self.operations.in_flight):
            own = policy.models[self._place[index]]
            if not own.step:
                continue
            queue = self.operations.queues[pairs[0][0]]
            each = self.bound / len(queue) if own.shared_step else self._mean_s[index]
            for number, i in enumerate(queue):
                release = own.offset * self.bound + number * own.step * each
                if number >= own.gap_after * len(queue):
                    release += own.gap * self.bound
                releases[i] = max(releases[i], release)
        return releases

    def _windows(self, policy: Policy) -> Sequence[int]:
        windows = [0] * len(self.operations.queues)
        for index, pairs in enumerate(self.operations.in_flight):
            own = policy.models[self._place[index]]
            for chunk, (take, _) in enumerate(pairs):
                windows[take] = max(1, math.ceil((len(pairs) - chunk) * own.slope) + own.extra)
        return windows


def _mean_seconds(problem: PipelineProblem, index: int) -> float:
    """The mean seconds of all passes of a micro-batch on a chunk."""
    model = problem.models[index]
    seconds = [
        model.seconds(kind, chunk, number)
        for kind in model.kinds
        for chunk in range(len(model.ranks))
        for number in range(len(model.costs))
    ]
    return sum(seconds) / (len(model.ranks) * len(model.costs))
