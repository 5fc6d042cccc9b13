"""Ranks without Ray, to debug them: rank 0 is this very process, the others are its children.

So `breakpoint()` in anything that a rank runs stops here, at this terminal, and a profiler sees one
process. What Ray does not do here: many nodes, and methods beside others (they take their turn).
"""

import contextlib
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
from typing import Any, Self

import psutil

from hybridrl.config import ClusterConfig
from hybridrl.runtime.launcher import POLL_S, WORKER_DEATH_TIMEOUT_S, CallFailed
from hybridrl.telemetry.log import as_rank, logged
from hybridrl.workers.data_plane import DataPlane, LocalDataPlane
from hybridrl.workers.dispatch import Dispatch, dispatched_methods

logger = logging.getLogger(__name__)

_POLL_S = 0.2


@dataclass(eq=False, slots=True)
class Call:
    """A call of a rank: waiting, then with its answer or its failure."""

    done: bool = False
    value: Any = None
    failure: CallFailed | None = None


class ProcessGroup:
    """Ranks with the marked methods of a worker class; each answers with a `Call` per rank."""

    def __init__(self, worker: type, ranks: "Sequence[_Here | _Child]") -> None:
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
    """See `Launcher`. The data plane is the calls themselves: what a rank puts travels in them."""

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.data_plane: DataPlane = LocalDataPlane()
        self._ranks: list[_Here | _Child] = []

    def __enter__(self) -> Self:
        os.environ |= {
            "MASTER_ADDR": "127.0.0.1",  # where rank 0 listens
            "OMP_NUM_THREADS": str(self.config.threads_per_rank),
            "TOKENIZERS_PARALLELISM": "false",
        }
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
        if error is not None:
            _end_fork_server()

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> ProcessGroup:
        """See `Launcher`."""
        # Forked by a server that has imported the worker, and nothing else: no rank pays for that.
        size, context = self.config.ranks, multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([worker.__module__])
        if size > 1:
            _start_fork_server()
        for rank in range(1, size):
            made = _pickled(partial(make, rank, size, *args))
            self._ranks.append(_Child(context, rank, made))
        with as_rank(0):
            self._ranks.insert(0, _Here(make(0, size, *args)))
        logger.debug("%d ranks have been started, the first in this process", size)
        return ProcessGroup(worker, self._ranks)

    def subgroup(self, group: ProcessGroup, ranks: Sequence[int]) -> ProcessGroup:
        """See `Launcher`."""
        return ProcessGroup(group.worker, [group.ranks[rank] for rank in ranks])

    def wait(self, references: Sequence[Call]) -> list[Call]:
        """See `Launcher`. Rank 0 works here and now, once the others have been told what to do."""
        while not (ready := [call for call in references if call.done]):
            here = self._ranks[0]
            if isinstance(here, _Here) and here.waiting:
                here.step()
            else:
                working = [r for r in self._ranks if isinstance(r, _Child) and r.waiting]
                found = wait([rank.answers for rank in working], POLL_S)
                if not found:
                    return []
                for rank in working:
                    if rank.answers in found:
                        rank.receive()
        return ready

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
        children = [(i, rank) for i, rank in enumerate(group.ranks) if isinstance(rank, _Child)]
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


class _Here:
    """A rank that is this process. Its calls run one after the other, when somebody waits."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.waiting: deque[tuple[Call, Callable[[], Any]]] = deque()

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = Call()
        self.waiting.append((call, partial(_run, self.worker, name, args, kwargs)))
        return call

    def step(self) -> None:
        """Run the oldest call."""
        call, method = self.waiting.popleft()
        try:
            with as_rank(0):
                call.value = method()
        except Exception as error:
            traceback.print_exc()  # the driver's own message is one line
            call.failure = CallFailed(str(error), error)
        call.done = True

    def kill(self) -> None:
        """What it shares with the others ends with them; the next run may begin in this process."""
        self.waiting.clear()
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


class _Child:
    """A rank in a process of its own, which takes calls from a pipe and answers in `answers`.

    Both sides write in a thread, so that neither waits for the other while it is in a collective.
    Each pipe has one writer: where that process dies, in the middle of an answer too, the pipe
    ends, and no lock is left behind.
    """

    def __init__(self, context: Any, rank: int, made: bytes) -> None:
        self.waiting: deque[Call] = deque()
        self.answers: Connection
        self.answers, writer = context.Pipe(duplex=False)
        reader, calls = context.Pipe(duplex=False)
        environment = dict(os.environ) | {"LOCAL_RANK": str(rank)}
        given = (environment, made, reader, writer)
        self._process = context.Process(target=_serve, args=given, name=f"rank {rank}")
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
        """Its oldest call has ended, or it has died and no call of it will."""
        try:
            answer = self.answers.recv_bytes()
        except (EOFError, OSError):  # between two answers, or within one
            self._process.join()
            failure = self.death()
            for call in self.waiting:
                call.done, call.failure = True, failure
            self.waiting.clear()
            return
        call, (value, cause) = self.waiting.popleft(), pickle.loads(answer)
        call.done, call.value = True, value
        call.failure = None if cause is None else CallFailed(str(cause), cause)

    def death(self) -> CallFailed | None:
        """How its process has ended, if it has."""
        if self._process.exitcode is None:
            return None
        return CallFailed(f"its process ended with {self._process.exitcode}", died=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self._calls.put(None)


def _pickled(value: Any) -> bytes:
    """As Ray does it: functions of a user's file travel by value."""
    from ray import cloudpickle

    found: bytes = cloudpickle.dumps(value)
    return found


def _start_fork_server() -> None:
    """Start it deaf to Ctrl-C, which it would else hear, loudly, while it imports the worker."""
    resource_tracker.ensure_running()  # it would unblock the signal
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _end_fork_server() -> None:
    """It may be importing for seconds still, and fork a rank that finds nobody to serve."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                child.kill()
                # Not reaped: its own module looks after it, should there be a next run here.
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


def _serve(
    environment: dict[str, str], made: bytes, calls: Connection, answers: Connection
) -> None:
    """Answer calls until the driver is gone; then end, whatever this rank does at that moment."""
    threading.Thread(target=_end_with_driver, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver gets it, too, and ends this process
    os.environ.clear()  # that of the server is as old as the server
    os.environ.update(environment)
    sys.stdout = sys.stderr  # standard output is for the run's result
    worker, done = pickle.loads(made)(), _sender(answers)
    while True:
        try:
            name, args, kwargs = pickle.loads(calls.recv_bytes())
        except EOFError:
            return
        value, cause = None, None
        try:
            value = _run(worker, name, args, kwargs)
        except Exception as error:
            traceback.print_exc()
            cause = error
        done.put(_pickled((value, cause)))


def _run(worker: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with logged(logger, f"call {name}"):
        return getattr(worker, name)(*args, **kwargs)


def _end_with_driver() -> None:
    """Of the two, `os.getppid` is the fork server, which lives while a rank does."""
    driver = multiprocessing.parent_process()
    assert driver is not None
    wait([driver.sentinel])
    os._exit(1)


def _sender(pipe: Connection) -> "queue.SimpleQueue[bytes | None]":
    """What is put there a thread writes into `pipe`, until it is None, or nobody reads any more."""
    waiting: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_write, args=(waiting, pipe), daemon=True).start()
    return waiting


def _write(waiting: "queue.SimpleQueue[bytes | None]", pipe: Connection) -> None:
    with pipe, contextlib.suppress(BrokenPipeError):
        while (value := waiting.get()) is not None:
            pipe.send_bytes(value)
