"""The rule of slots alone: lagging instances, filters, restarts, in thousands of random cases."""

import math
import random
from collections import Counter

import pytest

from hybridrl.schedule.slots import Slots


class Simulation:
    """Groups of samples on instances whose weights lag; one random event after another.

    A sample is waiting, running on an instance, or finished; its birth is the version of its first
    token. All is decided by `draw`.
    """

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.staleness, self.per_step = draw.randint(1, 4), draw.randint(1, 4)
        self.k, self.num_steps = draw.randint(1, 3), draw.randint(2, 12)
        self.slots = Slots(self.staleness, self.per_step)
        # The most groups that a step sees, where filters leave some out.
        self.most_seen = draw.choice([math.inf, self.per_step + draw.randint(0, 3)])
        self.slots.unseen = self.most_seen
        self.room = draw.randint(1, 8)
        self.versions = [0] * draw.randint(1, 4)  # by instance
        self.on: list[set[tuple[int, int]]] = [set() for _ in self.versions]
        self.births: dict[int, dict[int, int]] = {}  # by group and sample
        self.waiting: dict[tuple[int, int], None] = {}
        self.slow = {n: 0.95 * draw.random() ** 3 for n in range(200)}
        self.filtered, self.died = draw.choice([0, 0.3]), draw.choice([0, 0, 0.02])
        self.next_prompt, self.pushed = 0, 0
        self.trained = Counter[int]()
        self.reached = self.num_died = self.num_filtered = 0

    def run(self) -> None:
        idle = 0
        while self.slots.step < self.num_steps:
            idle = 0 if self.event() else idle + 1
            self.slots.check()
            assert idle < 3_000, "nothing goes on"

    def event(self) -> bool:
        """Something happens, or nothing; says which."""
        slots, draw = self.slots, self.draw
        while len(self.births) - sum(map(slots.has_slot, self.births)) < slots.num_places:
            self.births[self.next_prompt] = {}
            self.waiting |= {(self.next_prompt, k): None for k in range(self.k)}
            self.next_prompt += 1
        what = draw.choice(["begin", "begin", "finish", "finish", "take", "push", "die", "end"])
        if what == "push" and self.pushed < slots.step:
            self.pushed += 1
            return True
        if what in ("begin", "finish", "die"):
            return bool(getattr(self, what)(draw.randrange(len(self.on))))
        return bool(what == "take" and self.take()) or bool(what == "end" and self.end())

    def begin(self, i: int) -> bool:
        if not self.on[i] and self.draw.random() < 0.8:  # some do not load when they could
            self.versions[i] = self.pushed
        for prompt, k in self.waiting:
            if len(self.on[i]) == self.room:
                return False
            if self.slots.may_begin(prompt, self.versions[i]):
                self.slots.begin(prompt, self.versions[i])
                self.births[prompt][k] = self.versions[i]
                self.on[i].add((prompt, k))
                del self.waiting[prompt, k]
                return True
        return False

    def finish(self, i: int) -> bool:
        ready = [one for one in sorted(self.on[i]) if self.draw.random() > self.slow[one[0] % 200]]
        if ready:
            self.on[i].remove(self.draw.choice(ready))
        return bool(ready)

    def die(self, i: int) -> bool:
        """Its samples begin again, and finished ones of some group, which may have a slot."""
        if self.draw.random() > self.died:
            return False
        lost = {*self.on[i]}
        self.on[i].clear()
        if self.births:
            prompt = self.draw.choice(sorted(self.births))
            running = {one for held in self.on for one in held}
            lost |= {(prompt, k) for k in self.births[prompt]} - running
        for prompt, k in sorted(lost):
            del self.births[prompt][k]
            self.waiting[prompt, k] = None
            left = [birth + self.staleness for birth in self.births[prompt].values()]
            if not self.slots.has_slot(prompt):
                self.slots.set_limit(prompt, min(left, default=None))
        self.num_died += bool(lost)
        return bool(lost)

    @property
    def busy(self) -> set[int]:
        """The groups that are not complete."""
        return {prompt for prompt, _ in [*self.waiting, *(one for held in self.on for one in held)]}

    def take(self) -> bool:
        complete = {p for p in self.births if p not in self.busy and not self.slots.has_slot(p)}
        taken = self.slots.take(complete)
        for prompt in taken:
            if self.draw.random() < self.filtered:
                self.slots.leave(prompt)
                del self.births[prompt]
                self.num_filtered += 1
        everything = {*self.births} - {p for p in self.births if self.slots.has_slot(p)}
        if complete == everything and self.slots.left and complete:
            assert taken, "all open groups are complete, and none fits"
        return bool(taken)

    def end(self) -> bool:
        if self.slots.left or any(map(self.slots.has_slot, self.busy)):
            return False
        for prompt in [p for p in self.births if self.slots.has_slot(p)]:
            births = self.births.pop(prompt)
            age = self.slots.step - min(births.values())
            assert 0 <= age <= self.staleness, (prompt, age)
            self.reached = max(self.reached, age)
            self.trained[prompt] += 1
        self.slots.end_step()
        self.slots.unseen = self.most_seen
        return True


@pytest.mark.long
@pytest.mark.parametrize("num", [400, pytest.param(4_000, marks=pytest.mark.slow)])
def test_no_group_is_trained_after_its_limit_and_nothing_waits_for_ever(num: int) -> None:
    reached, died, filtered = Counter[bool](), 0, 0
    for seed in range(num):
        case = Simulation(seed)
        case.run()
        assert {*case.trained.values()} <= {1}
        full = case.num_steps * case.per_step
        assert sum(case.trained.values()) == full or case.most_seen < math.inf
        reached[case.reached == min(case.staleness, case.num_steps - 1)] += 1
        died += case.num_died
        filtered += case.num_filtered
    assert reached[True] > 0.8 * num, reached
    assert died > 0.2 * num
    assert filtered > 0.2 * num


def test_the_example_of_the_docstring() -> None:
    a, b, c, d, e, f, g = range(7)
    slots = Slots(1, 2)
    for prompt in (a, b, c, d):
        slots.begin(prompt, 0)
    assert not slots.may_begin(e, 0)
    assert slots.take([d, b]) == [b, d]
    assert not slots.may_begin(e, 0)
    slots.end_step()
    assert not slots.may_begin(e, 0)
    for prompt in (e, f):
        slots.begin(prompt, 1)
    assert slots.take([e, f]) == []
    assert not slots.may_begin(g, 1)
    assert slots.take([e, f, c]) == [c]
    assert slots.take([a, e, f]) == [a]
    slots.end_step()
    assert slots.take([f, e]) == [e, f]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_later_sample_on_older_weights_brings_the_limit_forward(steps: int) -> None:
    slots = Slots(2, 1, step=1)
    slots.begin(0, 1)
    assert slots.limit(0) == 3
    slots.begin(0, steps)
    assert slots.limit(0) == 2 + steps
    slots.begin(0, 1)
    assert slots.limit(0) == 2 + steps
    slots.set_limit(0, None)
    assert slots.limit(0) is None
