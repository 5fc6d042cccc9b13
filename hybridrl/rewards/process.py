"""A process for untrusted code: how it is started, waited for, read and ended."""

import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from hybridrl.config import ConfigError, JudgeConfig, SourceConfig
from hybridrl.config.surrogates import without_surrogates

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Seconds for a process to import what it needs."""
LARGEST_ANSWER = 1 << 16
"""Bytes of one answer of a verifier: a number, a short message, the judged text."""


class SandboxedProcess:
    """The handle of a process that runs the program `module`, which is sent `settings` first.

    A fresh interpreter, not started by multiprocessing, which would import the caller's main module
    (in a Ray worker: ray) and leave a resource tracker. It has a memory limit and dies with its
    parent. It is sent pickles and answers in JSON, since it handles a model's output.

    `name` says in errors what it is. Besides its connection it inherits the descriptors `shared`,
    whose numbers follow on its command line. `deadline` is the moment by which it must be ready;
    whoever gives it work sets it anew. It is reaped by `kill` alone, so that its process group has
    its number until then: its children die with it.
    """

    def __init__(
        self,
        module: str,
        settings: tuple[Any, ...],
        name: str,
        *,
        largest_answer: int = LARGEST_ANSWER,
        shared: Sequence[int] = (),
    ) -> None:
        self.name, self.largest_answer = name, largest_answer
        self.ready = False
        self.replaced = 0
        """Lone surrogates that its answers had."""
        self.deadline = time.monotonic() + START_TIMEOUT_S
        self.connection, theirs = Pipe()
        descriptors = [theirs.fileno(), *shared]
        self.popen = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, [theirs.fileno(), os.getpid(), *shared])],
            pass_fds=descriptors,
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

    def set_ready(self) -> None:
        """Read its first answer; raises the error of a program that could not be built."""
        kind, *details = self.receive()
        if kind == "ConfigError":
            key, value, allowed = details
            raise self.refusal(key, value, allowed)
        if kind != "ready":
            raise RuntimeError(f"a {self.name} process did not start: {details}")
        self.ready, self.deadline = True, math.inf
        self.on_ready(details)

    def refusal(self, key: str, value: str, allowed: str) -> ConfigError:
        """The error for a setting that its program refuses."""
        return ConfigError(key, value, allowed)

    def on_ready(self, details: list[Any]) -> None:
        """Take what its program says of itself."""

    def wait_ready(self) -> None:
        """Wait for it; raises as `set_ready`, and RuntimeError where it ends or takes too long."""
        try:
            wait(self.waitables, max(0.0, self.deadline - time.monotonic()))
            if not self.connection.poll():
                raise EOFError
            self.set_ready()
        except (EOFError, OSError) as error:
            raise self.no_start() from error

    def no_start(self) -> RuntimeError:
        """The error to raise where it is not ready in time; it is killed."""
        return RuntimeError(
            f"a {self.name} process was not ready within {START_TIMEOUT_S:.0f} s or ended before "
            f"({self.kill()})"
        )

    def receive(self) -> list[Any]:
        """Its next answer. Raises EOFError or OSError if it is dead, ValueError for garbage."""
        sent = self.connection.recv_bytes(self.largest_answer)
        answer = json.loads(sent)
        if b"\\ud" in sent:  # JSON writes whole characters beyond the first plane so, too
            answer, replaced = without_surrogates(answer)
            if replaced and not self.replaced:
                logger.warning("a %s process answers with lone surrogates: each becomes ?",
                               self.name)  # fmt: skip
            self.replaced += replaced
        if not isinstance(answer, list):
            raise ValueError(f"{answer!r} is no answer")
        return answer

    def disconnect(self) -> None:
        """Close the connection, which ends it where it still listens."""
        self.connection.close()

    def kill(self) -> str:
        """Kill it and its children; returns its exit code or signal, in words."""
        if self.popen.returncode is None:
            # The group still has its zombie leader, so its number cannot be another's.
            os.killpg(self.popen.pid, signal.SIGKILL)
        code = self.popen.wait()  # its own code if it had ended before
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self.disconnect()
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


Handle = TypeVar("Handle", bound=SandboxedProcess)


def wait_for(processes: Sequence[Handle], wake: Connection | None, seconds: float) -> list[Handle]:
    """The processes that have answered or died, after at most so many seconds.

    A message to `wake` ends the wait; it is read.
    """
    owners: dict[Any, Handle] = {x: process for process in processes for x in process.waitables}
    timeout = None if seconds == math.inf else max(0.0, seconds)
    ready = wait([*owners, *([] if wake is None else [wake])], timeout)
    if wake is not None and wake in ready:
        wake.recv_bytes()
    heard = dict.fromkeys(owners[x] for x in ready if x is not wake)
    for process in heard:
        if process.has_ended:
            process.hang_up()
    return list(heard)


def _handle_of(pid: int) -> int | None:
    """A descriptor that is ready once a process has ended; None where there is none (not Linux)."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError):
        return os.pidfd_open(pid)
    return None


class JudgeProcess(SandboxedProcess):
    """A process that judges; `more` follows the settings in what it is sent first.

    The settings are those under the key `role`, which errors name.
    """

    def __init__(
        self,
        module: str,
        config: JudgeConfig,
        sources: Mapping[str, SourceConfig],
        *more: Any,
        role: str = "reward",
        largest_answer: int = LARGEST_ANSWER,
    ) -> None:
        self.config, self.role = config, role
        self.jail, self.waits = "", False
        settings = (config, dict(sources), list(sys.path), *more)
        name = f"verifier ({role}.kind={config.kind.value})"
        super().__init__(module, settings, name, largest_answer=largest_answer)

    def refusal(self, key: str, value: str, allowed: str) -> ConfigError:
        """As the base class; the process calls its settings `reward`."""
        return ConfigError(key.replace("reward.", f"{self.role}.", 1), value, allowed)

    def on_ready(self, details: list[Any]) -> None:
        """Its jail, and whether it waits."""
        self.jail, self.waits = str(details[0]), bool(details[1])
