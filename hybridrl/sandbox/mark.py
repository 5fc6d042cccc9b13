"""Whose code runs in a sandbox: told by its event loop, and read by the process that owns it."""

import asyncio
import mmap
import os
import selectors
import struct
import tempfile
import time
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from typing import Any

_LAYOUT = struct.Struct("<Qd")
_task: ContextVar[int] = ContextVar("task", default=0)


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
