"""Ranks as actors of Ray, through verl's worker groups."""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.compat import verl
from hybridrl.config import ClusterConfig, ConfigError
from hybridrl.runtime.errors import RayStartError
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

_GONE = (
    "LocalRayletDiedError", "NodeDiedError", "WorkerCrashedError", "RayActorError",
    "TaskPlacementGroupRemoved", "ActorPlacementGroupRemoved", "ObjectLostError", "RpcError",
    "RaySystemError", "GetTimeoutError",
)  # fmt: skip
"""Errors of Ray which say that a part of it has ended, or does not answer."""

MOST_CALLS = 100_000
"""Calls at a time of an object on another node; its pool bounds what it does."""


class RayLauncher:
    """Ranks as Ray's actors, one in each bundle of the placement groups."""

    note = ""

    def __init__(self, ray: Any, config: ClusterConfig) -> None:
        self.ray, self.config = ray, config
        self.data_plane: DataPlane = RayDataPlane()
        self._placed: list[Any] = []  # placement groups of the present ranks

    def start(self, worker: type, make: Callable[..., Any], *args: Any) -> Any:
        """See `Launcher`."""
        again = " anew" if self._placed else ""
        try:
            return self._start(verl.worker_class(worker, make, *args))
        except (ConfigError, RayStartError, self.ray.exceptions.RayError) as error:
            if isinstance(error, ConfigError) and not again:
                raise
            gone = (getattr(self.ray.exceptions, name) for name in _GONE)
            died = isinstance(error, (ConfigError, RayStartError, *gone))
            text = str(error) if died else str(error).strip().rpartition("\n")[2]
            reason = " ".join(text.split())
            raise RayStartError(f"the ranks could not start{again}: {reason}", died) from error

    def _start(self, worker_class: type) -> Any:
        """Place the ranks and start their actors, on the resources of the ranks before."""
        logger.debug("placing %d ranks", self.config.ranks)
        for group in self._placed:
            self.ray.util.remove_placement_group(group)
        bundles = ranks_placement(self.ray, self.config)
        self._placed = [*{bundle.group.id: bundle.group for bundle in bundles}.values()]
        env = rank_environment(self.config) | verl.environment(self.config.device)
        logger.debug("starting the ranks' actors")
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

    def other_nodes(self) -> list["RayNode"]:
        """See `Launcher`; a node without CPUs is left out."""
        here = self.ray.get_runtime_context().get_node_id()
        nodes = {node["NodeID"]: node for node in self.ray.nodes() if node["Alive"]}
        cpus = {id: node["Resources"].get("CPU", 0.0) for id, node in nodes.items()}
        cpus[here] = max(1.0, cpus.get(here, 0.0))
        total = sum(cpus.values())
        return [
            RayNode(self.ray, id, nodes[id]["NodeManagerHostname"], number / total)
            for id, number in sorted(cpus.items())
            if number and id != here
        ]

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


@dataclass(frozen=True)
class RayNode:
    """See `OtherNode`."""

    ray: Any
    id: str
    name: str
    share: float

    def start(self, kind: type, *args: Any) -> "RayObject":
        """See `OtherNode`: an actor without CPUs of its own, which Ray would keep for it."""
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        options = {"num_cpus": 0, "max_concurrency": MOST_CALLS}
        actor = self.ray.remote(**options, scheduling_strategy=affinity(self.id, soft=False))(kind)
        return RayObject(self.ray, actor.remote(*args))


@dataclass(frozen=True)
class RayObject:
    """See `RemoteObject`."""

    ray: Any
    actor: Any

    def call(self, *args: Any) -> "Future[Any]":
        """See `RemoteObject`. All but an error of the object's own says that it is gone."""
        future: Future[Any] = Future()

        def ended(of_ray: "Future[Any]") -> None:
            error = of_ray.exception()
            if error is None:
                future.set_result(of_ray.result())
            else:
                cause = getattr(error, "cause", None)
                future.set_exception(CallFailed(str(error), cause, cause is None))

        self.actor.call.remote(*args).future().add_done_callback(ended)
        return future

    def kill(self) -> None:
        """See `RemoteObject`."""
        self.ray.kill(self.actor)
