"""What a process that a program has forked must not do: go on with its parent's work."""

import os
import selectors
from collections.abc import Callable
from typing import Any


class ForkGuard:
    """Ends a forked child that leaves the program; the process that made it is the `owner`."""

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
    """That of an event loop, which a child does not go on with, say after a callback forks."""

    def __init__(self, guard: ForkGuard) -> None:
        super().__init__()
        self._guard = guard

    def select(self, timeout: float | None = None) -> Any:
        """As the base class."""
        self._guard.check()
        return super().select(timeout)
