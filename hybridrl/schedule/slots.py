"""Which group a step trains, and when one may begin, where a step trains groups as they complete.

Weights v_k are those after k steps. A group's birth is the version of its first token, and its
limit is its birth + S: the last step that may train it. Step k trains P groups; the place of one in
it is a slot, and s slots of the present step are left.

The invariant: of the open groups without a slot, for every h from 0 to S at most s + hP have a
limit up to k + h.

- begins: a group may begin by v_j only where j + S >= k and the invariant stays true.
- takes: a complete group may take a slot only where the invariant stays true. Those with the
  smallest limit, then prompt, go first.
- bound: no group is trained after its limit. With h = 0, at most s groups have to be trained in
  step k, and s slots are left. A step ends with s = 0. So at most hP groups have a limit up to
  k + h, which is P + (h - 1)P, as the next step wants it.
- no deadlock: where all open groups are complete the one with the smallest limit may take a slot,
  since none has a limit below its own.
"""

import math
from collections import Counter
from collections.abc import Iterable


class Slots:
    """The slots of the present step, and the limits of open groups without one.

    A group has no limit before its first token, and again when all of its samples are lost. It has
    a slot from `take` to the end of its step, or until it gives it back (`leave`). Samples of one
    with a slot, which begin again after a death, may be made by any weights of its last S steps.

    Example, P = 2, S = 1, prompts in letters. Step 0 begins: a, b, c, d may begin by v_0, with
    limit 1. d and b are complete first, and take its slots: a and c are left, and both have to be
    trained in step 1. While step 0 trains no other group may begin by v_0, since three would have
    the limit 1, and step 1 has two slots. Then e and f begin by v_1, with limit 2. Should they be
    complete first, they get no slot in step 1: both are for a and c.
    """

    def __init__(self, max_staleness: int, per_step: int, step: int = 0) -> None:
        """All slots of a step are left; no group has begun."""
        self.max_staleness, self.per_step = max_staleness, per_step
        self.step, self._free = step, per_step
        self.unseen: float = math.inf
        """Groups that the step may see yet, trained or left out."""
        self._limits: dict[int, int] = {}  # of groups without a slot, by prompt
        self._counts = Counter[int]()  # how many have a limit
        self._taken = set[int]()  # those with a slot
        self._left_out = set[int]()  # those that have given theirs back in the present step

    @property
    def left(self) -> int:
        """The slots of the present step that may be taken yet; what it may not see has none."""
        return int(min(self._free, self.unseen))

    @property
    def num_places(self) -> int:
        """The most groups that may be open without a slot."""
        return self.left + self.max_staleness * self.per_step

    def has_slot(self, prompt: int) -> bool:
        """Whether the present step trains a group."""
        return prompt in self._taken

    def of_step(self, prompt: int) -> bool:
        """Whether a group leaves with the present step, trained or not."""
        return prompt in self._taken or prompt in self._left_out

    def limit(self, prompt: int) -> int | None:
        """The last step that may train a group without a slot; None before its first token."""
        return self._limits.get(prompt)

    def may_begin(self, prompt: int, steps: int) -> bool:
        """Whether some of a group's samples may begin by the weights after so many steps."""
        if self.of_step(prompt):
            return steps + self.max_staleness >= self.step
        limit = self._limit_by(prompt, steps)
        if limit < self.step:
            return False
        before = self._limits.get(prompt)
        if limit == before:
            return True
        # The group counts up to its former limit already.
        until = self.max_staleness if before is None else before - self.step - 1
        return self._has_room(limit - self.step, until, self.left - 1)

    def begin(self, prompt: int, steps: int) -> None:
        """Some of its samples begin by the weights after so many steps."""
        assert self.may_begin(prompt, steps), (prompt, steps)
        if not self.of_step(prompt):
            self.set_limit(prompt, self._limit_by(prompt, steps))

    def set_limit(self, prompt: int, limit: int | None) -> None:
        """A group's samples have begun, or it has lost some; None: all that had tokens."""
        assert not self.of_step(prompt), f"prompt {prompt} leaves with step {self.step}"
        before = self._limits.pop(prompt, None)
        if before is not None:
            self._counts[before] -= 1
        if limit is not None:
            self._limits[prompt] = limit
            self._counts[limit] += 1

    def may_take(self, prompt: int) -> bool:
        """Whether a complete group may be trained in the present step."""
        if not self.left:
            return False
        return self._has_room(0, self._limits[prompt] - self.step - 1, self.left - 1)

    def take(self, complete: Iterable[int], most: int | None = None) -> list[int]:
        """Give slots to those of these groups that may be trained now; returns them."""
        taken = list[int]()
        for prompt in sorted(complete, key=lambda prompt: (self._limits[prompt], prompt)):
            if len(taken) == most or not self.may_take(prompt):
                break  # those that come next have limits as large or larger
            self.set_limit(prompt, None)
            self._taken.add(prompt)
            self._free -= 1
            self.unseen -= 1
            taken.append(prompt)
        return taken

    def leave(self, prompt: int) -> None:
        """A group with a slot gives it back: nothing of it is to be trained."""
        self._taken.remove(prompt)
        self._left_out.add(prompt)
        self._free += 1

    def end_step(self) -> None:
        """The step has trained the groups with slots; the next one has all of its own."""
        assert not self.left, f"{self.left} slots of step {self.step} are left"
        assert min(self._limits.values(), default=self.step + 1) > self.step, "a group is too old"
        self._taken.clear()
        self._left_out.clear()
        self.step, self._free, self.unseen = self.step + 1, self.per_step, math.inf

    def check(self) -> None:
        """Assert the invariant; for tests."""
        for h in range(self.max_staleness + 1):
            due = sum(limit <= self.step + h for limit in self._limits.values())
            assert due <= self.left + h * self.per_step, (self.step, h, due)

    def _limit_by(self, prompt: int, steps: int) -> int:
        """The limit of a group once some of its samples have begun by these weights."""
        limit = steps + self.max_staleness
        return min(limit, self._limits.get(prompt, limit))

    def _has_room(self, first: int, last: int, left: int) -> bool:
        """Whether, for h from `first` to `last`, at most `left` + hP groups have a limit up to
        k + h.
        """
        due = sum(n for limit, n in self._counts.items() if limit < self.step + first)
        for h in range(first, last + 1):
            due += self._counts[self.step + h]
            if due > left + h * self.per_step:
                return False
        return True
