"""How ranks come to be and are called: the seam between a worker group and Ray, or plain processes.

Calls never block; each answers with a reference, to be waited for and taken.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hybridrl.cluster.runtime import ranks_placement, ray_runtime
from hybridrl.compat import verl
from hybridrl.config import ClusterConfig, ClusterKind
from hybridrl.controller.data_plane import RayDataPlane
from hybridrl.workers.data_plane import DataPlane

DEATH_S = 2.0
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


@contextmanager
def launched(config: ClusterConfig, logs: Path) -> Iterator[Launcher]:
    """Ray, or with cluster=processes none of it; on the way out no process is left."""
    if config.kind is ClusterKind.processes:
        from hybridrl.controller.processes import ProcessLauncher

        with ProcessLauncher(config) as plain:
            yield plain
    else:
        with ray_runtime(config, verl.environment(), logs) as ray:
            yield RayLauncher(ray, config)


class RayLauncher:
    """Ranks as Ray's actors, one in each bundle of the placement groups."""

    def __init__(self, ray: Any, config: ClusterConfig) -> None:
        self.ray, self.config = ray, config
        self.data_plane: DataPlane = RayDataPlane()

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> Any:
        """See `Launcher`."""
        use_gpu = verl.has_gpu()
        placements = ranks_placement(self.ray, self.config, use_gpu)
        env = verl.environment() | {
            "OMP_NUM_THREADS": str(self.config.threads_per_rank),
            "TOKENIZERS_PARALLELISM": "false",
        }
        return verl.worker_group(verl.worker_class(worker, make, *args), placements, use_gpu, env)

    def subgroup(self, group: Any, ranks: Sequence[int]) -> Any:
        """See `Launcher`."""
        return verl.subgroup(group, list(ranks))

    def wait(self, references: Sequence[Any]) -> list[Any]:
        """See `Launcher`."""
        ready: list[Any] = self.ray.wait(list(references), num_returns=1, timeout=POLL_S)[0]
        return ready

    def get(self, reference: Any) -> Any:
        """See `Launcher`."""
        try:
            return self.ray.get(reference)
        except self.ray.exceptions.RayError as error:
            died = isinstance(error, self.ray.exceptions.RayActorError)
            raise CallFailed(str(error), getattr(error, "cause", None), died) from error

    def first_dead(self, group: Any) -> tuple[int, CallFailed] | None:
        """See `Launcher`."""
        pending = {handle.__ray_ready__.remote(): i for i, handle in enumerate(group.workers)}
        end = time.monotonic() + DEATH_S
        while pending and (left := end - time.monotonic()) > 0:
            ready, _ = self.ray.wait(list(pending), timeout=left)
            for reference in ready:
                rank = pending.pop(reference)
                try:
                    self.get(reference)
                except CallFailed as failed:
                    if failed.died:
                        return rank, failed
        return None

    def kill(self, group: Any) -> None:
        """See `Launcher`."""
        for handle in group.workers:
            self.ray.kill(handle)

    def log(self, file: str, logs: Path) -> str:
        """A cluster of our own does not outlive the run, which keeps its workers' logs."""
        return str(logs / Path(file).name) if file and self.config.address is None else file
