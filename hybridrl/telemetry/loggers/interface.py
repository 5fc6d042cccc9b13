"""The interface of all loggers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

CLOSE_S = 30.0
"""Seconds that the end of a run waits for its loggers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A run as services list it: its directory, its project, all settings by dotted key."""

    run_dir: Path
    project: str
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name that people read; ids are the services' own."""
        return self.run_dir.resolve().name


def with_phase(phase: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Metrics by the names that loggers have for them: `phase/name`."""
    return {f"{phase}/{name}" if phase else name: value for name, value in metrics.items()}


class RunLogger(Protocol):
    """Sends a run's metrics and samples to one service. Used from one thread, in this order.

    It imports its library in `start`. Whatever it raises, the run continues without it.
    """

    keeps_last_step: bool = False
    """Whether the library stores a step only when a later one comes, or `close`."""

    last_step: int | None = None
    """Set by `start`: the last step that the service has, where it says so."""

    def start(self, run: LoggedRun, run_id: str | None) -> str:
        """Open a run at the service: a new one, or `run_id` of an earlier process; its id."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send metrics of `step`, `phase/name` each; a step may have several calls."""
        ...

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send samples of `step` as a table; all rows have the same keys."""
        ...

    def close(self, state: str) -> None:
        """End the run at the service; `state` is finished, interrupted or failed."""
        ...
