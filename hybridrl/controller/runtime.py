"""Ray, started for a run and ended with it."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.config import ClusterConfig, ConfigError


@contextmanager
def ray_runtime(config: ClusterConfig, env: dict[str, str], logs: Path) -> Iterator[Any]:
    """Join the cluster at `cluster.address`, or start a local one; yields the ray module.

    The workers' logs of a local cluster are kept in `logs`. It has its own temporary directory and more logical CPUs than ranks, since Ray's
    CPUs are only tickets: the ranks' threads are set by `cluster.threads_per_rank`.
    """
    os.environ.update(env)
    # Ray reads these at import: no usage report, no metrics agent, no warning about either.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if config.address is None:
        temp = tempfile.mkdtemp(prefix="hrl")  # short: Ray puts sockets below it (107 characters)
        options |= {
            "num_cpus": config.ranks + 2,
            "include_dashboard": False,
            "object_store_memory": 512 * 1024**2,
            "_temp_dir": temp,
        }
    try:
        ray.init(address=config.address or "local", **options)
    except ConnectionError as error:
        raise ConfigError("cluster.address", config.address, "a running Ray cluster") from error
    try:
        yield ray
    finally:
        ray.shutdown()
        if config.address is None:
            _keep_logs(Path(temp), logs)


def _keep_logs(temp: Path, logs: Path) -> None:
    """Keep what the workers printed, and delete Ray's temporary directory."""
    logs.mkdir(parents=True, exist_ok=True)
    for file in temp.glob("session_2*/logs/worker-*"):
        if file.suffix in (".out", ".err") and file.stat().st_size:
            shutil.copy(file, logs)
    shutil.rmtree(temp, ignore_errors=True)


def ranks_placement(ray: Any, config: ClusterConfig, use_gpu: bool) -> Any:
    """A placement group with one bundle per rank, or an error that says what there is."""
    kind = "GPU" if use_gpu else "CPU"
    available = ray.cluster_resources().get(kind, 0)
    if available < config.ranks:
        raise ConfigError("cluster.ranks", config.ranks, f"at most the pool's {available:g} {kind}")
    bundle = {"CPU": 1.0} | ({"GPU": 1.0} if use_gpu else {})
    group = ray.util.placement_group([dict(bundle) for _ in range(config.ranks)], strategy="PACK")
    try:
        ray.get(group.ready(), timeout=config.start_timeout_s)
    except ray.exceptions.GetTimeoutError:
        free = ray.available_resources().get(kind, 0)
        raise ConfigError(
            "cluster.ranks",
            config.ranks,
            f"{kind}s that are free within cluster.start_timeout_s={config.start_timeout_s:g}"
            f" (free now: {free:g} of {available:g})",
        ) from None
    return group
