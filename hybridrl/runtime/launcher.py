"""The interface of launchers, by which the driver starts ranks, calls them and waits for them.

Calls never block; each returns a reference, to be waited for and read.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from hybridrl.config import ClusterConfig
from hybridrl.workers.data_plane import DataPlane

WORKER_DEATH_TIMEOUT_S = 2.0
"""Seconds in which a death may be reported after the failure that it caused; Ray takes some ms."""


POLL_S = 1.0
"""Seconds that `Launcher.wait` blocks: between two calls the driver checks whether to end."""


def rank_environment(config: ClusterConfig) -> dict[str, str]:
    """Variables of every rank. One on a GPU takes its threads when it knows the node's cores."""
    threads = str(config.threads_per_rank or 1)
    return {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"}


class CallFailed(RuntimeError):
    """A call of a rank failed: its method raised `cause`, or its process ended or is stuck.

    `died` is true of both. `trace` is the traceback of a rank that shares the driver's terminal.
    """

    def __init__(
        self,
        message: str,
        cause: BaseException | None = None,
        died: bool = False,
        trace: str = "",
        stuck: bool = False,
    ) -> None:
        super().__init__(" ".join(message.split()))
        self.cause, self.died, self.trace = cause, died or stuck, trace
        self.stuck = stuck


class RemoteObject(Protocol):
    """An object on another node."""

    def call(self, *args: Any) -> "Future[Any]":
        """Begin its coroutine `call`; the future may raise `CallFailed`."""
        ...

    def kill(self) -> None:
        """End its process now."""
        ...


class OtherNode(Protocol):
    """A node of the cluster that is not the driver's."""

    @property
    def name(self) -> str:
        """As the cluster calls it."""
        ...

    @property
    def share(self) -> float:
        """Its part of the CPUs of all nodes."""
        ...

    def start(self, kind: type, *args: Any) -> RemoteObject:
        """Start a process there, which makes the object `kind(*args)`."""
        ...


class Launcher(Protocol):
    """Starts ranks and waits for their results.

    A group has the marked methods of its worker class; they return one reference per rank.
    """

    data_plane: DataPlane
    note: str
    """What users should know of the ranks; empty where these compute."""

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> Any:
        """A group of all ranks, each `make(rank, size, *args)`, with the marks of `worker`.

        Ranks that were started before have been killed.
        """
        ...

    def subgroup(self, group: Any, ranks: Sequence[int]) -> Any:
        """Return a group of only these `ranks` of `group`."""
        ...

    def wait(self, references: Sequence[Any], timeout: float = POLL_S) -> list[Any]:
        """The finished ones of `references`; none after `timeout` seconds without any."""
        ...

    def get(self, reference: Any) -> Any:
        """Wait for the result of a call; raises `CallFailed`."""
        ...

    def first_dead(self, group: Any) -> tuple[int, CallFailed] | None:
        """A rank whose process has ended, shortly after some call has failed."""
        ...

    def kill(self, group: Any) -> None:
        """End every rank now."""
        ...

    def log(self, file: str, logs: Path) -> str:
        """The path of a rank's log `file` after the run, whose directory of logs is `logs`."""
        ...

    def other_nodes(self) -> Sequence[OtherNode]:
        """The nodes of a Ray cluster but the driver's; none of another kind of cluster."""
        ...
