"""Ranks as actors of Ray, through verl's worker groups."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridrl.compat import verl
from hybridrl.config import ClusterConfig
from hybridrl.runtime.launcher import (
    POLL_S,
    WORKER_DEATH_TIMEOUT_S,
    CallFailed,
    rank_environment,
)
from hybridrl.runtime.ray_cluster import ranks_placement
from hybridrl.runtime.ray_data_plane import RayDataPlane
from hybridrl.workers.data_plane import DataPlane

logger = logging.getLogger(__name__)


class RayLauncher:
    """Ranks as Ray's actors, one in each bundle of the placement groups."""

    note = ""

    def __init__(self, ray: Any, config: ClusterConfig) -> None:
        self.ray, self.config = ray, config
        self.data_plane: DataPlane = RayDataPlane()

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> Any:
        """See `Launcher`."""
        logger.debug("placing %d ranks", self.config.ranks)
        bundles = ranks_placement(self.ray, self.config)
        env = rank_environment(self.config) | verl.environment(self.config.device)
        logger.debug("starting the ranks' actors")
        worker_class = verl.worker_class(worker, make, *args)
        return verl.worker_group(worker_class, bundles, self.config.device, env)

    def subgroup(self, group: Any, ranks: Sequence[int]) -> Any:
        """See `Launcher`."""
        return verl.subgroup(group, list(ranks))

    def wait(self, references: Sequence[Any], timeout: float = POLL_S) -> list[Any]:
        """See `Launcher`."""
        waited = list(references)
        ready, others = self.ray.wait(waited, num_returns=1, timeout=timeout)
        if ready and others:  # all that have ended: each look goes through all of `waited`
            ready = self.ray.wait(waited, num_returns=len(waited), timeout=0)[0]
        return list(ready)

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
        end = time.monotonic() + WORKER_DEATH_TIMEOUT_S
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
        """A cluster started for the run ends with it; the run keeps its workers' logs."""
        return str(logs / Path(file).name) if file and self.config.address is None else file
