"""The GPUs of a run: asked of the cluster that will run it, not of the driver's machine."""

import math
from pathlib import Path

from hybridrl.config import ClusterKind, Config, Device
from hybridrl.runtime.ray_cluster import in_ray_job, ray_runtime
from hybridrl.system.devices import local_gpus


def resolve_device(config: Config) -> None:
    """Fill in `cluster.device`, `cluster.ranks`, and formats and layouts that follow.

    The GPUs are those of this machine, or of the Ray cluster to join. A Slurm job's are in its
    request. Raises ConfigError where they do not suffice.
    """
    cluster = config.cluster
    if cluster.kind is ClusterKind.slurm:
        return
    if cluster.kind is ClusterKind.ray and not in_ray_job():
        # Whoever submits does not know the GPUs: the least number of ranks that the layouts take.
        config.resolve_device(cluster.ranks or _least_ranks(config), "the cluster")
        return
    if cluster.device is Device.cpu:
        config.resolve_device(0, "this machine")
    elif cluster.address is None:
        config.resolve_device(local_gpus(), "this machine")
    else:
        with ray_runtime(cluster, {}, logs=Path()) as ray:  # of a joined cluster no logs are kept
            gpus = int(ray.cluster_resources().get("GPU", 0))
        config.resolve_device(gpus, f"the cluster at {cluster.address}")


def _least_ranks(config: Config) -> int:
    train, gen = config.trainer.layout, config.rollout.layout
    replica = train.pp * train.replicas * (train.fsdp or 1) * train.tp
    return math.lcm(replica, gen.pp * gen.tp) * (2 if config.split else 1)
