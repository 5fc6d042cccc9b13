"""The inside of a sandbox: `python -m hybridrl.sandbox FD PARENT MARK`.

Its owner (`process.py`) sends pickles, which it trusts: first the `Settings`, then requests. It
answers in JSON, since its owner must not trust a process that handles a model's output.
"""

import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import resource
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError, JailKind, JailLimits
from hybridrl.sandbox import jail
from hybridrl.sandbox.mark import GuardedSelector, Mark, Marker, start_marked

STACK_MB = 4
"""Stack of a thread: the limit of memory counts it whole."""
MOST_THREADS = 512
"""Threads in which foreign code may wait, say in a client that blocks."""
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Settings:
    """What a sandbox runs, and the limits that its code has."""

    program: str
    """The module whose `make(answer, *arguments)` gives the service."""
    arguments: tuple[Any, ...]
    jail: JailKind = JailKind.auto
    """With `limits` what `hybridrl.sandbox.jail` takes where a call says nothing."""
    limits: JailLimits = field(default_factory=JailLimits)
    memory_mb: int = 4096
    """Data of the process: heap and anonymous maps."""
    paths: tuple[str, ...] = field(default_factory=lambda: tuple(sys.path))
    """A user's module is found as in the owner."""


class Service(ABC):
    """What a sandbox does for its owner; all of it on one event loop.

    A request names a method and has the number of its task. The service calls `answer(number, ...)`
    when it is done. `answer(number)` alone says that the task is queued for something else than its
    own code: its time begins anew.
    """

    marks_requests = True
    """Whether the code of a request is foreign; else the service marks what is."""

    def __init__(self, answer: Callable[..., None]) -> None:
        self.answer = answer

    @abstractmethod
    async def open(self) -> list[Any]:
        """Build what requests need; its details for the owner, in JSON. May raise ConfigError."""

    @abstractmethod
    async def close(self, running: Collection["asyncio.Task[None]"]) -> None:
        """End what requests have left, when the owner has hung up; some may be `running`."""


async def serve(connection: Connection, service: Service) -> None:
    """Handle requests until the owner closes the connection, which ends the process."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    running: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive

    def start(name: str, number: int, *arguments: Any) -> None:
        handling = getattr(service, name)(number, *arguments)
        task = start_marked(number if service.marks_requests else 0, handling)
        running.add(task)
        task.add_done_callback(running.discard)

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(start, *connection.recv())
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()
    await service.close(running)


async def run(connection: Connection, settings: Settings, marker: Marker) -> None:
    """Build the service, report ready, and serve."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(marker.make_task)
    num_threads = min(MOST_THREADS, settings.memory_mb // STACK_MB // 2)
    loop.set_default_executor(ThreadPoolExecutor(num_threads, "foreign"))

    def answer(*values: Any) -> None:
        connection.send_bytes(json.dumps(values).encode())

    try:
        make = importlib.import_module(settings.program).make
        service: Service = make(answer, *settings.arguments)
        details = await service.open()
    except ConfigError as error:
        answer("ConfigError", error.key, str(error.value), error.allowed)
        return
    except BaseException as error:
        answer("Error", f"{type(error).__name__}: {error}")
        return
    answer("ready", *details)
    await serve(connection, service)


def limit_process(parent: int, memory: int) -> None:
    """Bound this process's memory in bytes, write no core dumps, die when `parent` does (Linux).

    So do the jails that it starts, of which the kernel ends one before a rank.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):  # what the kernel ends first where memory is short
        Path("/proc/self/oom_score_adj").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call above
            os._exit(1)


def keep_from_children(connection: Connection) -> None:
    """Children do not have the connection to the owner, and die with this process (Linux).

    The latter are those that the main thread forks. Its death is this process's; that of another
    thread would kill its children early. The owner kills the others, while it lives.
    """
    os.set_inheritable(connection.fileno(), False)
    owner, forks_main = os.getpid(), False

    def before() -> None:
        nonlocal forks_main
        forks_main = threading.get_native_id() == owner

    def in_child() -> None:
        connection.close()
        if sys.platform == "linux" and forks_main and os.getppid() == owner:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != owner:  # it died before the call above
                os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)


def main(arguments: Sequence[str]) -> None:
    """Serve the owner, within the limits."""
    descriptor, parent, mark = map(int, arguments)
    connection = Connection(descriptor)
    settings: Settings = connection.recv()
    limit_process(parent, settings.memory_mb << 20)
    keep_from_children(connection)
    threading.stack_size(STACK_MB << 20)
    sys.path[:] = settings.paths
    jail.configure(settings.jail, settings.limits)
    marker = Marker(Mark(mark).tell)

    def make_loop() -> asyncio.AbstractEventLoop:
        return asyncio.SelectorEventLoop(GuardedSelector(marker.guard))

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(run(connection, settings, marker))
