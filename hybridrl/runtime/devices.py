"""The GPUs of a run: asked of the cluster that will run it, not of the driver's machine."""

import logging
import math
import os
from pathlib import Path
from typing import Any

from hybridrl.compat import verl
from hybridrl.config import ClusterKind, Config, Device
from hybridrl.runtime.ray_cluster import in_ray_job, ray_runtime
from hybridrl.system.devices import local_gpus
from hybridrl.system.nvidia_smi import read_gpus

logger = logging.getLogger(__name__)


def resolve_device(config: Config) -> int | None:
    """Fill in `cluster.device`, `cluster.ranks`, and formats and layouts that follow.

    The GPUs are those of this machine, or of the Ray cluster to join. A Slurm job's are in its
    request. Returns the bytes of a GPU of a joined cluster; None for GPUs of this machine, and
    where the cluster does not say. Raises ConfigError where the GPUs do not suffice.
    """
    cluster = config.cluster
    if cluster.kind is ClusterKind.slurm:
        return None
    if cluster.kind is ClusterKind.ray and not in_ray_job():
        # Whoever submits does not know the GPUs: the least number of ranks that the layouts take.
        config.resolve_device(cluster.ranks or _least_ranks(config), "the cluster")
        return None
    if cluster.device is Device.cpu:
        config.resolve_device(0, "this machine")
        return None
    if cluster.address is None:
        config.resolve_device(local_gpus(), "this machine")
        return None
    with ray_runtime(cluster, {}, logs=Path()) as ray:  # of a joined cluster no logs are kept
        gpus = int(ray.cluster_resources().get("GPU", 0))
        config.resolve_device(gpus, f"the cluster at {cluster.address}")
        return gpu_memory(ray, cluster.start_timeout_s) if cluster.device is Device.cuda else None


def gpu_memory(ray: Any, limit_s: float) -> int | None:
    """Bytes of the smallest GPU of one node that has some; the others are taken to be like it.

    A task there asks `nvidia-smi`. It takes no GPU, so it does not wait for a free one.
    None where it does not answer within `limit_s`, and for MIG devices, whose sizes it lacks.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    node = min(nodes, key=lambda node: (node["NodeManagerAddress"], node["NodeID"]))
    ask = ray.remote(
        num_cpus=0,
        max_retries=0,
        runtime_env={"env_vars": verl.environment(Device.cuda)},  # it sees what a rank sees
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
    )(_gpu_sizes)
    try:
        sizes: list[int] = ray.get(ask.remote(), timeout=limit_s)
    except ray.exceptions.RayError as error:
        logger.info("the size of a GPU of %s: %s", node["NodeManagerAddress"], _line(error))
        return None
    return min(sizes, default=0) or None


def _gpu_sizes() -> list[int]:
    """Bytes of each GPU that this process sees."""
    return [gpu.memory_bytes for gpu in read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))[0]]


def _line(error: Exception) -> str:
    return " ".join(str(getattr(error, "cause", None) or error).split())


def _least_ranks(config: Config) -> int:
    train, gen = config.trainer.layout, config.rollout.layout
    replica = train.pp * train.replicas * (train.fsdp or 1) * train.tp
    return math.lcm(replica, gen.pp * gen.tp) * (2 if config.split else 1)
