"""How the driver starts ranks, calls them and waits for them: the interface of every launcher.

Calls never block; each answers with a reference, to be waited for and read.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from hybridrl.workers.data_plane import DataPlane

WORKER_DEATH_TIMEOUT_S = 2.0
"""How long a death may come after the failure that it caused; Ray hears of it in milliseconds."""


POLL_S = 1.0
"""How long `Launcher.wait` blocks: between two calls the driver looks whether it shall end."""


class CallFailed(RuntimeError):
    """A call of a rank failed, because its method raised `cause`, or, `died`, its process ended."""

    def __init__(self, message: str, cause: BaseException | None = None, died: bool = False):
        super().__init__(" ".join(message.split()))
        self.cause, self.died = cause, died


class Launcher(Protocol):
    """Starts ranks and waits for their answers.

    A group has the marked methods of its worker class; they answer with one reference per rank.
    """

    data_plane: DataPlane

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> Any:
        """A group of all ranks, each `make(rank, size, *args)`, with the marks of `worker`."""
        ...

    def subgroup(self, group: Any, ranks: Sequence[int]) -> Any:
        """The same ranks, but only those of `ranks`."""
        ...

    def wait(self, references: Sequence[Any]) -> list[Any]:
        """Those of `references` that are there; none after `POLL_S` seconds without any."""
        ...

    def get(self, reference: Any) -> Any:
        """What a call answered, waited for; raises `CallFailed`."""
        ...

    def first_dead(self, group: Any) -> tuple[int, CallFailed] | None:
        """A rank whose process has ended, shortly after some call has failed."""
        ...

    def kill(self, group: Any) -> None:
        """End every rank now."""
        ...

    def log(self, file: str, logs: Path) -> str:
        """Where a rank's log `file` is after the run, whose directory of logs is `logs`."""
        ...
