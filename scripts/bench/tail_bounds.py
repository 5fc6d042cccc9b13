"""What each mechanism can give at most: lower bounds of a step, by arithmetic alone.

A step ends when its longest response has, and when all work is done. Let, for a step,

- A: the longest response alone, one row from its first token to its last;
- W: rows, cached tokens and prompts of all responses, in the largest batches, over all instances;
- I: the forward passes over all instances; T: training; S: the weight switch;
- g: passes and training of the longest response's group alone, on all instances.

| side | at least |
|---|---|
| serial | max(A, W) + I + T + S |
| fused | max(A + g's passes, W + I) + T + S |
| early | max(A + g, W + I + T) + S |
| wide | as fused, A at the decode step of an instance as wide as is asked for |
| speculate | as fused, A over the tokens that a pass makes |
| packed | as serial, A that of the cycle: the prompts in the order of their longest responses |
| all, or several names | each of them |

Example: 42 s for the longest response alone, 3 s of other decoding, 2 s of training. Serial takes
44 s at least, early 42 s. On instances of twice the width a decode step takes 0.77 of it: 32 s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean

from hybridrl.costs.instance import Costs
from hybridrl.flow.workload import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Costs of an instance, how many there are, and what a mechanism makes of a decode step."""

    costs: Costs
    instances: int
    max_held: int
    wide_step_s: float
    """A decode step of the widest instance that is allowed."""
    pass_tokens: float = 1.0
    """Tokens that a pass makes with guesses."""

    def alone(self, group: Group, wide: bool, speculate: bool) -> float:
        """Seconds of the group's longest response, alone on an instance."""
        length, costs = max(group.lengths), self.costs
        step_s = self.wide_step_s if wide else costs.step_s
        passes = length / (self.pass_tokens if speculate else 1.0)
        row_s = costs.row_s + costs.cached_token_s * (group.prompt_tokens + length / 2)
        return passes * (step_s + row_s)

    def spread(self, groups: Sequence[Group]) -> float:
        """Seconds of all decoding in the largest batches, over all instances."""
        costs = self.costs
        rows = sum(
            n * (costs.row_s + costs.cached_token_s * (group.prompt_tokens + n / 2))
            for group in groups
            for n in group.lengths
        )
        steps = sum(map(_response_tokens, groups)) / self.max_held * costs.step_s
        prefill = costs.prefill_token_s * sum(group.prompt_tokens for group in groups)
        return (rows + steps + prefill) / self.instances

    def passes(self, groups: Sequence[Group]) -> float:
        """Seconds of the forward passes, over all instances."""
        per_token = sum(self.costs.token_s.values())
        return per_token * sum(map(_tokens, groups)) / self.instances

    def training(self, groups: Sequence[Group]) -> float:
        """Seconds of forward, backward and step, on all ranks."""
        return self.costs.train_token_s * sum(map(_tokens, groups))


def bounds(
    steps: Sequence[Sequence[Group]], machine: Machine, cycle: int, sides: Sequence[str]
) -> dict[str, float]:
    """Seconds of a mean step, at least, by side; `steps` are the groups of each, whole cycles."""
    packed = [step for i in range(0, len(steps), cycle) for step in _packed(steps[i : i + cycle])]
    return {
        side: fmean(
            _bound(groups, machine, side.split("_"))
            for groups in (packed if "packed" in side else steps)
        )
        for side in sides
    }


def _bound(groups: Sequence[Group], machine: Machine, names: Sequence[str]) -> float:
    together, own = "all" in names, [max(groups, key=lambda group: max(group.lengths))]
    alone = machine.alone(
        own[0], wide=together or "wide" in names, speculate=together or "speculate" in names
    )
    work, passes = machine.spread(groups), machine.passes(groups)
    training = machine.training(groups)
    switch = machine.costs.switch_s + machine.costs.train_switch_s
    if names[0] in ("serial", "packed"):
        return max(alone, work) + passes + training + switch
    if "early" not in names and not together:
        return max(alone + machine.passes(own), work + passes) + training + switch
    last = machine.passes(own) + machine.training(own)
    return max(alone + last, work + passes + training) + switch


def _packed(steps: Sequence[Sequence[Group]]) -> list[list[Group]]:
    """The prompts of all steps, those with short responses first."""
    order = sorted((group for step in steps for group in step), key=lambda g: max(g.lengths))
    starts = accumulate((len(step) for step in steps), initial=0)
    return [order[start : start + len(step)] for start, step in zip(starts, steps, strict=False)]


def pass_tokens(draft: int, accept: float) -> float:
    """Tokens of a pass that verifies `draft` guesses, each accepted with the chance `accept`.

    1 + accept + accept^2 + ... + accept^draft. Example: 4 guesses at 0.6 make 2.31 tokens.
    """
    return sum(accept**i for i in range(draft + 1))


def _tokens(group: Group) -> int:
    return sum(group.prompt_tokens + n for n in group.lengths)


def _response_tokens(group: Group) -> int:
    return sum(group.lengths)
