"""A sandbox as its owner has it: how it is started, sent requests, read and ended."""

import contextlib
import json
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.surrogates import without_surrogates
from hybridrl.sandbox.worker import Mark, Settings

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Seconds for a process to import what it needs."""
LARGEST_ANSWER = 64 << 20
"""Bytes of one answer, which the replay of an episode may fill."""
MOST_READ = 1 << 20
"""Bytes that are read at a time: as many answers as there are."""
BUSY_S = 1.0
"""A process whose code runs so long without a pause gets no work: its time would count already."""
FINISH_LOOK_S = 0.02
"""Seconds between two looks at whether a process has ended that was asked to."""

_NUMBERS = count(1)


@dataclass(eq=False, slots=True, kw_only=True)
class SandboxTask:
    """What a sandbox is asked for: its `future` has the answer that is `due`.

    `home` is the process that has the task, None where it is not sent yet. `strikes` counts its
    failures. A suspect was being served when a process died, and nobody knows through whom.
    """

    number: int = field(default_factory=_NUMBERS.__next__)
    future: "Future[Any]" = field(default_factory=Future)
    home: "SandboxProcess | None" = None
    due: bool = True
    strikes: int = 0
    suspect: bool = False

    def settle(self, result: Any) -> None:
        """Give the answer that is due."""
        self.due = False
        settle(self.future, result)


class SandboxProcess:
    """The handle of a fresh interpreter that runs `hybridrl.sandbox.worker`.

    It is not started by multiprocessing, which would import the caller's main module (in a Ray
    worker: ray) and leave a resource tracker. It has a memory limit and dies with its owner. It is
    reaped by `kill` alone, so that its process group has its number until then: its children die
    with it.

    `name` says in errors what it is. `tasks` have their home here; those of `requests` are being
    served, and each must be answered by its deadline.
    """

    def __init__(
        self, settings: Settings, name: str, warned: set[str], closes_s: float = 0.0
    ) -> None:
        """It has `closes_s` seconds to close what a task leaves behind.

        `warned` has the name once an answer held lone surrogates: the pool's processes share it.
        """
        self.name, self._warned, self._closes_s = name, warned, closes_s
        self.ready = False
        self.start_deadline = time.monotonic() + START_TIMEOUT_S
        self.mark = Mark()
        self.tasks: set[SandboxTask] = set()
        self.requests: dict[int, SandboxTask] = {}
        self.limits: dict[int, float] = {}
        self.deadlines: dict[int, float] = {}
        self.busy_since, self.num_answers, self._closes_until = 0.0, 0, 0.0
        self.connection, theirs = Pipe()
        self._begun: list[bytes] = []  # what has come of the next answer
        shared = [theirs.fileno(), self.mark.descriptor]
        numbers = map(str, (theirs.fileno(), os.getpid(), self.mark.descriptor))
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "hybridrl.sandbox", *numbers],
            pass_fds=shared,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # whatever a user's code prints
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a group to kill, with its own children
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",  # numpy would start a thread a core in every process
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        theirs.close()
        self._handle = _handle_of(self.popen.pid)
        self.connection.send(settings)
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="sandbox-sender", daemon=True)
        self._sender.start()

    # -- its life ------------------------------------------------------------------------------

    def read_ready(self) -> list[Any] | None:
        """The details of its first answer, None where that has not come whole.

        Raises the error of a program that is not built.
        """
        if not (answers := self.receive()):
            return None
        kind, *details = self.answer(answers[0])
        if kind == "ConfigError":
            key, value, allowed = details
            raise ConfigError(key, value, allowed)
        if kind != "ready":
            raise RuntimeError(f"a {self.name} process did not start: {details}")
        self.ready, self.start_deadline = True, math.inf
        return details

    def no_start(self) -> RuntimeError:
        """The error to raise where it is not ready in time; it is killed."""
        return RuntimeError(
            f"a {self.name} process was not ready within {START_TIMEOUT_S:.0f} s or ended before "
            f"({self.kill()})"
        )

    @property
    def waitables(self) -> list[Any]:
        """What is ready once it has answered or died: its connection, and a handle of itself.

        Children that it has forked may keep the connection open after its death.
        """
        return [self.connection, *([] if self._handle is None else [self._handle])]

    @property
    def has_ended(self) -> bool:
        """Whether it has died; it is not reaped, but where the system cannot look only (macOS)."""
        if self.popen.returncode is not None or not hasattr(os, "waitid"):
            return self.popen.poll() is not None
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.popen.pid, options) is not None

    def hang_up(self) -> None:
        """Take no more answers: those that have come can be read, and then the end."""
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self.connection.fileno())) as same,
        ):
            same.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        """Let it close what its tasks have left, then end it."""
        if self.connection.closed:
            return
        now = time.monotonic()
        until = now + self._closes_s if self.ready and self.tasks else self._closes_until
        if self._closes_s:
            until = max(until, now + 0.5)
            self._outbox.put(None)
            self._sender.join(until - now)
            self._disconnect()
        while not self.has_ended and time.monotonic() < until:
            time.sleep(FINISH_LOOK_S)
        self.kill()

    def kill(self) -> str:
        """Kill it and its children; returns its exit code or signal, in words."""
        if self.popen.returncode is None:
            # The group still has its zombie leader, so its number cannot be another's.
            os.killpg(self.popen.pid, signal.SIGKILL)
        code = self.popen.wait()  # its own code if it had ended before
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self._disconnect()
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def _disconnect(self) -> None:
        """Close the connection, once nothing is being sent any more."""
        if self.connection.closed:
            return
        self.hang_up()  # what is still being sent fails
        self._outbox.put(None)
        self._sender.join()
        self.connection.close()
        self.mark.close()

    # -- its work ------------------------------------------------------------------------------

    def send(self, request: Sequence[Any]) -> None:
        """Have a request sent: a method's name, the task's number, the arguments.

        A process that does not read, or has died, is seen later. Raises what pickle raises for the
        arguments.
        """
        name, number, *arguments = request
        self._outbox.put(pickle.dumps((number, pickle.dumps((name, *arguments)))))

    def _send_all(self) -> None:
        """The thread that sends what there is; it alone waits where the process does not read."""
        with contextlib.suppress(OSError):
            request = self._outbox.get()
            while request is not None:
                message = [request]
                with contextlib.suppress(Empty):
                    while (request := self._outbox.get_nowait()) is not None:
                        message.append(request)
                self.connection.send_bytes(b"".join(message))
                if request is not None:
                    request = self._outbox.get()

    def receive(self) -> list[bytes]:
        """Its answers that have come whole, for `answer` to read; it waits where nothing has come.

        Raises EOFError if it is dead, ValueError where an answer is too long.
        """
        came = os.read(self.connection.fileno(), MOST_READ)
        if not came:
            raise EOFError
        self._begun.append(came)
        if b"\n" not in came:
            if sum(map(len, self._begun)) > LARGEST_ANSWER:
                raise ValueError(f"its answer has more than {LARGEST_ANSWER} bytes")
            return []
        *whole, begun = b"".join(self._begun).split(b"\n")
        self._begun = [begun]
        return whole

    def answer(self, sent: bytes) -> list[Any]:
        """Read one answer; raises ValueError for garbage."""
        answer = json.loads(sent)
        if b"\\ud" in sent:  # JSON writes whole characters beyond the first plane so, too
            answer, replaced = without_surrogates(answer)
            if replaced and self.name not in self._warned:
                self._warned.add(self.name)
                logger.warning(
                    "an answer of the %s holds lone surrogates, which are halves of characters "
                    "(%d): each is replaced with a question mark, and so are later ones, without "
                    "another warning", self.name, replaced,
                )  # fmt: skip
        if not isinstance(answer, list):
            raise ValueError(f"{answer!r} is no answer")
        return answer

    def begin(self, task: SandboxTask, seconds: float) -> None:
        """It is serving a task, and must answer within so many seconds."""
        if not self.requests:
            self.busy_since, self.num_answers = time.time(), 0
        self.requests[task.number], self.limits[task.number] = task, seconds
        self.wait_on(task.number)

    def wait_on(self, number: int) -> None:
        """A request has its time from now on. Raises KeyError for one that is not here."""
        self.deadlines[number] = time.monotonic() + self.limits[number]

    def end(self, number: int) -> None:
        """A request is answered."""
        del self.requests[number], self.limits[number], self.deadlines[number]

    def leave(self, task: SandboxTask) -> None:
        """A task has its home here no more; what it leaves may still be closing."""
        self.tasks.discard(task)
        task.home = None
        self._closes_until = time.monotonic() + self._closes_s

    @property
    def serves_suspect(self) -> bool:
        """Whether it is serving one, which is alone here."""
        return len(self.requests) == 1 and any(task.suspect for task in self.requests.values())

    def until_alone(self) -> tuple[bool, int]:
        """Orders processes by when a suspect can be served there."""
        return not self.serves_suspect, len(self.requests)

    def takes(self, task: SandboxTask, most: float) -> bool:
        """Whether a task can be served now, of at most so many; a suspect is served alone."""
        if not self.ready or len(self.requests) >= most or self.serves_suspect:
            return False
        number, since = self.mark.read()
        if number and time.monotonic() - since > BUSY_S:
            return False
        return not (task.suspect and self.requests)

    def hangs(self, seconds: float) -> bool:
        """Whether a step of someone's code takes longer than that, or an answer is overdue."""
        number, since = self.mark.read()
        now = time.monotonic()
        overdue = any(now > deadline for deadline in self.deadlines.values())
        return overdue or (number > 0 and now - since > seconds)


def wait_for(
    processes: Sequence[SandboxProcess], wake: Connection, seconds: float
) -> list[SandboxProcess]:
    """The processes that have answered or died, after at most so many seconds.

    A message to `wake` ends the wait; it is read.
    """
    owners: dict[Any, SandboxProcess] = {x: p for p in processes for x in p.waitables}
    timeout = None if seconds == math.inf else max(0.0, seconds)
    ready = wait([*owners, wake], timeout)
    if wake in ready:
        wake.recv_bytes()
    heard = dict.fromkeys(owners[x] for x in ready if x is not wake)
    for process in heard:
        if process.has_ended:
            process.hang_up()
    return list(heard)


def settle(future: "Future[Any]", result: Any) -> None:
    """Resolve a future, with None cancel it; one that is resolved stays as it is."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(result, BaseException):
            future.set_exception(result)
        elif result is not None:
            future.set_result(result)
        elif not future.cancelled() and future.cancel():
            future.set_running_or_notify_cancel()


def _handle_of(pid: int) -> int | None:
    """A descriptor that is ready once a process has ended; None where there is none (not Linux)."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None
