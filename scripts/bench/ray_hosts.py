"""Emulated ranks as actors of Ray, many in each: the driver pays for calls what it pays on Ray."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from hybridrl.compat import verl
from hybridrl.config import ClusterConfig, Config, Device
from hybridrl.driver import train
from hybridrl.runtime.launcher import rank_environment
from hybridrl.runtime.ray_cluster import ray_runtime
from hybridrl.runtime.ray_launcher import RayLauncher
from hybridrl.telemetry.log import rank_log
from hybridrl.workers.base_worker import Reply
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.emulated_ranks import EmulatedRanks

_CALLS_AT_A_TIME = 1_000_000  # of a process: each of its ranks has some, most of them asleep


@contextmanager
def on_ray(ranks_per_process: int) -> Iterator[list[int]]:
    """Within, emulated runs have so many ranks in each process of Ray, whole instances of them.

    Yields the number of processes of each group of ranks that was started.
    """
    started: list[int] = []

    @contextmanager
    def launched(config: ClusterConfig, logs: Path) -> Iterator[HostLauncher]:
        with ray_runtime(config, verl.environment(Device.cpu), logs) as ray:
            yield HostLauncher(ray, config, ranks_per_process, started)

    with mock.patch.object(train, "launched", launched):
        yield started


class HostLauncher(RayLauncher):
    """See `Launcher`."""

    def __init__(
        self, ray: Any, config: ClusterConfig, ranks_per_process: int, started: list[int]
    ) -> None:
        super().__init__(ray, config)
        self._each, self._started = ranks_per_process, started
        self._hosts: list[Any] = []

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> Any:
        """See `Launcher`; of `args` the config counts."""
        config: Config = args[0]
        size = config.cluster.ranks
        variables = rank_environment(self.config) | verl.environment(Device.cpu)
        options = {
            "max_concurrency": _CALLS_AT_A_TIME,
            "runtime_env": {"env_vars": variables | {"PYTHONPATH": str(Path(__file__).parent)}},
            "num_cpus": 1,
        }
        host_class = self.ray.remote(_Host).options(**options)
        handles: list[_RankHandle] = []
        for first in range(0, size, self._each):
            ranks = range(first, min(first + self._each, size))
            host = host_class.remote(ranks, config, self.data_plane)
            self._hosts.append(host)
            handles += [_RankHandle(host, rank) for rank in ranks]
        self._started.append(len(self._hosts))
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
