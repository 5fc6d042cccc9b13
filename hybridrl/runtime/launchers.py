"""The launcher of a config, as a context of the run."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridrl.compat import verl
from hybridrl.config import ClusterConfig, EmulatedClusterConfig, ProcessesClusterConfig
from hybridrl.runtime.emulated_launcher import EmulatedLauncher
from hybridrl.runtime.launcher import Launcher
from hybridrl.runtime.process_launcher import ProcessLauncher
from hybridrl.runtime.ray_cluster import ray_runtime
from hybridrl.runtime.ray_launcher import RayLauncher
from hybridrl.system.short_tmpdir import shorten_tmpdir

logger = logging.getLogger(__name__)


@contextmanager
def launched(config: ClusterConfig, logs: Path) -> Iterator[Launcher]:
    """Yield the launcher of this kind of cluster; on exit all its processes have ended."""
    shorten_tmpdir()
    if isinstance(config, EmulatedClusterConfig):
        yield EmulatedLauncher(config)
    elif isinstance(config, ProcessesClusterConfig):
        with ProcessLauncher(config) as plain:
            yield plain
    else:
        logger.debug("Ray: starting, or joining a cluster")
        with ray_runtime(config, verl.environment(config.device), logs) as ray:
            logger.info("Ray is up, at %s", ray.get_runtime_context().gcs_address)
            yield RayLauncher(ray, config)
        logger.info("Ray has ended")
