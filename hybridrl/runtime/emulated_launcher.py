"""Ranks of an emulated device (`cluster=emulated`): many in a process of Ray, or in the driver's.

Calls go through the same worker groups and, on Ray, the same object store as those of real ranks.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from hybridrl.compat import verl
from hybridrl.config import ClusterConfig, Config, Device
from hybridrl.runtime.launcher import POLL_S, CallFailed, rank_environment
from hybridrl.runtime.process_launcher import Call, ProcessGroup, ProcessLauncher
from hybridrl.runtime.ray_launcher import RayLauncher
from hybridrl.telemetry.log import rank_log
from hybridrl.workers.base_worker import Reply
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.emulated_ranks import EmulatedRanks

logger = logging.getLogger(__name__)

_CALLS_AT_A_TIME = 1_000_000  # of a process: each of its ranks has some, most of them asleep


class EmulatedLauncher(ProcessLauncher):
    """All ranks in the driver's process. Their calls end within `wait`."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(config)
        self._emulated: EmulatedRanks | None = None

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> ProcessGroup:
        """See `Launcher`; of `args` the config counts."""
        config: Config = args[0]
        ranks = range(config.cluster.ranks)
        self._emulated = EmulatedRanks(ranks, config, self.data_plane)
        return ProcessGroup(worker, [_LocalRank(self._emulated, rank) for rank in ranks])

    def wait(self, references: Sequence[Call], timeout: float = POLL_S) -> list[Call]:
        """See `Launcher`."""
        assert self._emulated is not None
        until = time.time() + timeout
        while True:
            now = time.time()
            self._emulated.end_due(now)
            if ready := [call for call in references if call.done]:
                return ready
            if now >= until:
                return []
            next_end = self._emulated.next_end
            time.sleep(max(0.0, min(until, next_end or until) - now))

    def first_dead(self, group: ProcessGroup) -> None:
        """None dies but with the driver."""

    def log(self, file: str, logs: object) -> str:
        """They log with the driver."""
        return f"{logs}/driver.log"


class _LocalRank:
    """A rank in this process."""

    def __init__(self, ranks: EmulatedRanks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Begin a method."""
        call = Call()
        self.ranks.call(self.rank, name, args, kwargs, time.time(), partial(_end, call))
        return call

    def kill(self) -> None:
        """It ends with the driver."""


def _end(call: Call, reply: Reply[Any] | None, error: Exception | None) -> None:
    call.done, call.value = True, reply
    call.failure = None if error is None else CallFailed(str(error), error)


class EmulatedRayLauncher(RayLauncher):
    """Emulated ranks in Ray's actors, `cluster.ranks_per_process` in each."""

    def __init__(self, ray: Any, config: ClusterConfig) -> None:
        super().__init__(ray, config)
        self._hosts: list[Any] = []

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> Any:
        """See `Launcher`; of `args` the config counts."""
        config: Config = args[0]
        size, each = config.cluster.ranks, config.cluster.ranks_per_process
        assert each, "ranks of the driver's process have no launcher of Ray"
        options = {
            "max_concurrency": _CALLS_AT_A_TIME,
            "runtime_env": {
                "env_vars": rank_environment(self.config) | verl.environment(Device.cpu)
            },
            "num_cpus": 1,
        }
        host_class = self.ray.remote(_Host).options(**options)
        handles: list[_RankHandle] = []
        for first in range(0, size, each):
            ranks = range(first, min(first + each, size))
            host = host_class.remote(ranks, config, self.data_plane)
            self._hosts.append(host)
            handles += [_RankHandle(host, rank) for rank in ranks]
        logger.debug("%d ranks share %d processes", size, len(self._hosts))
        return verl.group_of(verl.worker_class(worker, make, *args), handles)

    def kill(self, group: Any) -> None:
        """See `Launcher`: their processes, and with these all ranks."""
        for host in self._hosts:
            self.ray.kill(host)
        self._hosts = []


class _RankHandle:
    """An actor handle of a rank without a separate process: `handle.method.remote(...)`."""

    def __init__(self, host: Any, rank: int) -> None:
        self._host, self._rank, self._numbers = host, rank, itertools.count()

    def __getattr__(self, name: str) -> Any:
        if name == "__ray_ready__":
            return self._host.__ray_ready__
        if name.startswith("_"):
            raise AttributeError(name)
        return _Method(self._host, self._rank, name, self._numbers)


class _Method:
    """A method of a rank; `numbers` counts the rank's calls."""

    def __init__(self, host: Any, rank: int, name: str, numbers: Iterator[int]) -> None:
        self._host, self._rank, self._name, self._numbers = host, rank, name, numbers

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """A reference to the reply."""
        number = next(self._numbers)
        return self._host.call.remote(number, self._rank, self._name, *args, **kwargs)


class _Host:
    """A process of ranks, an actor of Ray on asyncio.

    Ray starts the calls of such an actor in any order; each has its number among its rank's.
    """

    def __init__(self, ranks: range, config: Config, data_plane: DataPlane) -> None:
        rank_log(ranks.start, config.log.level, None)
        self._ranks = EmulatedRanks(ranks, config, data_plane)
        self._early: dict[tuple[int, int], Callable[[], None]] = {}
        self._next = dict.fromkeys(ranks, 0)
        self._timer: asyncio.TimerHandle | None = None

    async def call(self, number: int, rank: int, name: str, *args: Any, **kwargs: Any) -> Any:
        """The reply of a call, when its time has passed."""
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Reply[Any]] = loop.create_future()

        def done(value: Reply[Any] | None, error: Exception | None) -> None:
            if error is not None:
                reply.set_exception(error)
            elif value is not None:
                reply.set_result(value)

        now = time.time()
        self._early[rank, number] = lambda: self._ranks.call(rank, name, args, kwargs, now, done)
        while begin := self._early.pop((rank, self._next[rank]), None):
            self._next[rank] += 1
            begin()
        self._look(loop)
        return await reply

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """End what is due, and be called again when the next call is."""
        self._ranks.end_due(time.time())
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (end := self._ranks.next_end) is not None:
            self._timer = loop.call_later(max(0.0, end - time.time()), self._look, loop)
