"""The memory plan of a run, and the refusal of one that no rank can hold."""

import copy
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hybridrl.config import (
    VALUE_MODELS,
    Attention,
    ClusterKind,
    Config,
    ConfigError,
    Device,
    LoraConfig,
    MemoryCheck,
    OptimConfig,
    TrainLayoutConfig,
)
from hybridrl.costs.memory import SCORING, MemoryPlan, PoolSizes, RunPlan, plan_memory
from hybridrl.costs.push_memory import LOADED
from hybridrl.costs.train_memory import TrainSizes
from hybridrl.flow import Graph
from hybridrl.preflight.memory_advice import advice
from hybridrl.preflight.roles_together import roles_together

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybridrl.preflight.memory_inputs import LongestInputs, PackedRow

logger = logging.getLogger(__name__)

CPU_RESERVED = 700 * 2**20
"""Python and the libraries of a rank on CPUs, before it loads anything."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of a rank's device, or of its share of a node; `reserved` of them are for others."""

    capacity: int
    reserved: int


def plan_run(
    config: Config,
    graph: Graph,
    shape: "PretrainedConfig",
    room: Room,
    inputs: "LongestInputs | None" = None,
    stages: tuple[int, int] | None = None,
    staying: Sequence[str] | None = None,
) -> RunPlan:
    """The plan of the rank of each pool that has most, for an actor of this `shape`.

    The device and the layouts of the config are known. A role's model is as large as the actor's
    unless its directory says otherwise. `inputs` is what a rank computes at once, `stages` its
    pipeline stages in training and in generation; by default those that need most. Trained roles
    that are `staying` are never offloaded; by default those for which there is room.
    """
    from hybridrl.preflight.memory_inputs import LongestInputs

    inputs = inputs or LongestInputs.of(config, graph)
    attention, reason = assumed_attention(config, shape)
    pools = {}
    sizes_of_pools = _sizes(config, graph, shape, inputs, attention, stages, room.capacity)
    for pool, sizes in sizes_of_pools.items():
        sizes = replace(sizes, staying=staying)
        plan = plan_memory(sizes, config.cluster.device.value, room.capacity, room.reserved)
        pools[pool] = _advised(plan, config, pool)
    return RunPlan(pools, attention.value, reason, _node_host(config, graph, pools))


def sizes_of_run(
    config: Config, graph: Graph, model_path: str, pads: int | None = None
) -> dict[str, PoolSizes]:
    """What a rank of each pool on GPUs holds, by which it decides what stays on its device.

    Ranks know the memory of their own devices. `pads`: see `LongestInputs`. Empty on CPUs, and for
    a model that has no plan.
    """
    from hybridrl.models.load import load_config
    from hybridrl.preflight.memory_inputs import LongestInputs

    if config.cluster.device is not Device.cuda or not config.cluster.holds_models:
        return {}
    try:
        shape = load_config(model_path, vision=config.model.vision)
        inputs = LongestInputs.of(config, graph, pads)
        return _sizes(config, graph, shape, inputs, assumed_attention(config, shape)[0])
    except RuntimeError:  # `check_memory` has said that there is no plan
        return {}


def _sizes(
    config: Config,
    graph: Graph,
    shape: "PretrainedConfig",
    inputs: "LongestInputs",
    attention: Attention,
    stages: tuple[int, int] | None = None,
    capacity: int = sys.maxsize,
) -> dict[str, PoolSizes]:
    """The models on a rank of each pool, under this attention.

    vLLM computes more tokens a step on a large GPU: by default what it needs on the largest.
    """
    config = copy.copy(config)
    config.model = replace(config.model, attention=attention)
    pools = config.cluster.pool_ranks
    return {
        pool: _pool_sizes(config, graph, shape, pool, inputs, stages, capacity) for pool in pools
    }


def _node_host(config: Config, graph: Graph, pools: Mapping[str, MemoryPlan]) -> int:
    """Bytes that the ranks of one node have in its memory, of the node that has most.

    Its ranks with the same shards of frozen weights share them (`engines.score.node_copy`), unless
    a role that only scores is a moving average, and those of a place share the arrays that they
    load. An instance has each shard once.
    """
    cluster, layout = config.cluster, config.rollout.layout
    per_node = -(-cluster.ranks // cluster.nodes)
    changes = any(copy.update == "ewma" for copy in graph.copies.values())
    nodes = Counter[int]()
    for pool, ranks in cluster.pool_ranks.items():
        sizes = pools[pool].on_host
        shared = sizes.get(LOADED, 0) + (0 if changes else sizes.get(SCORING, 0))
        by_node = Counter(cluster.worker_of_rank[rank] // per_node for rank in ranks)
        for node, number in by_node.items():
            nodes[node] += (sum(sizes.values()) - shared) * number
            nodes[node] += shared * min(number, layout.pp * layout.tp)
    return max(nodes.values())


def _pool_sizes(
    config: Config,
    graph: Graph,
    shape: "PretrainedConfig",
    pool: str,
    inputs: "LongestInputs",
    stages: tuple[int, int] | None,
    capacity: int,
) -> PoolSizes:
    """The models on a rank of the pool."""
    from hybridrl.preflight.generation_sizes import (
        generation_sizes,
        kept_id_sizes,
        model_shape_at,
        scoring_sizes,
    )
    from hybridrl.preflight.image_sizes import image_sizes
    from hybridrl.preflight.pushed_sizes import received_sizes, sent_sizes

    train_stage, gen_stage = stages or (None, None)
    trained, from_actor = {}, set[str]()
    generation = sent = received = None
    if pool == config.cluster.home:
        generation = generation_sizes(config, graph, shape, inputs, gen_stage, capacity)
        if pool != "actor":
            received = received_sizes(config, shape, generation.weights)
    if pool == "actor":
        layout, optim = config.trainer.layout, config.trainer.optim
        rows = rows_of(layout, config.ranks_of(pool), inputs)
        args = shape, layout, config.actor.lora, optim
        trained["actor"] = heaviest(config, rows, train_stage, *args)
        if pool != config.cluster.home:
            sent = sent_sizes(config, shape)
    for role in VALUE_MODELS:
        if role in graph.learned and pool == config.pool_of(role):
            own = config.value_model_of(role)
            own_shape = model_shape_at(own.path) or shape
            rows = rows_of(own.layout, config.ranks_of(pool), inputs)
            args = own_shape, own.layout, own.lora, own.optim
            trained[role] = heaviest(config, rows, train_stage, *args, classifier=True)
            from_actor |= set() if own.path else {role}
    scoring = scoring_sizes(config, graph, shape, pool, inputs, gen_stage)
    computes, ranks = bool(trained or scoring), config.ranks_of(pool)
    return PoolSizes(
        trained=trained,
        scoring=scoring,
        generation=generation,
        from_actor=from_actor,
        together=roles_together(config, graph, pool) if config.trainer.fuses else (),
        sent=sent,
        received=received,
        images=image_sizes(
            config, graph, shape, ranks, inputs, generation is not None, computes, capacity
        ),
        kept_ids=kept_id_sizes(config, graph, shape, ranks),
    )


def _advised(plan: MemoryPlan, config: Config, pool: str) -> MemoryPlan:
    """With advice where it does not fit."""
    return plan if plan.fits else replace(plan, advice=advice(config, plan.peak, pool))


def assumed_attention(config: Config, shape: "PretrainedConfig") -> tuple[Attention, str]:
    """The attention of ranks like this process, and why; of a GPU where this node has one."""
    from hybridrl.models.attention_choice import OBSTACLES, first_without

    wanted = config.model.attention
    if config.cluster.device is Device.cpu:
        return Attention.torch, "on CPUs"
    if wanted is not Attention.auto:
        return wanted, f"by model.attention={wanted.value}"
    obstacles = {kind: local_obstacle(kind, config, shape) for kind in OBSTACLES}
    chosen, reason = first_without(obstacles)
    if chosen is Attention.flash:
        return chosen, "which this node has; model.attention=varlen plans without"
    return chosen, f"as ranks like this node would choose: {reason}"


def local_obstacle(kind: Attention, config: Config, shape: "PretrainedConfig") -> str | None:
    """Why a process like this one cannot attend so, on the node's GPU where it has one."""
    import torch

    from hybridrl.models.attention_choice import OBSTACLES, flash_import_obstacle
    from hybridrl.models.attention_shape import attention_shape
    from hybridrl.models.load import TORCH_DTYPES
    from hybridrl.system.devices import local_gpus

    device = torch.device("cuda") if local_gpus() else None
    dtype = TORCH_DTYPES[config.model.compute_dtype]
    obstacle = OBSTACLES[kind](dtype, attention_shape(shape), device)
    if obstacle is None and device is None and kind is Attention.flash:
        return flash_import_obstacle()
    return obstacle


def check_memory(
    config: Config,
    graph: Graph,
    model_path: str,
    gpu_memory: int | None = None,
    pads: int | None = None,
) -> RunPlan | None:
    """Raise ConfigError for a run that a rank cannot hold, unless `cluster.memory_check` is warn.

    Returns the plan, or None where there is none.

    `gpu_memory` is bytes of a GPU of the cluster that the run joins. Without it, the ranks' nodes
    are like this one, or the log says that nothing was checked. A run that leaves less than others
    need gets a warning. `pads`: see `LongestInputs`.
    """
    from hybridrl.models.load import load_config
    from hybridrl.preflight.memory_inputs import LongestInputs

    if gpu_memory is None and (reason := unknown_room(config)):
        logger.info("memory plan: not checked, %s", reason)
        return None
    try:
        shape = load_config(model_path, vision=config.model.vision)
        room = local_room(config) if gpu_memory is None else gpu_room(gpu_memory)
        if gpu_memory is not None:  # whether ranks there can import flash-attn is not known
            config = with_flash(config, shape)
        plan = plan_run(config, graph, shape, room, LongestInputs.of(config, graph, pads))
    except RuntimeError as error:  # torch has no `meta` kernel for an operation of the model
        logger.info("no memory plan for this model: %s", " ".join(str(error).split()))
        return None
    if plan.impossible and config.cluster.memory_check is MemoryCheck.refuse:
        subject = "it " if len(plan.pools) == 1 else ""
        allowed = f"warn, or a run that fits: {subject}{plan.verdict()}"
        raise ConfigError("cluster.memory_check", "refuse", allowed)
    logger.log(logging.INFO if plan.fits else logging.WARNING, "memory plan: %s", plan.verdict())
    return plan


def with_flash(config: Config, shape: "PretrainedConfig") -> Config:
    """With the attention that takes least, where it is not set: no run is refused for the other."""
    from hybridrl.models.attention_choice import flash_obstacle
    from hybridrl.models.attention_shape import attention_shape
    from hybridrl.models.load import TORCH_DTYPES

    dtype = TORCH_DTYPES[config.model.compute_dtype]
    is_set = config.model.attention is not Attention.auto
    if is_set or flash_obstacle(dtype, attention_shape(shape)):
        return config
    config = copy.copy(config)
    config.model = replace(config.model, attention=Attention.flash)
    return config


def unknown_room(config: Config) -> str | None:
    """Why the memory of the ranks' devices is not that of this node's; None where it is."""
    cluster = config.cluster
    if not cluster.knows_model:
        return "since cluster.costs names no GPU"
    if cluster.kind is ClusterKind.ray:
        return "since the memory of the nodes of cluster=ray is not known here"
    if cluster.address is not None:
        return f"since the memory of the nodes of cluster.address={cluster.address} is not known"
    from hybridrl.system.devices import local_gpus

    if cluster.device is Device.cuda and not local_gpus():
        return "since the driver's node has no GPU whose memory could be read"
    return None


def local_room(config: Config) -> Room:
    """The room of a rank on a node like this one.

    On CPUs it is the rank's share of this node's memory, or of its container's limit.
    """
    cluster = config.cluster
    if cluster.device is Device.cuda:
        import torch

        return gpu_room(torch.cuda.get_device_properties(0).total_memory)
    from hybridrl.system.node_info import usable_memory

    ranks_here = -(-cluster.ranks // cluster.nodes)
    return Room(usable_memory() // ranks_here, CPU_RESERVED)


def gpu_room(total: int) -> Room:
    """A GPU of `total` bytes, less those that no plan counts."""
    from hybridrl.engines.rollout.memory import device_margin

    return Room(total, device_margin(total))


def rows_of(layout: TrainLayoutConfig, ranks: int, inputs: "LongestInputs") -> "list[PackedRow]":
    """What one of so many ranks trains at once: the longest row, or a chunk of a longer one."""
    rows = inputs.row(layout, ranks), inputs.chunk(layout)
    return [row for row in rows if row is not None]


def heaviest(
    config: Config,
    rows: "Sequence[PackedRow]",
    stage: int | None,
    shape: "PretrainedConfig",
    layout: TrainLayoutConfig,
    lora: LoraConfig,
    optim: OptimConfig,
    classifier: bool = False,
) -> TrainSizes:
    """A trained model with the row that needs most, on a pipeline stage, or on that with most."""
    from hybridrl.preflight.train_sizes import train_sizes

    sizes: list[TrainSizes] = []
    for row in rows:
        of_stages = train_sizes(config, shape, layout, lora, row, optim, classifier)
        sizes += of_stages if stage is None else [of_stages[stage]]
    return max(sizes, key=lambda s: sum(s.state.values()) + sum(s.update().values()))
