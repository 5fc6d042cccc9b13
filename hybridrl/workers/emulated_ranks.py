"""The ranks of an emulated device that share a process: their calls, and the time that these take.

Nothing runs but a call's own bookkeeping, so hundreds of ranks are busy at the same time in one
thread. Who waits is told when to look again (`next_end`).
"""

import heapq
import itertools
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridrl.config import Config
from hybridrl.layout.wide import wide_instances
from hybridrl.telemetry.trace import TimeSpan
from hybridrl.workers.base_worker import Reply
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.dispatch import dispatched_methods, runs_concurrently
from hybridrl.workers.emulated import EmulatedInstance, EmulatedWorker, Task
from hybridrl.workers.emulation import emulated_widths

Done = Callable[[Reply[Any] | None, Exception | None], None]
"""Called with the reply of a call that has ended, or its error."""

_OF_INSTANCE = {"advance", "infer", "train_early"}
_OF_POOL = {"compute", "update"}
_CONCURRENT = {
    name for name in dispatched_methods(EmulatedWorker) if runs_concurrently(EmulatedWorker, name)
}


@dataclass(eq=False, slots=True)
class _Lane:
    """The calls of a rank that run one after the other: two lanes a rank, one for concurrent calls.

    `busy` from the time that its oldest call is taken up until that ends. `free_at` is the end of
    the one before.
    """

    rank: int
    free_at: float = 0.0
    busy: bool = False
    waiting: "deque[_Call]" = field(default_factory=deque)


@dataclass(eq=False, slots=True)
class _Call:
    """A call of a rank since `arrived`; its method has run when it has a `task`."""

    lane: _Lane
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arrived: float
    done: Done


class EmulatedRanks:
    """Some ranks of a run, whole instances of them.

    Calls of a rank run one after the other, those marked `concurrent` in a lane of their own. A
    call that an instance or a pool takes part in begins when all its ranks of this process are in
    it. It then takes the seconds of the tokens of all. Of a pool that has ranks in other processes,
    too, the tokens here stand for those of all: updates are balanced over the ranks.

    Ends are exact: the next call of a busy rank begins at the end of the one before, however late
    someone looks.
    """

    def __init__(self, ranks: range, config: Config, data_plane: DataPlane) -> None:
        pools, size = config.cluster.pool_ranks, config.rollout.layout.ranks
        self._pool_of = {rank: name for name, own in pools.items() for rank in own if rank in ranks}
        self._pool_sizes = {name: len(own) for name, own in pools.items()}
        instances: dict[int, EmulatedInstance] = {}
        home = pools[config.cluster.home]
        for rank in ranks:
            if rank in home:
                first = rank - (rank - home.start) % size
                instances.setdefault(first, EmulatedInstance(range(first, first + size)))
        self._instance_of = {rank: i for i in instances.values() for rank in i.ranks}
        self._wide = self._wide_instances(config, size)
        self._workers = {
            rank: EmulatedWorker(
                rank,
                pool,
                config,
                data_plane,
                self._instance_of.get(rank),
                {number: wide for number, wide in self._wide.items() if rank in wide.ranks},
            )
            for rank, pool in self._pool_of.items()
        }
        self._lanes: dict[tuple[int, bool], _Lane] = {}
        self._together: dict[tuple[str, Any], list[_Call]] = {}
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def _wide_instances(self, config: Config, size: int) -> dict[int, EmulatedInstance]:
        """Return this process's wide instances by number, made of instances of `size` ranks."""
        num_instances = self._pool_sizes[config.cluster.home] // size
        start = config.cluster.pool_ranks[config.cluster.home].start
        table = wide_instances(num_instances, emulated_widths(config))
        wide = {
            number: EmulatedInstance(
                range(start + members[0] * size, start + (members[-1] + 1) * size), len(members)
            )
            for number, members in table.items()
        }
        return {n: one for n, one in wide.items() if one.ranks.start in self._instance_of}

    def call(
        self,
        rank: int,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        now: float,
        done: Done,
    ) -> None:
        """Begin a method of a rank, or have it wait for its turn."""
        concurrent = name in _CONCURRENT
        lane = self._lanes.setdefault((rank, concurrent), _Lane(rank))
        lane.waiting.append(_Call(lane, name, args, kwargs, now, done))
        self._begin_next(lane)

    @property
    def next_end(self) -> float | None:
        """When the next call ends; None where none is at work."""
        return self._ends[0][0] if self._ends else None

    def end_due(self, now: float) -> None:
        """End the calls whose time has passed, and begin those that waited for them."""
        while self._ends and self._ends[0][0] <= now:
            heapq.heappop(self._ends)[2]()

    def at(self, end: float, done: Callable[[], None]) -> None:
        """Have `done` called when `end` has passed."""
        heapq.heappush(self._ends, (end, next(self._number), done))

    def _begin_next(self, lane: _Lane) -> None:
        """Begin the oldest call of a lane, once all ranks that it needs are in it."""
        while lane.waiting and not lane.busy:
            lane.busy = True
            call = lane.waiting.popleft()
            key, needed = self._partners(call)
            calls = self._together.setdefault(key, [])
            calls.append(call)
            if len(calls) == needed:
                del self._together[key]
                self._run(calls)

    def _partners(self, call: _Call) -> tuple[tuple[str, Any], int]:
        """A name of those that run a call together, and their number in this process."""
        rank = call.lane.rank
        if call.name == "advance" and (wide := self._wide.get(call.args[0])) is not None:
            return (call.name, call.args[0]), len(wide.ranks)
        if call.name in _OF_INSTANCE and rank in self._instance_of:
            ranks = self._instance_of[rank].ranks
            return (f"{call.name} of an instance", ranks.start), len(ranks)
        if self._is_of_pool(call):
            pool = self._pool_of[rank]
            return (call.name, pool), list(self._pool_of.values()).count(pool)
        return (call.name, call), 1

    def _is_of_pool(self, call: _Call) -> bool:
        """Whether all ranks of a pool are in the call; in early backward those that only train."""
        of_instance = call.name in _OF_INSTANCE and call.lane.rank not in self._instance_of
        return call.name in _OF_POOL or of_instance

    def _run(self, calls: Sequence[_Call]) -> None:
        """Run the methods of calls that belong together, and note when they end."""
        calls = sorted(calls, key=lambda call: call.lane.rank)
        begins = max(max(call.arrived, call.lane.free_at) for call in calls)
        try:
            tasks = [self._task(call) for call in calls]
        except Exception as error:
            traceback.print_exc()  # into the process's log; the driver gets one line
            for call in calls:
                call.lane.busy = False
                call.done(None, error)
            return
        tokens: float = sum(task.tokens for task in tasks)
        if self._is_of_pool(calls[0]):  # those of other processes do their share
            tokens *= self._pool_sizes[self._pool_of[calls[0].lane.rank]] / len(calls)
        seconds = tasks[0].seconds(tokens)
        end = begins + seconds
        replies = [_reply(call, task, begins, end) for call, task in zip(calls, tasks, strict=True)]
        for call in calls:
            call.lane.free_at = end
        self.at(end, partial(self._end, calls, replies))

    def _end(self, calls: Sequence[_Call], replies: Sequence[Reply[Any]]) -> None:
        for call, reply in zip(calls, replies, strict=True):
            call.lane.busy = False
            call.done(reply, None)
        for call in calls:
            self._begin_next(call.lane)

    def _task(self, call: _Call) -> Task:
        method = getattr(self._workers[call.lane.rank], call.name)
        task: Task = method(*call.args, **call.kwargs)
        return task


def _reply(call: _Call, task: Task, begins: float, end: float) -> Reply[Any]:
    spans = (TimeSpan(task.span, begins, end),) if task.span else ()
    return Reply(task.value(end - begins), spans, concurrent=call.name in _CONCURRENT)
