"""The memory plan of a run, and the refusal of one that no rank can hold."""

import logging
from typing import TYPE_CHECKING

from hybridrl.config import VALUE_MODELS, ClusterKind, Config, ConfigError, Device, MemoryCheck
from hybridrl.flow import Graph
from hybridrl.planner.memory import MemoryPlan, RunSizes, TrainSizes, plan_memory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybridrl.controller.memory_sizes import PackedRow

logger = logging.getLogger(__name__)

CPU_RESERVED = 700 * 2**20
"""Python and the libraries of a rank on CPUs, before it loads anything."""


def plan_run(
    config: Config,
    graph: Graph,
    shape: "PretrainedConfig",
    capacity: int,
    reserved: int,
    row: "PackedRow | None" = None,
    stage: int | None = None,
) -> MemoryPlan:
    """The plan of the rank that has most, for an actor of this `shape`.

    `capacity` bytes are a GPU's, or a rank's share of its node; `reserved` of them are for other
    users. The device and the layouts of the config are known. A role's model is as large as the
    actor's unless its directory says otherwise. `row` is the longest of an update, `stage`
    the pipeline stage; by default that which needs most.
    """
    from hybridrl.controller.memory_sizes import (
        PackedRow,
        generation_sizes,
        model_shape_at,
        scoring_activations,
        scoring_weights,
        train_sizes,
    )

    row = row or PackedRow.of(config, graph)
    layout, optim = config.trainer.layout, config.trainer.optim
    actor = train_sizes(config, shape, layout, config.actor.lora, row, optim)
    trained, from_actor = {"actor": _stage(actor, stage)}, set()
    for role in VALUE_MODELS:
        if role in graph.learned and not config.split:
            own = config.value_model_of(role)
            own_shape = model_shape_at(own.path) or shape
            stages = train_sizes(
                config, own_shape, own.layout, own.lora, row, own.optim, classifier=True
            )
            trained[role] = _stage(stages, stage)
            from_actor |= set() if own.path else {role}
    run = RunSizes(
        trained=trained,
        scoring=scoring_weights(config, graph, shape),
        scoring_activations=scoring_activations(config, shape, row),
        generation=generation_sizes(config, shape),
        from_actor=from_actor,
    )
    return plan_memory(run, config.cluster.device.value, capacity, reserved)


def check_memory(config: Config, graph: Graph, model_path: str) -> None:
    """Raise ConfigError for a run that a rank cannot hold, unless `cluster.memory_check` is warn.

    Only where the ranks' nodes are like this one: the memory of others is unknown. A run that
    leaves less than others need gets a warning.
    """
    from hybridrl.models.load import load_config

    room = local_room(config)
    if room is None:
        return
    capacity, reserved = room
    try:
        plan = plan_run(config, graph, load_config(model_path), capacity, reserved)
    except RuntimeError as error:  # torch has no `meta` kernel for an operation of the model
        logger.info("no memory plan for this model: %s", " ".join(str(error).split()))
        return
    if plan.impossible and config.cluster.memory_check is MemoryCheck.refuse:
        allowed = f"warn, or a run that fits: it {plan.verdict()}"
        raise ConfigError("cluster.memory_check", "refuse", allowed)
    logger.log(logging.INFO if plan.fits else logging.WARNING, "memory plan: %s", plan.verdict())


def local_room(config: Config) -> tuple[int, int] | None:
    """Bytes of a rank's device, and those of them for other users; None where it is elsewhere.

    On CPUs it is the rank's share of this node's memory, or of its container's limit.
    """
    cluster = config.cluster
    if cluster.address is not None or cluster.kind is ClusterKind.ray:
        return None
    if cluster.device is Device.cuda:
        import torch

        if not torch.cuda.is_available():  # the driver's node has none
            return None
        return gpu_room(torch.cuda.get_device_properties(0).total_memory)
    from hybridrl.system.node_info import usable_memory

    ranks_here = -(-cluster.ranks // cluster.nodes)
    return usable_memory() // ranks_here, CPU_RESERVED


def gpu_room(total: int) -> tuple[int, int]:
    """Bytes of a GPU of `total`, and those of them that no plan counts."""
    from hybridrl.engines.rollout.memory import device_margin

    return total, device_margin(total)


def _stage(stages: list[TrainSizes], stage: int | None) -> TrainSizes:
    """A pipeline stage, or the one that needs most."""
    if stage is not None:
        return stages[stage]
    return max(stages, key=lambda s: sum(s.state.values()) + sum(s.update().values()))
