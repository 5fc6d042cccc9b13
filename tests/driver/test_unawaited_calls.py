"""The driver does not wait for ranks of another pool that are busy: they answer when they can."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from hybridrl.config import Config
from hybridrl.config.cluster import Placement
from hybridrl.driver.rank_failures import InstanceEnded, WorkerError
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.step_digests import read_step_digests
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow import Graph
from hybridrl.flow.executor import Phase, Prepared, WeightsReady
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.runtime.launcher import CallFailed
from hybridrl.schedule import StepResult
from hybridrl.telemetry.digests import ShardDigest
from hybridrl.telemetry.trace import TimeSpan
from hybridrl.workers.answers import EnteredPhase
from hybridrl.workers.base_worker import Reply
from hybridrl.workers.turns import SampleTexts


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

    def first_dead(self, group: Any) -> None: ...

    def kill(self, group: Any) -> None: ...


class Worker:
    """Rank 0 is the actor's and is free; what the critic's, rank 1, does waits for `held`."""

    def __init__(self) -> None:
        self.held, self.done = threading.Event(), list[tuple[str, int]]()
        self.fails: set[int] = set()

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

    def texts(self, rank: int, ids: Sequence[SampleId]) -> Reply[dict[SampleId, SampleTexts]]:
        self._do(f"texts {ids[0]}", rank)
        if rank in self.fails:
            raise RuntimeError("out of memory")
        spans = (TimeSpan("texts", 1.0, 2.0),)
        return Reply(dict.fromkeys(ids, SampleTexts("1 + 1", f"of rank {rank}")), spans)

    def digest_samples(
        self, rank: int, ids: Sequence[SampleId]
    ) -> Reply[dict[SampleId, dict[str, ShardDigest]]]:
        self._do("digest samples", rank)
        return Reply({id: {"tokens": ShardDigest("ab", None, 1)} for id in ids}, ())

    def digest_weights(self, rank: int) -> Reply[dict[str, dict[str, ShardDigest]]]:
        self._do("digest weights", rank)
        return Reply({}, ())

    def enter(self, rank: int, phase: Phase) -> Reply[EnteredPhase]:
        self._do(phase.value, rank)
        return Reply(EnteredPhase(version=3), ())


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.held.set()


@dataclass
class Steps:
    """The run's step, and the steps and names of the spans that have come."""

    now: int = 1
    spans: list[tuple[int, str]] = field(default_factory=list)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def executor(worker: Worker, steps: Steps) -> Iterator[RayExecutor]:
    config = Config()
    config.cluster.placement, config.cluster.ranks = Placement.split, 2
    config.cluster.resolve()
    threads = [ThreadPoolExecutor(1) for _ in range(2)]
    launcher: Any = ThreadLauncher(threads, worker)
    group = WorkerGroup(
        launcher,
        config,
        "",
        lambda lane, span, step: steps.spans.append((step, span.name)),
        lambda *_: None,
        lambda: steps.now,
    )
    group.instances = [[0]]
    assert [*group.pools] == ["actor", "critic"]
    yield RayExecutor(group, config, lambda _: None)
    worker.held.set()
    for thread in threads:
        thread.shutdown()


def test_a_pool_that_is_busy_lets_samples_be_released(
    executor: RayExecutor, worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "hybridrl.driver.ray_executor")
    executor.release([SampleId(0)])
    executor.sync_weights()
    assert executor.wait() == [WeightsReady(3)]
    executor.prepare([0], Phase.TRAIN)
    assert executor.wait() == [Prepared((0,), Phase.TRAIN)]
    assert caplog.messages[-1] == "ended: Prepared places=1 phase=Phase.TRAIN"
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


# -- what is read without anyone waiting for it ----------------------------------------------------


def read(executor: RayExecutor, rank: int, prompt: int, lines: list[str]) -> None:
    """Begin to read a sample, which becomes a line."""
    id = SampleId(prompt)
    executor.read_texts({rank: [id]}, lambda texts: lines.append(f"{id} {texts[id].response}"))


def test_a_pool_that_is_busy_lets_samples_be_read(
    executor: RayExecutor, worker: Worker, steps: Steps
) -> None:
    """Lines come in the order of the steps, and spans belong to the steps that asked for them."""
    lines: list[str] = []
    read(executor, 1, 0, lines)
    steps.now = 2
    read(executor, 0, 1, lines)
    executor.sync_weights()
    assert executor.wait() == [WeightsReady(3)]
    assert ("texts 1.0", 0) in worker.done
    assert not lines, "that of step 2 waits for that of step 1"
    worker.held.set()
    steps.now = 3
    executor.drain()
    assert lines == ["0.0 of rank 1", "1.0 of rank 0"]
    assert sorted(steps.spans) == [(1, "texts"), (2, "texts")]


def test_an_instance_that_ends_takes_its_texts_alone(
    executor: RayExecutor, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read of the others comes, and nobody waits for the dead rank."""
    value_of = executor.group.value_of

    def ended(rank: int, *call: Any) -> Any:
        if rank == 0:
            raise InstanceEnded(0)
        return value_of(rank, *call)

    monkeypatch.setattr(executor.group, "value_of", ended)
    read_ids: list[SampleId] = []
    executor.read_texts({0: [SampleId(0)], 1: [SampleId(1)]}, read_ids.extend)
    worker.held.set()
    executor.drain()
    assert read_ids == [SampleId(1)]


def test_a_pool_that_is_busy_lets_a_step_be_digested(executor: RayExecutor, worker: Worker) -> None:
    """Ranks of the other pool go on; the step's line waits for all ranks."""
    samples = (Sample(id=SampleId(0), rank=0, tensors={"tokens"}),)
    result = StepResult(1, samples, samples, dropped={}, metrics={}, spans=())
    lines: list[dict[str, Any]] = []
    read_step_digests(Graph(), result, executor.group, executor.read, lines.append)
    executor.sync_weights()
    assert executor.wait() == [WeightsReady(3)]
    assert worker.done == [("digest samples", 0), ("digest weights", 0), ("generate", 0)]
    assert not lines
    worker.held.set()
    executor.drain()
    assert ("digest weights", 1) in worker.done
    assert [line["samples"].keys() for line in lines] == [{"0.0"}]


def test_what_needs_no_rank_is_read_in_its_turn(executor: RayExecutor, worker: Worker) -> None:
    lines: list[str] = []
    executor.read({}, lambda answers: lines.append("at once"))
    read(executor, 1, 0, lines)
    executor.read({}, lambda answers: lines.append("later"))
    assert lines == ["at once"]
    worker.held.set()
    executor.drain()
    assert lines == ["at once", "0.0 of rank 1", "later"]


def test_a_run_that_fails_records_what_ranks_have_answered(
    executor: RayExecutor, worker: Worker
) -> None:
    """All but what the failed rank did not read."""
    lines: list[str] = []
    read(executor, 1, 0, lines)
    worker.fails = {0}
    read(executor, 0, 1, lines)
    with pytest.raises(WorkerError, match=r"rank 0 of 2.*out of memory"):
        executor.drain()
    assert executor.group.killed
    worker.held.set()
    read(executor, 1, 2, lines)
    executor.group.killed = False  # the rank lives: its answers are waited for
    executor.salvage()
    assert lines == ["0.0 of rank 1", "2.0 of rank 1"]


def test_a_full_disk_loses_one_line(executor: RayExecutor, worker: Worker) -> None:
    """What cannot be written is raised by the next wait, once."""

    def full(answers: object) -> None:
        raise OSError("no space left")

    lines: list[str] = []
    worker.held.set()
    executor.read(executor.group.call_texts({0: [SampleId(0)]}), full)
    read(executor, 1, 1, lines)
    with pytest.raises(OSError, match="no space left"):
        executor.drain()
    executor.drain()
    assert lines == ["1.0 of rank 1"]
