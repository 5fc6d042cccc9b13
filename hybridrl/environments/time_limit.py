"""The limit of time of a program's step, which does not count what it waits in a queue."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

BEAT_S = 1.0
"""Seconds between two calls of `on_beat`, while a program is queued."""


class TimeLimit:
    """Counts the seconds of one step after another, without those in which its program is queued.

    States: off, runs, queued. `begin` turns it on, `end` off. While it is on and something is
    within `queued`, nothing counts, and `on_beat` says each second that the program still waits.

    Example: of a limit of 2 s, a program takes 1 s, is queued for 60 s, and has 1 s left.
    """

    def __init__(self) -> None:
        self.on_beat: Callable[[], None] = lambda: None
        self._reached: asyncio.Future[None] | None = None  # None: off
        self._limit = self._left = self._since = 0.0
        self._num_queued = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float) -> "asyncio.Future[None]":
        """A step begins; gives a future that is done once it has taken so many seconds."""
        self._reached = asyncio.get_running_loop().create_future()
        self._limit = self._left = seconds
        self._continue()
        return self._reached

    def end(self) -> float:
        """The step has ended; gives the seconds that counted."""
        self._pause()
        self._reached = None
        return self._limit - self._left

    @contextlib.contextmanager
    def queued(self) -> Iterator[None]:
        """What a program waits in here is not counted."""
        self._pause()
        self._num_queued += 1
        self._continue()
        try:
            yield
        finally:
            self._pause()
            self._num_queued -= 1
            self._continue()

    def _pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if not self._num_queued:
                self._left -= time.monotonic() - self._since

    def _continue(self) -> None:
        if self._reached is None or self._reached.done():
            return
        loop, self._since = asyncio.get_running_loop(), time.monotonic()
        if self._num_queued:
            self._timer = loop.call_later(BEAT_S, self._beat)
        else:
            self._timer = loop.call_later(max(0.0, self._left), self._reach)

    def _beat(self) -> None:
        self.on_beat()
        self._continue()

    def _reach(self) -> None:
        self._pause()
        assert self._reached is not None, "a limit that is off"
        self._reached.set_result(None)
