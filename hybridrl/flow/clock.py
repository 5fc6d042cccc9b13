"""Time as schedules see it: the driver's wall time, or the planner's virtual time."""

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed point; never goes back."""

    def now(self) -> float:
        """Seconds."""
        ...


class WallClock:
    """Unix time, so that spans measured on different ranks of a node share one axis."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()


class VirtualClock:
    """Time that moves only when it is told to."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """Seconds since the start of the simulation."""
        return self._now

    def advance_to(self, when: float) -> None:
        """Move to `when`; going back is a bug."""
        assert when >= self._now, f"virtual time cannot go back from {self._now} to {when}"
        self._now = when
