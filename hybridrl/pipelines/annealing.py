"""Simulated annealing on the critical path of a plan.

Only a change on the critical path makes a plan shorter. There two neighbors on a rank that wait for
nothing but each other are swapped: such a swap never makes a circle (van Laarhoven, Aarts and
Lenstra, Operations Research 40, 1992). Starts are mended from the swap on, not computed anew.
RLHFuse (arXiv 2409.13221, section 5.2) anneals with swaps of any two neighbors.
"""

import heapq
import math
import random
from collections.abc import Callable, Sequence

from hybridrl.pipelines.operations import Operations

EPSILON = 1e-12
"""What rounding may do to a time, as a share of all passes' seconds."""


class MutablePlan:
    """Lists of operations with their starts, in which two neighbors can be swapped."""

    def __init__(self, operations: Operations, lists: Sequence[Sequence[int]]) -> None:
        self.operations = operations
        self.epsilon = EPSILON * sum(operations.seconds)
        self.lists = [list(numbers) for numbers in lists]
        size = len(operations.actions)
        self._place = [0] * size
        self.before, self.after = [-1] * size, [-1] * size
        self._kept = [0.0] * size
        """Bytes that the rank keeps before each operation."""
        for numbers in self.lists:
            kept = 0.0
            for place, i in enumerate(numbers):
                self._place[i], self._kept[i] = place, kept
                kept += operations.takes[i] - operations.frees[i]
                if place:
                    self.before[i] = numbers[place - 1]
                    self.after[numbers[place - 1]] = i
        self.starts = operations.earliest_starts(self.after)

    @property
    def seconds(self) -> float:
        seconds = self.operations.seconds
        return max(self.starts[own[-1]] + seconds[own[-1]] for own in self.lists if own)

    def may_swap(self, i: int, j: int) -> bool:
        """Whether j, right after i on its rank, waits for i alone, and memory has room."""
        ops = self.operations
        if ops.queue[i] == ops.queue[j] or any(k == i for k, _ in ops.needs[j]):
            return False
        if self.starts[i] + ops.seconds[i] < self.starts[j] - self.epsilon:
            return False
        kept, limit = self._kept[i] + ops.takes[j], ops.limits[ops.rank[i]]
        return kept <= limit and kept - ops.frees[j] + ops.takes[i] <= limit

    def swap(self, i: int, j: int) -> list[tuple[int, float]]:
        """Put j before i. Returns the starts that changed, for `undo`."""
        self._exchange(i, j)
        return self._mend(i, j)

    def undo(self, i: int, j: int, changed: Sequence[tuple[int, float]]) -> None:
        """Take back the last `swap` of i and j."""
        for k, start in reversed(changed):
            self.starts[k] = start
        self._exchange(j, i)

    def _exchange(self, i: int, j: int) -> None:
        own, place = self.lists[self.operations.rank[i]], self._place[i]
        own[place], own[place + 1] = j, i
        self._place[j], self._place[i] = place, place + 1
        first, last = self.before[i], self.after[j]
        self.before[j], self.after[j], self.before[i], self.after[i] = first, i, j, last
        if first >= 0:
            self.after[first] = j
        if last >= 0:
            self.before[last] = i
        ops = self.operations
        self._kept[j] = self._kept[i]
        self._kept[i] = self._kept[j] + ops.takes[j] - ops.frees[j]

    def _mend(self, i: int, j: int) -> list[tuple[int, float]]:
        starts, seconds = self.starts, self.operations.seconds
        needs, feeds = self.operations.needs, self.operations.feeds
        before, after = self.before, self.after
        changed: list[tuple[int, float]] = []
        # By their starts until now, so that most are computed once. What follows has another
        # operation before it, even if the start of that one is the same.
        heap = [(starts[k], k) for k in (i, j, after[i]) if k >= 0]
        waiting = {k for _, k in heap}
        heapq.heapify(heap)
        while heap:
            _, k = heapq.heappop(heap)
            if k not in waiting:
                continue
            waiting.discard(k)
            start = starts[before[k]] + seconds[before[k]] if before[k] >= 0 else 0.0
            for source, delay in needs[k]:
                arrival = starts[source] + seconds[source] + delay
                if arrival > start:
                    start = arrival
            if start == starts[k]:
                continue
            changed.append((k, starts[k]))
            starts[k] = start
            for target, _ in feeds[k]:
                if target not in waiting:
                    waiting.add(target)
                    heapq.heappush(heap, (starts[target], target))
            target = after[k]
            if target >= 0 and target not in waiting:
                waiting.add(target)
                heapq.heappush(heap, (starts[target], target))
        return changed

    def critical_pairs(self, rng: random.Random) -> list[tuple[int, int]]:
        """Neighbors on a critical path that may be swapped; of several paths one at random."""
        starts, seconds, needs = self.starts, self.operations.seconds, self.operations.needs
        end = self.seconds - self.epsilon
        ends = [own[-1] for own in self.lists if own and starts[own[-1]] + seconds[own[-1]] >= end]
        k = rng.choice(ends)
        pairs: list[tuple[int, int]] = []
        while True:
            earlier = self.before[k]
            tight = []
            if earlier >= 0 and starts[earlier] + seconds[earlier] >= starts[k] - self.epsilon:
                tight.append(earlier)
            for source, delay in needs[k]:
                arrival = starts[source] + seconds[source] + delay
                if source != earlier and arrival >= starts[k] - self.epsilon:
                    tight.append(source)
            if not tight:
                return pairs
            source = tight[0] if len(tight) == 1 else rng.choice(tight)
            if source == earlier and self.may_swap(source, k):
                pairs.append((source, k))
            k = source

    def any_pair(self, rng: random.Random) -> tuple[int, int] | None:
        """Two neighbors anywhere that may be swapped, or None if chance met others."""
        own = rng.choice(self.lists)
        if len(own) < 2:
            return None
        place = rng.randrange(len(own) - 1)
        pair = own[place], own[place + 1]
        return pair if self.may_swap(*pair) else None


def anneal(
    operations: Operations,
    lists: Sequence[Sequence[int]],
    *,
    bound: float,
    moves: int,
    rng: random.Random,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[list[list[int]], list[float]]:
    """The shortest lists met in so many moves, and their starts.

    It stops at `bound`, or when `go_on` says so. A longer plan is accepted with the probability
    exp(-seconds more / temperature), and temperature falls from half a mean pass to a fiftieth.
    """
    plan = MutablePlan(operations, lists)
    now = shortest = plan.seconds
    best = [list(own) for own in plan.lists], list(plan.starts)
    hot = 0.5 * sum(operations.seconds) / max(1, len(operations.seconds))
    for move in range(moves):
        if shortest <= bound + plan.epsilon or (move % 256 == 0 and not go_on()):
            break
        pairs = plan.critical_pairs(rng)
        pair = rng.choice(pairs) if pairs else plan.any_pair(rng)
        if pair is None:
            continue
        changed = plan.swap(*pair)
        new = plan.seconds
        temperature = hot * 0.04 ** (move / moves)
        if new > now and rng.random() >= math.exp((now - new) / temperature):
            plan.undo(*pair, changed)
            continue
        now = new
        if now < shortest - plan.epsilon:
            shortest = now
            best = [list(own) for own in plan.lists], list(plan.starts)
    return best
