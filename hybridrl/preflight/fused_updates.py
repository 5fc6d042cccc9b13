"""Decides before a run whether adjacent updates are one pipeline plan (`trainer.fuse_updates`)."""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridrl.config import (
    VALUE_MODELS,
    Config,
    ConfigError,
    Device,
    FuseUpdates,
    LoraConfig,
    TrainLayoutConfig,
)
from hybridrl.costs.devices import ACCELERATORS, device_of
from hybridrl.costs.fused_plans import joint_steps, shared_problem
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.mapping import (
    PlannedRole,
    SampleLength,
    SampleTotals,
    TrainLayout,
    cluster_of,
)
from hybridrl.costs.model import CostModel, even_rows
from hybridrl.flow import Graph
from hybridrl.layout.fsdp_groups import stays_unsharded
from hybridrl.pipelines.evaluation import evaluate, lower_bound
from hybridrl.preflight.memory_plan import gpu_room, local_room, plan_run, unknown_room
from hybridrl.preflight.roles_together import roles_together

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

KEY = "trainer.fuse_updates"
LEAST_GAIN = 0.05
"""The least gain, as a share of the separate updates' time. Plans are up to 3 % above the bound."""


def decide_fused_updates(
    config: Config,
    graph: Graph,
    shape: "PretrainedConfig",
    gpu_memory: int | None = None,
    pads: int | None = None,
) -> None:
    """Set `trainer.fuse_updates` to `always` or `never`, with the reason in the log.

    `shape` is the actor's model, `gpu_memory` bytes of a GPU of the cluster, where that is known;
    `pads`: see `LongestInputs`. Raises ConfigError for `always` where roles cannot train together.
    """
    wanted = config.trainer.fuse_updates
    if wanted is FuseUpdates.never:
        return
    pools = {pool: roles_together(config, graph, pool) for pool in config.cluster.pool_ranks}
    together = [(pool, roles) for pool, calls in pools.items() for roles in calls]
    if not together:
        if wanted is FuseUpdates.always:
            logger.warning("%s=always has no effect: no updates of a pool are adjacent", KEY)
        config.trainer.fuse_updates = FuseUpdates.never
        return
    obstacle = next(filter(None, (_obstacle(config, r, shape) for _, r in together)), None)
    if obstacle and wanted is FuseUpdates.always:
        raise ConfigError(KEY, "always", f"auto or never: {obstacle}")
    if wanted is FuseUpdates.auto:
        reason = obstacle or _reason_against(config, graph, together, shape, gpu_memory, pads)
        decided = FuseUpdates.never if reason else FuseUpdates.always
        logger.info("%s=auto: %s", KEY, f"never, {reason}" if reason else "always")
        config.trainer.fuse_updates = decided


def _obstacle(config: Config, roles: Sequence[str], shape: "PretrainedConfig") -> str | None:
    """Why these roles cannot train together; None where they can."""
    from hybridrl.models.parallel import model_parameters

    if config.trainer.chunk_tokens:
        return "chunks of a sequence are trained alone; wanted trainer.chunk_tokens=0"
    tp = _settings(config, roles[0])[0].tp
    for role in roles:
        layout, place, lora = _settings(config, role)
        if layout.tp != tp:
            return f"one plan has one tp; wanted {place}.layout.tp={tp} ({layout.tp})"
        for axis, size in (("cp", layout.cp), ("ep", layout.ep)):
            if size > 1:
                return f"a plan has no messages of {axis}; wanted {place}.layout.{axis}=1 ({size})"
        if lora.rank and lora.dropout:
            key = f"{'actor' if role == 'actor' else place}.lora.dropout"
            return f"a plan would decide when dropout is drawn; wanted {key}=0 ({lora.dropout})"
        parameters = model_parameters(_shape_of(config, role, shape), role != "actor")
        size = sum(math.prod(parameter.shape) for parameter in parameters)
        if not stays_unsharded(size, layout.pp):
            return f"all weights are gathered at once; wanted {place}.layout.pp above 1"
    return None


def _reason_against(
    config: Config,
    graph: Graph,
    together: Sequence[tuple[str, Sequence[str]]],
    shape: "PretrainedConfig",
    gpu_memory: int | None,
    pads: int | None,
) -> str | None:
    """Why `auto` leaves updates separate: too little gain, or too little memory."""
    from hybridrl.preflight.mapping_roles import planned_roles, role_shapes
    from hybridrl.preflight.memory_inputs import LongestInputs

    shapes = role_shapes(config, graph, shape)
    try:  # the sizes of a model may have names of their own, or differ between layers
        planned = [
            (
                pool,
                planned_roles(config, graph, {role: shapes[role] for role in shapes if role in r}),
            )
            for pool, r in together
        ]
    except ValueError as error:
        return f"the gain is not known: {error}"
    gain = max(predicted_gain(config, graph, pool, roles) for pool, roles in planned)
    if gain < LEAST_GAIN:
        return f"{max(0.0, gain):.0%} of the updates would be saved, wanted {LEAST_GAIN:.0%}"
    if gpu_memory is None and (reason := unknown_room(config)):
        return reason
    room = local_room(config) if gpu_memory is None else gpu_room(gpu_memory)
    fused = copy.copy(config)
    fused.trainer = replace(config.trainer, fuse_updates=FuseUpdates.always)
    try:
        plan = plan_run(fused, graph, shape, room, LongestInputs.of(fused, graph, pads))
    except RuntimeError as error:  # as `check_memory`
        return f"there is no memory plan: {' '.join(str(error).split())}"
    return None if plan.fits else plan.verdict()


def predicted_gain(config: Config, graph: Graph, pool: str, roles: Sequence[PlannedRole]) -> float:
    """The share of separate updates' time that one plan saves at best (`lower_bound`).

    All samples are as long as can be. What is once a step or an update is left out.
    """
    trainer, cluster = config.trainer, config.cluster
    layouts = {
        role.name: TrainLayout.of(_settings(config, role.name)[0], trainer) for role in roles
    }
    ranks, device = cluster.pool_ranks[pool], ACCELERATORS[_device_of_ranks(config)]
    layers = LayerCosts.of(device, config.model.compute_dtype.itemsize)
    costs = CostModel(layers, cluster_of(device, cluster.nodes, cluster.ranks_per_node))
    longest = SampleLength(config.data.max_prompt_tokens, config.rollout.max_new_tokens)
    samples = [longest] * (trainer.prompts_per_step * graph.group_size)
    separate = together = 0.0
    for batches, times in joint_steps(roles, samples, trainer.mini_batches, trainer.epochs):
        alone = 0.0
        for role, batch in batches.items():
            layout = layouts[role.name]
            rows = even_rows(layout, SampleTotals.of(batch))
            alone += evaluate(*costs.pipeline(role, layout, ranks, rows)).seconds
        separate += times * alone
        own = {role.name: batch for role, batch in batches.items()}
        together += times * (
            lower_bound(shared_problem(costs, [*batches], layouts, ranks, (), own=own))
            if len(batches) > 1
            else alone
        )
    return 1 - together / separate


def _device_of_ranks(config: Config) -> str:
    """The datasheet of ranks on nodes like this one; of a GPU that is not known, the usual one."""
    from hybridrl.system.devices import local_gpus

    if config.cluster.device is Device.cpu:
        return device_of("")
    import torch

    return device_of(torch.cuda.get_device_name(0) if local_gpus() else "unknown")


def _settings(config: Config, role: str) -> tuple[TrainLayoutConfig, str, LoraConfig]:
    """A role's layout, the place of its settings, its adapters."""
    if role == "actor":
        return config.trainer.layout, "trainer", config.actor.lora
    settings = config.value_model_of(role)
    return settings.layout, VALUE_MODELS[role], settings.lora


def _shape_of(config: Config, role: str, actor: "PretrainedConfig") -> "PretrainedConfig":
    from hybridrl.models.load import load_config

    own = None if role == "actor" else config.value_model_of(role).path
    return load_config(own) if own else actor
