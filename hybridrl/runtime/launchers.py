"""The launcher of a config, as a context of the run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridrl.compat import verl
from hybridrl.config import ClusterConfig, ClusterKind
from hybridrl.runtime.emulated_launcher import EmulatedLauncher, EmulatedRayLauncher
from hybridrl.runtime.launcher import Launcher
from hybridrl.runtime.process_launcher import ProcessLauncher
from hybridrl.runtime.ray_cluster import ray_runtime
from hybridrl.runtime.ray_launcher import RayLauncher
from hybridrl.system.short_tmpdir import shorten_tmpdir

logger = logging.getLogger(__name__)


@contextmanager
def launched(config: ClusterConfig, logs: Path) -> Iterator[Launcher]:
    """Ray, or plain processes with cluster=processes; on exit all processes have ended.

    Emulated ranks are on Ray, unless they are all in this process.
    """
    shorten_tmpdir()
    if config.emulated and not config.ranks_per_process:
        yield EmulatedLauncher(config)
        return
    if config.kind is ClusterKind.processes:
        with ProcessLauncher(config) as plain:
            yield plain
    else:
        logger.debug("Ray: starting, or joining a cluster")
        with ray_runtime(config, verl.environment(config.device), logs) as ray:
            logger.info("Ray is up, at %s", ray.get_runtime_context().gcs_address)
            yield EmulatedRayLauncher(ray, config) if config.emulated else RayLauncher(ray, config)
        logger.info("Ray has ended")
