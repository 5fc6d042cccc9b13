"""The driver does not wait for ranks of another pool that are busy: they answer when they can."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hybridrl.config import Config
from hybridrl.config.cluster import Placement
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import Phase, Prepared, WeightsReady
from hybridrl.flow.sample import SampleId
from hybridrl.runtime.launcher import CallFailed
from hybridrl.workers.answers import EnteredPhase
from hybridrl.workers.base_worker import Reply


class Call:
    """A call that a rank's thread runs; no `Future`, as which the driver knows its own work."""

    def __init__(self, future: "concurrent.futures.Future[Any]") -> None:
        self.future = future


class Ranks:
    """Some of the ranks, with the methods of `worker`: each runs one call after the other."""

    def __init__(self, threads: Sequence[ThreadPoolExecutor], numbers: Sequence[int]) -> None:
        self.threads, self.numbers = threads, numbers
        self.worker: Any = None

    def __getattr__(self, name: str) -> Callable[..., list[Call]]:
        method = getattr(self.worker, name)
        return lambda *args: [Call(self.threads[i].submit(method, i, *args)) for i in self.numbers]


class ThreadLauncher:
    """A launcher whose ranks are threads."""

    data_plane = None

    def __init__(self, threads: Sequence[ThreadPoolExecutor], worker: Any) -> None:
        self.threads, self.worker = threads, worker

    def start(self, *_: Any) -> Ranks:
        return self.subgroup(None, range(len(self.threads)))

    def subgroup(self, group: Any, ranks: Sequence[int]) -> Ranks:
        some = Ranks(self.threads, ranks)
        some.worker = self.worker
        return some

    def wait(self, calls: Sequence[Call], timeout: float) -> list[Call]:
        first = concurrent.futures.FIRST_COMPLETED
        concurrent.futures.wait([call.future for call in calls], timeout, first)
        return [call for call in calls if call.future.done()]

    def get(self, call: Call) -> Any:
        try:
            return call.future.result()
        except Exception as error:
            raise CallFailed("", error) from error

    def kill(self, group: Any) -> None: ...


class Worker:
    """Rank 0 is the actor's and is free; what the critic's, rank 1, does waits for `held`."""

    def __init__(self) -> None:
        self.held, self.done = threading.Event(), list[tuple[str, int]]()

    def _do(self, name: str, rank: int) -> None:
        if rank == 1:
            assert self.held.wait(30)
        self.done.append((name, rank))

    def release(self, rank: int, ids: Sequence[SampleId]) -> Reply[int]:
        self._do("release", rank)
        return Reply(0, ())

    def record_samples(self, rank: int, *facts: Any) -> Reply[None]:
        self._do("record", rank)
        raise OSError("no space left")

    def enter(self, rank: int, phase: Phase) -> Reply[EnteredPhase]:
        self._do(phase.value, rank)
        return Reply(EnteredPhase(version=3), ())


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.held.set()


@pytest.fixture
def executor(worker: Worker) -> Iterator[RayExecutor]:
    config = Config()
    config.cluster.placement, config.cluster.ranks = Placement.split, 2
    config.cluster.resolve()
    threads = [ThreadPoolExecutor(1) for _ in range(2)]
    launcher: Any = ThreadLauncher(threads, worker)
    group = WorkerGroup(launcher, config, "", lambda *_: None, lambda *_: None)
    group.instances = [[0]]
    assert [*group.pools] == ["actor", "critic"]
    yield RayExecutor(group, config, lambda _: None)
    worker.held.set()
    for thread in threads:
        thread.shutdown()


def test_a_pool_that_is_busy_lets_samples_be_released(
    executor: RayExecutor, worker: Worker
) -> None:
    executor.release([SampleId(0)])
    executor.sync_weights()
    assert executor.wait() == [WeightsReady(3)]
    executor.prepare([0], Phase.TRAIN)
    assert executor.wait() == [Prepared((0,), Phase.TRAIN)]
    assert worker.done == [("release", 0), ("generate", 0), ("train", 0)]
    worker.held.set()
    with pytest.raises(RuntimeError, match="nothing is in flight"):
        executor.wait()
    assert worker.done[3:] == [("release", 1)]


def test_a_rank_that_could_not_write_samples_is_heard_of(
    executor: RayExecutor, worker: Worker
) -> None:
    executor.record_samples(1, "rl", {1: []})
    assert not worker.done
    worker.held.set()
    with pytest.raises(OSError, match="no space left"):
        executor.wait()


def test_a_run_reads_at_its_end_what_nobody_waited_for(
    executor: RayExecutor, worker: Worker
) -> None:
    worker.held.set()
    executor.record_samples(1, "rl", {1: []})
    with pytest.raises(OSError, match="no space left"):
        executor.drain()
    executor.drain()  # once
