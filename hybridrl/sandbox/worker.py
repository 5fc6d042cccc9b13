"""The inside of a sandbox: `python -m hybridrl.sandbox FD PARENT MARK`.

Its owner (`process.py`) sends pickles, which it trusts: first the `Settings`, then requests, as
many in a message as there are. A request is its number and a pickle of the rest, so that one that
cannot be read costs none of the others: `UNREAD` answers it. Answers are JSON, a line each, since
the owner must not trust a process that handles a model's output. A `Mark` says whose code runs: its
event loop tells, and its owner reads.
"""

import asyncio
import contextlib
import ctypes
import importlib
import io
import json
import mmap
import os
import pickle
import resource
import selectors
import signal
import struct
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError, JailKind, JailLimits
from hybridrl.sandbox import jail

STACK_MB = 4
"""Stack of a thread: the limit of memory counts it whole."""
MOST_THREADS = 512
"""Threads in which foreign code may wait, say in a client that blocks."""
PR_SET_PDEATHSIG = 1
UNREAD = "unread"
"""First in an answer that says why a request could not be read; its number and the error follow."""
_LAYOUT = struct.Struct("<Qd")
_task: ContextVar[int] = ContextVar("task", default=0)


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


class Mark:
    """Memory shared by a sandbox and its owner: the task whose code runs, 0 for none; since when.

    Time is `time.monotonic()`, which is the machine's. The time is written before the number, and
    read after it: so it never is that of an earlier step.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Make it, or with a `descriptor` open that of the owner."""
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(_LAYOUT.size)
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _LAYOUT.size)

    def tell(self, number: int, since: float) -> None:
        """Say that the code of a task is about to run, or with 0 that it no longer does."""
        if number:
            struct.pack_into("<d", self._memory, 8, since)
        struct.pack_into("<Q", self._memory, 0, number)

    def read(self) -> tuple[int, float]:
        """The number, and the time that its step has begun."""
        number, _ = _LAYOUT.unpack_from(self._memory)
        (since,) = struct.unpack_from("<d", self._memory, 8)
        return number, since

    def close(self) -> None:
        """Give the memory up."""
        self._memory.close()
        os.close(self.descriptor)


class Marker:
    """Marks every step of a task's coroutine, and of the asyncio tasks that it starts.

    `tell(number, time)` is called before and after each of these steps. A child process that such a
    step has forked ends with the step: it must not go on with its parent's event loop.
    """

    def __init__(self, tell: Callable[[int, float], None]) -> None:
        self.tell = tell
        self.guard = ForkGuard()

    def make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        """The event loop's task factory."""
        context = options.get("context")
        number = _task.get() if context is None else context.get(_task, 0)
        coroutine = _Marked(coroutine, number, self) if number else coroutine
        return asyncio.Task(coroutine, loop=loop, **options)


def start_marked(number: int, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a coroutine as the code of a task; with number 0 as nobody's."""
    token = _task.set(number)
    try:
        return asyncio.get_running_loop().create_task(coroutine)
    finally:
        _task.reset(token)


class _Marked(Coroutine[Any, Any, Any]):
    """A coroutine each of whose steps is marked as a task's."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, marker: Marker) -> None:
        self._coroutine, self._number = coroutine, number
        self._tell, self._guard = marker.tell, marker.guard

    def send(self, value: Any) -> Any:
        """One step."""
        return self._step(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        """One step, which begins with an error."""
        return self._step(self._coroutine.throw, *error)

    def _step(self, go: Callable[..., Any], *arguments: Any) -> Any:
        self._guard.check()  # before a mark, which a child shares
        self._tell(self._number, time.monotonic())
        try:
            return self._guard.run(go, *arguments)
        except (SystemExit, KeyboardInterrupt) as error:  # they would end the loop
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        finally:
            self._tell(0, 0.0)

    def close(self) -> None:
        """End it."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


class ForkGuard:
    """Ends a forked child that leaves the code of a task; the process that made it is `owner`."""

    def __init__(self) -> None:
        self.owner = os.getpid()

    def check(self, error: BaseException | None = None) -> None:
        """End this process if it is a child, with the exit code that Python has for `error`."""
        if os.getpid() == self.owner:
            return
        code = 0 if error is None or isinstance(error, StopIteration) else 1
        if isinstance(error, SystemExit) and isinstance(error.code, int | None):
            code = (error.code or 0) & 0xFF
        os._exit(code)

    def run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """What `step` gives or raises; a child does not come back from it."""
        try:
            value = step(*arguments)
        except BaseException as error:
            self.check(error)
            raise
        self.check()
        return value


class GuardedSelector(selectors.DefaultSelector):
    """The selector of an event loop that no child goes on with, say after a callback forks."""

    def __init__(self, guard: ForkGuard) -> None:
        super().__init__()
        self._guard = guard

    def select(self, timeout: float | None = None) -> Any:
        """As the base class."""
        self._guard.check()
        return super().select(timeout)


class TimeLimitReached(Exception):
    """Foreign code took longer than it may."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitReached after `seconds` of this process's computing; in its main thread alone.

    Python looks for signals within a regular expression that backtracks, too. Elsewhere no thread
    could end one, since it holds the interpreter. Waiting does not count, so a loaded machine ends
    none.
    """

    def end(*_: object) -> None:
        raise TimeLimitReached(f"it computes for more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


async def serve(connection: Connection, service: Service) -> None:
    """Handle requests until the owner closes the connection, which ends the process."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    running: set[asyncio.Task[None]] = set()  # the loop itself keeps no task alive

    def start(number: int, pickled: bytes) -> None:
        try:
            name, *arguments = pickle.loads(pickled)
            handling = getattr(service, name)(number, *arguments)
        except Exception as error:  # a class that is not found here, say
            service.answer(UNREAD, number, f"{type(error).__name__}: {error}")
            return
        task = start_marked(number if service.marks_requests else 0, handling)
        running.add(task)
        task.add_done_callback(running.discard)

    def start_all(requests: Sequence[tuple[int, bytes]]) -> None:
        for request in requests:
            start(*request)

    def read() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.call_soon_threadsafe(start_all, _pickles(connection.recv_bytes()))
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, daemon=True).start()
    await ended.wait()
    await service.close(running)


def _pickles(message: bytes) -> list[Any]:
    """The values that a message has as pickles, one after the other."""
    file, values = io.BytesIO(message), []
    while file.tell() < len(message):
        values.append(pickle.load(file))
    return values


async def run(connection: Connection, settings: Settings, marker: Marker) -> None:
    """Build the service, report ready, and serve."""
    loop = asyncio.get_running_loop()
    loop.set_task_factory(marker.make_task)
    num_threads = min(MOST_THREADS, settings.memory_mb // STACK_MB // 2)
    loop.set_default_executor(ThreadPoolExecutor(num_threads, "foreign"))

    def answer(*values: Any) -> None:
        # It leaves before other code runs, which may end this process.
        line = json.dumps(values).encode() + b"\n"
        while line:
            line = line[os.write(connection.fileno(), line) :]

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
