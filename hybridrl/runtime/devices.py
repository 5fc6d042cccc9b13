"""The GPUs of a run: asked of the cluster that will run it, not of the driver's machine."""

import logging
import math
import os
from pathlib import Path
from typing import Any

from hybridrl.compat import verl
from hybridrl.config import ClusterKind, Config, ConfigError, Device
from hybridrl.runtime.ray_cluster import in_ray_job, ray_runtime
from hybridrl.system.compiler import compiler_fault
from hybridrl.system.devices import local_gpus
from hybridrl.system.nvidia_smi import read_gpus

logger = logging.getLogger(__name__)


def resolve_device(config: Config, asks_memory: bool = False) -> int | None:
    """Fill in `cluster.device`, `cluster.ranks`, and formats and layouts that follow.

    The GPUs are those of this machine, or of the Ray cluster to join. A Slurm job's are in its
    request. With `asks_memory` it returns the bytes of a GPU of a joined cluster. It is None for
    GPUs of this machine, and where the cluster does not say. Raises ConfigError where the GPUs do
    not suffice.
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
        asks = asks_memory and cluster.device is Device.cuda
        return gpu_memory(ray, cluster.ranks, cluster.start_timeout_s) if asks else None


def gpu_memory(ray: Any, ranks: int, limit_s: float) -> int | None:
    """Bytes of the smallest GPU that a run of so many `ranks` needs at least: one a rank.

    That is the smallest of all if the run takes all, else the smallest of its number of largest
    ones: Ray may place it there. A task on each node that has GPUs asks `nvidia-smi`. It takes no
    GPU, so it does not wait for a free one. Nodes that do not answer within `limit_s` are left out,
    and MIG devices, whose sizes it lacks; None where that leaves none. The task also looks for a C
    compiler: one line warns of each node without, and ConfigError is raised where none has one.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(
        num_cpus=0,
        max_retries=0,
        runtime_env={"env_vars": verl.environment(Device.cuda)},  # it sees what a rank sees
    )(_gpus_and_compiler)
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    strategies = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    answers = [ask.options(scheduling_strategy=strategy).remote() for strategy in strategies]
    ray.wait(answers, num_returns=len(answers), timeout=limit_s)
    sizes: list[int] = []
    faults: list[str] = []
    for node, answer in zip(nodes, answers, strict=True):
        try:
            of_node, fault = ray.get(answer, timeout=0)
        except ray.exceptions.RayError as error:
            logger.info("the size of a GPU of %s: %s", node["NodeManagerAddress"], _line(error))
            continue
        sizes += filter(None, of_node)
        if fault:
            faults.append(f"{node['NodeManagerAddress']}: {fault}")
    if faults and len(faults) == len(nodes):
        allowed = f"a C compiler for Triton's kernels on nodes with GPUs ({faults[0]}), or cpu"
        raise ConfigError("cluster.device", Device.cuda.value, allowed)
    for line in faults:
        logger.warning("no C compiler for Triton's kernels on %s", line)
    return min(sorted(sizes, reverse=True)[:ranks], default=None)


def _gpus_and_compiler() -> tuple[list[int], str]:
    """Bytes of each GPU that this process sees, and why Triton cannot build a kernel here."""
    gpus, _ = read_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return [gpu.memory_bytes for gpu in gpus], compiler_fault()


def _line(error: Exception) -> str:
    return " ".join(str(getattr(error, "cause", None) or error).split())


def _least_ranks(config: Config) -> int:
    train, gen = config.trainer.layout, config.rollout.layout
    replica = train.pp * train.replicas * (train.fsdp or 1) * train.tp
    return math.lcm(replica, gen.pp * gen.tp) * len(config.cluster.pool_names)
