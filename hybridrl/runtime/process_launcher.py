"""Ranks without Ray, for debugging: children of this process, or one of them is this process.

One rank alone is this process, or rank 0 with `cluster.rank_in_driver=true`. Then `breakpoint()` in
it stops at this terminal, and a profiler sees one process. Not supported: several nodes, and
concurrent methods of a rank (they run one after the other).
"""

import contextlib
import gc
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol, Self

from hybridrl.config import ClusterConfig, ProcessesClusterConfig
from hybridrl.runtime.launcher import (
    POLL_S,
    WORKER_DEATH_TIMEOUT_S,
    CallFailed,
    rank_environment,
)
from hybridrl.system.activity import begin_call
from hybridrl.telemetry.log import as_rank, logged
from hybridrl.workers.data_plane import DataPlane, LocalDataPlane
from hybridrl.workers.dispatch import Dispatch, dispatched_methods, runs_concurrently

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_KILLED_S = 10.0  # one in the kernel, on a dead file system, say, ends when that answers
FORK_SERVER_IMPORTS = ("hybridrl.runtime.fork_server", "ray.cloudpickle")
_Answer = tuple[Any, Exception | None, str]


@dataclass(eq=False, slots=True)
class Call:
    """A call of a rank: pending, then done with its value or its failure."""

    done: bool = False
    value: Any = None
    failure: CallFailed | None = None

    def finish(self, value: Any, cause: Exception | None, trace: str) -> None:
        """Take the answer of a rank, see `_run`."""
        self.done, self.value = True, value
        self.failure = None if cause is None else CallFailed(str(cause), cause, trace=trace)


class CalledRank(Protocol):
    """A rank of a `ProcessGroup`."""

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Begin a method."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...


class ProcessGroup:
    """Ranks with the marked methods of a worker class; each returns a `Call` per rank."""

    def __init__(self, worker: type, ranks: Sequence[CalledRank]) -> None:
        self.worker, self.ranks = worker, list(ranks)
        for name, mode in dispatched_methods(worker).items():
            setattr(self, name, partial(self._call, name, mode))

    def _call(self, name: str, mode: Dispatch, *args: Any, **kwargs: Any) -> list[Call]:
        if mode is Dispatch.SAME:
            return [rank.call(name, args, kwargs) for rank in self.ranks]
        return [
            rank.call(name, tuple(a[i] for a in args), {k: v[i] for k, v in kwargs.items()})
            for i, rank in enumerate(self.ranks)
        ]


class ProcessLauncher:
    """See `Launcher`. The data plane is the calls themselves, which carry all values."""

    note = ""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self._in_driver = isinstance(config, ProcessesClusterConfig) and config.driver_is_rank
        self.data_plane: DataPlane = LocalDataPlane()
        self._ranks: list[_DriverRank | _ChildRank] = []
        self._forking = False

    def __enter__(self) -> Self:
        os.environ |= rank_environment(self.config) | {"MASTER_ADDR": "127.0.0.1"}  # rank 0's
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in self._ranks:
            rank.kill()
        logger.debug("all ranks have ended")
        if self._forking:
            _end_fork_server()

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> ProcessGroup:
        """See `Launcher`."""
        # Forked by a server that has only imported the worker: no rank repeats the import.
        self._ranks.clear()
        size, context = self.config.ranks, multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*FORK_SERVER_IMPORTS, worker.__module__])
        children = range(int(self._in_driver), size)
        self._forking = bool(children)
        if children:
            _start_fork_server()
        for rank in children:
            pickled_worker = _pickled(partial(make, rank, size, *args))
            self._ranks.append(_ChildRank(context, rank, pickled_worker))
        self._forking = False  # each rank has told its process id: the server has nothing to do
        if self._in_driver:
            own = self.config.worker_of_rank.index(0)
            with as_rank(own):
                self._ranks.insert(0, _DriverRank(make(0, size, *args), own))
        logger.debug("%d ranks have been started, %d in child processes", size, len(children))
        return ProcessGroup(worker, self._ranks)

    def subgroup(self, group: ProcessGroup, ranks: Sequence[int]) -> ProcessGroup:
        """See `Launcher`."""
        return ProcessGroup(group.worker, [group.ranks[rank] for rank in ranks])

    def wait(self, references: Sequence[Call], timeout: float = POLL_S) -> list[Call]:
        """See `Launcher`. Rank 0 computes in this call, after the others got their calls.

        Answers of the others come first: else they wait idle for as long as rank 0 has work.
        """
        self._receive(0)
        while not (ready := [call for call in references if call.done]):
            first = self._ranks[0]
            if isinstance(first, _DriverRank) and first.waiting:
                first.step()
                self._receive(0)
            elif not self._receive(timeout):
                return []
        return ready

    def _receive(self, timeout: float) -> bool:
        """Take what the child processes have answered; whether one has within so many seconds."""
        working = [r for r in self._ranks if isinstance(r, _ChildRank) and r.waiting]
        ready_pipes = wait([rank.answers for rank in working], timeout)
        for rank in working:
            if rank.answers in ready_pipes:
                rank.receive()
        return bool(ready_pipes)

    def get(self, reference: Call) -> Any:
        """See `Launcher`."""
        while not reference.done:
            self.wait([reference])
        if reference.failure is not None:
            raise reference.failure
        return reference.value

    def first_dead(self, group: ProcessGroup) -> tuple[int, CallFailed] | None:
        """See `Launcher`."""
        end = time.monotonic() + WORKER_DEATH_TIMEOUT_S
        children = [(i, rank) for i, rank in enumerate(group.ranks) if isinstance(rank, _ChildRank)]
        while children and time.monotonic() < end:
            for number, rank in children:
                if failure := rank.death():
                    return number, failure
            time.sleep(_POLL_S)
        return None

    def kill(self, group: ProcessGroup) -> None:
        """See `Launcher`."""
        for rank in group.ranks:
            rank.kill()

    def log(self, file: str, logs: object) -> str:
        """All ranks print to this terminal."""
        return file or "standard error"

    def other_nodes(self) -> tuple[()]:
        """See `Launcher`."""
        return ()


class _DriverRank:
    """A rank in this process. Its calls run one after the other, within `wait`."""

    def __init__(self, worker: Any, rank: int) -> None:
        self.worker, self.rank = worker, rank
        self.waiting: deque[tuple[Call, Callable[[], _Answer]]] = deque()

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = Call()
        self.waiting.append((call, partial(_run, self.worker, name, args, kwargs)))
        return call

    def step(self) -> None:
        """Run the oldest call."""
        call, method = self.waiting.popleft()
        try:
            with as_rank(self.rank):
                call.finish(*method())
        finally:
            if not call.done:  # a signal ends the run within it
                call.done, call.failure = True, CallFailed("interrupted")

    def kill(self) -> None:
        """Drop pending calls and the process group, so that this process can start another run."""
        self.waiting.clear()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


class _ChildRank:
    """A rank in a child process, which reads calls from a pipe and writes results to `answers`.

    Both sides write in a thread, so that neither blocks the other while it is in a collective. Each
    pipe has one writer: if that process dies, even within a result, the pipe ends, and no lock is
    held.
    """

    def __init__(self, context: Any, rank: int, pickled_worker: bytes) -> None:
        self.waiting: deque[Call] = deque()
        self.answers: Connection
        self.answers, writer = context.Pipe(duplex=False)
        reader, calls = context.Pipe(duplex=False)
        environment = dict(os.environ) | {"LOCAL_RANK": str(rank)}
        arguments = (environment, pickled_worker, reader, writer)
        self._process = context.Process(target=_serve, args=arguments, name=f"rank {rank}")
        self._process.start()
        writer.close()
        reader.close()
        self._calls = _sender(calls)

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = Call()
        self.waiting.append(call)
        self._calls.put(_pickled((name, args, kwargs)))
        return call

    def receive(self) -> None:
        """Read the result of its oldest call, or fail all its calls if it has died."""
        try:
            answer = self.answers.recv_bytes()
        except (EOFError, OSError):  # between two results, or within one
            self._process.join()
            failure = self.death()
            for call in self.waiting:
                call.done, call.failure = True, failure
            self.waiting.clear()
            return
        self.waiting.popleft().finish(*pickle.loads(answer))

    def death(self) -> CallFailed | None:
        """The failure that its process has ended; None while it runs."""
        if self._process.exitcode is None:
            return None
        return CallFailed(f"its process ended with {self._process.exitcode}", died=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.join(_KILLED_S)
        self._calls.put(None)


def _pickled(value: Any) -> bytes:
    """Pickle as Ray does: functions of a user's file by value."""
    from ray import cloudpickle

    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def _start_fork_server() -> None:
    """Start it with SIGINT blocked: Ctrl-C during its imports would print a traceback."""
    resource_tracker.ensure_running()  # it would unblock the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_fork_server() -> None:
    """Kill it: it may still be importing for seconds, and then fork a rank without a driver."""
    import psutil  # a bare machine lacks it: its one rank is the driver's process

    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                child.kill()
                # Not reaped: its own module does that if this process starts another run.
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def _serve(
    environment: dict[str, str], pickled_worker: bytes, calls: Connection, answers: Connection
) -> None:
    """Serve calls until the driver ends; then exit, even from within a call."""
    gc.freeze()  # to look at all that the server has imported takes a quarter of a second
    gc.enable()
    threading.Thread(target=_end_with_driver, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets it, too, and ends this process
    os.environ.clear()  # the server's environment is outdated
    os.environ.update(environment)
    sys.stdout = sys.stderr  # standard output is for the run's result
    worker, done = pickle.loads(pickled_worker)(), _sender(answers)
    while True:
        try:
            name, args, kwargs = pickle.loads(calls.recv_bytes())
        except EOFError:
            return
        done.put(_pickled(_run(worker, name, args, kwargs)))


def _run(worker: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Answer:
    """What a method returns; or what it raised, with the traceback, which the log has too."""
    if not runs_concurrently(type(worker), name):  # what a rank does beside is user code
        begin_call(name)
    try:
        with logged(logger, f"call {name}"):
            return getattr(worker, name)(*args, **kwargs), None, ""
    except Exception as error:
        logger.info("call %s failed", name, exc_info=True)
        return None, error, traceback.format_exc()
    finally:
        begin_call("")


def _end_with_driver() -> None:
    """Exit with the driver, not with `os.getppid`: the fork server lives as long as a rank."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    wait([driver.sentinel])
    os._exit(1)


def _sender(pipe: Connection) -> "queue.SimpleQueue[bytes | None]":
    """A queue that a thread writes to `pipe`, until a None or the end of the reader."""
    waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_write, args=(waiting, pipe), daemon=True).start()
    return waiting


def _write(waiting: "queue.SimpleQueue[bytes | None]", pipe: Connection) -> None:
    with pipe, contextlib.suppress(BrokenPipeError):
        while (value := waiting.get()) is not None:
            pipe.send_bytes(value)
