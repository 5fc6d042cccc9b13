"""The memory of a server's node: snapshots for sampling, and models that wait for their turn."""

import logging
from typing import TYPE_CHECKING

from hybridrl.config import Config, ConfigError, Device, MemoryCheck
from hybridrl.costs.memory import GIB
from hybridrl.preflight.memory_plan import CPU_RESERVED, unknown_room

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybridrl.costs.memory import RunPlan

logger = logging.getLogger(__name__)

OF_MODEL = 4
"""Copies of the trained weights that a client's model takes: itself, two moments, a gradient."""


def most_models(config: Config, shape: "PretrainedConfig", plan: "RunPlan | None") -> int | None:
    """Return how many models clients may have at once; None where a node's memory is not known.

    It is not known, either, without a plan, or where `cluster.memory_check` only warns. `plan` is
    that of the run. Its node holds besides `serve.snapshots` copies of the trained weights, in
    float32, and `OF_MODEL` for each model. Raises ConfigError where the snapshots leave no room for
    one model.
    """
    from hybridrl.system.node_info import usable_memory

    if plan is None or unknown_room(config):
        return None
    refuses = config.cluster.memory_check is MemoryCheck.refuse
    wanted, memory = config.serve.snapshots, usable_memory()
    used, of_copy = _used(config, plan), copy_bytes(config, shape)
    copies = (memory - used) // of_copy
    if wanted + OF_MODEL > copies:
        allowed = (
            f"at most {max(0, copies - OF_MODEL)} with actor.lora.rank={config.actor.lora.rank}: a"
            f" node has {memory / GIB:.1f} GiB, the server takes {used / GIB:.2g} GiB, each"
            f" snapshot {of_copy / GIB:.2g} GiB, and a client's model {OF_MODEL} times that"
        )
        if refuses and copies <= OF_MODEL:
            allowed = f"warn: {allowed.partition(': ')[2]}"
            raise ConfigError("cluster.memory_check", "refuse", allowed)
        if refuses:
            raise ConfigError("serve.snapshots", wanted, allowed)
        logger.warning("serve.snapshots=%d: wanted %s", wanted, allowed)
    if not refuses:
        return None
    most = (copies - wanted) // OF_MODEL
    if config.actor.lora.rank:
        logger.info("clients may have %d models at once beside %d snapshots", most, wanted)
    return most


def _used(config: Config, plan: "RunPlan") -> int:
    """Bytes of a node's memory that its ranks take without clients' models."""
    cluster = config.cluster
    ranks = -(-cluster.ranks // cluster.nodes)
    on_cpus = sum(pool.peak.total for pool in plan.pools.values()) * ranks
    planned = on_cpus if cluster.device is Device.cpu else plan.node_host
    return planned + CPU_RESERVED * ranks


def copy_bytes(config: Config, shape: "PretrainedConfig") -> int:
    """Bytes of the fullest node's memory for a copy of the trained weights: its ranks' shards.

    Of an adapter's two matrices every rank of a tp group has one whole.
    """
    from hybridrl.preflight.memory_inputs import PackedRow
    from hybridrl.preflight.train_sizes import train_sizes

    layout, ranks = config.trainer.layout, config.cluster.ranks
    row = PackedRow(8, 4)  # activations, which no copy has
    stages = train_sizes(config, shape, layout, config.actor.lora, row, config.trainer.optim)
    of_ranks = [stages[rank * len(stages) // ranks].trained for rank in range(ranks)]
    of_node = -(-ranks // config.cluster.nodes)
    return 4 * max(sum(of_ranks[first : first + of_node]) for first in range(0, ranks, of_node))
