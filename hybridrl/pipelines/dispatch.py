"""List scheduling: an idle rank starts the most urgent of the passes that it can start.

A rule says what is urgent. It may hold a pass back until a time, or while many micro-batches are in
flight on the chunk. A rank may also wait for a more urgent pass, which would else be late.

Memory cannot deadlock. Models in opposite directions could fill each other's ranks with forward
passes whose backward passes then find no room. So a pass starts only if all micro-batches in flight
can still end, one after the other (the banker's algorithm of Dijkstra).
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.pipelines.operations import Operations


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchRule:
    """What a rank starts first, each by operation."""

    priority: Sequence[float]
    """The least first."""
    releases: Sequence[float] | None = None
    """No operation starts before."""
    windows: Sequence[int] | None = None
    """The most micro-batches in flight, by the queue that starts them."""
    latest: Sequence[float] | None = None
    """The last start that is in time. A rank waits for a more urgent pass that would miss it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dispatched:
    """Lists of operations by rank, the start of each operation, and the end of the last."""

    lists: list[list[int]]
    starts: list[float]
    seconds: float


class MemoryGuard:
    """Whether all micro-batches in flight can end with the room that the ranks have."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self._rank = [operations.rank[queue[0]] for queue in operations.queues]
        self._bytes = [[operations.takes[i] for i in queue] for queue in operations.queues]
        self._most = [0.0] * operations.num_ranks
        for pairs in operations.in_flight:
            own = [0.0] * operations.num_ranks
            for take, _ in pairs:
                own[self._rank[take]] += max(self._bytes[take])
            self._most = list(map(max, self._most, own))

    def missing(self) -> tuple[int, float] | None:
        """A rank that cannot keep a single micro-batch, and the bytes of one."""
        for rank, most in enumerate(self._most):
            if most > self.operations.limits[rank]:
                return rank, most
        return None

    def all_can_end(self, room: Sequence[float], taken: Sequence[int]) -> bool:
        """With so much `room` by rank, and so many operations of each queue started."""
        left = list(room)
        if self._any_can_end(left):
            return True
        models = self.operations.in_flight
        numbers = [min(taken[free] for _, free in pairs) for pairs in models]
        ends = [max(taken[take] for take, _ in pairs) for pairs in models]
        progress = True
        while progress:
            progress = False
            for model, pairs in enumerate(models):
                while numbers[model] < ends[model] and self._end(
                    pairs, numbers[model], left, taken
                ):
                    numbers[model] += 1
                    progress = True
                    if self._any_can_end(left):
                        return True
        return numbers == ends

    def _any_can_end(self, left: Sequence[float]) -> bool:
        """Whether each rank has room for a whole micro-batch: then one after the other can end."""
        return all(map(float.__ge__, left, self._most))

    def _end(
        self,
        pairs: Sequence[tuple[int, int]],
        number: int,
        left: list[float],
        taken: Sequence[int],
    ) -> bool:
        """Whether micro-batch `number` has room on all chunks; then what it keeps is left."""
        wanted: dict[int, float] = {}
        for take, _ in pairs:
            if taken[take] <= number:
                rank = self._rank[take]
                wanted[rank] = wanted.get(rank, 0.0) + self._bytes[take][number]
        if any(size > left[rank] for rank, size in wanted.items()):
            return False
        for take, free in pairs:
            if taken[take] > number >= taken[free]:
                left[self._rank[take]] += self._bytes[take][number]
        return True


class Dispatcher:
    """Runs rules on operations. Example: `Dispatcher(ops).run(DispatchRule(priority=tails))`."""

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        is_limited = any(map(math.isfinite, operations.limits))
        self.guard = MemoryGuard(operations) if is_limited else None
        self._frees = {take: free for pairs in operations.in_flight for take, free in pairs}

    def run(self, rule: DispatchRule) -> Dispatched:
        """Start operations in virtual time until all have ended."""
        ops = self.operations
        rank, seconds, takes, frees = ops.rank, ops.seconds, ops.takes, ops.frees
        priority, latest, windows = rule.priority, rule.latest, rule.windows
        # the state: what operations wait for, and what ranks have free
        ready = list(rule.releases) if rule.releases else [0.0] * len(rank)
        waits = [len(edges) for edges in ops.needs]
        starts = [0.0] * len(rank)
        free = [0.0] * ops.num_ranks
        room = list(ops.limits)
        places = [0] * len(ops.queues)
        lists: list[list[int]] = [[] for _ in range(ops.num_ranks)]
        refused: set[int] = set()  # ranks that wait for memory of others
        # Times at which a rank may start something.
        wakes = {(0.0, r) for r in range(ops.num_ranks)}
        wakes |= {(ready[i], rank[i]) for i, edges in enumerate(ops.needs) if not edges}
        heap = sorted(wakes)
        while heap:
            now, own = heapq.heappop(heap)
            if free[own] > now:
                continue
            # the next operation of each queue: one that can start, or one that comes soon
            startable: list[tuple[float, int, int]] = []
            soon: list[tuple[float, int]] = []
            for number in ops.by_rank[own]:
                place = places[number]
                queue = ops.queues[number]
                if place == len(queue):
                    continue
                i = queue[place]
                if takes[i] > room[own]:
                    continue
                if not waits[i] and ready[i] <= now:
                    if (
                        windows is None
                        or number not in self._frees
                        or place - places[self._frees[number]] < windows[number]
                    ):
                        startable.append((priority[i], i, number))
                elif latest is not None and ready[i] > now:
                    soon.append((ready[i], i))
            # the most urgent one that makes no more urgent one late, and leaves memory to end all
            startable.sort()
            for urgency, i, number in startable:
                end = now + seconds[i]
                if latest is not None:
                    arrivals = [
                        arrival
                        for arrival, j in soon
                        if arrival < end and latest[j] < end and priority[j] < urgency
                    ]
                    if arrivals:
                        heapq.heappush(heap, (min(arrivals), own))
                        continue
                if takes[i] and self.guard is not None:
                    room[own] -= takes[i]
                    places[number] += 1
                    safe = self.guard.all_can_end(room, places)
                    room[own] += takes[i]
                    places[number] -= 1
                    if not safe:
                        refused.add(own)
                        continue
                break
            else:
                continue
            # start it; wake the ranks that may start now
            room[own] += frees[i] - takes[i]
            places[number] += 1
            lists[own].append(i)
            starts[i], free[own] = now, end
            heapq.heappush(heap, (end, own))
            if frees[i] and refused:
                for other in refused:
                    heapq.heappush(heap, (end, other))
                refused.clear()
            for j, delay in ops.feeds[i]:
                waits[j] -= 1
                ready[j] = max(ready[j], end + delay)
                if not waits[j] and (rank[j] != own or ready[j] > end):
                    heapq.heappush(heap, (ready[j], rank[j]))
        assert sum(map(len, lists)) == len(rank), "a rule that starts nothing"
        return Dispatched(lists=lists, starts=starts, seconds=max(free, default=0.0))


class Justifier:
    """Forward-backward improvement of schedules (Valls et al., EJOR 165, 2005).

    In mirrored time what ended last starts first; then, in time, what started first there. Both
    passes close gaps, and start passes that nothing waits for late.
    """

    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self._forward = Dispatcher(operations)
        self._mirrored = Dispatcher(operations.mirrored())

    def once(self, starts: Sequence[float]) -> Dispatched:
        """A schedule by the order of these starts."""
        seconds = self.operations.seconds
        ends = [start + length for start, length in zip(starts, seconds, strict=True)]
        late = self._mirrored.run(DispatchRule(priority=[-end for end in ends]))
        order = [late.seconds - start - s for start, s in zip(late.starts, seconds, strict=True)]
        return self._forward.run(DispatchRule(priority=order))

    def improve(self, schedule: Dispatched) -> Dispatched:
        """Repeat while the schedule gets shorter."""
        while True:
            new = self.once(schedule.starts)
            if new.seconds >= schedule.seconds * (1 - 1e-9):
                return schedule
            schedule = new
