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
    FuseUpdates,
    LoraConfig,
    TrainLayoutConfig,
)
from hybridrl.flow import Graph
from hybridrl.flow.graph import GenerateStage
from hybridrl.layout.fsdp_groups import stays_unsharded
from hybridrl.preflight.memory_plan import gpu_room, local_room, plan_run, unknown_room
from hybridrl.preflight.roles_together import roles_together

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybridrl.pipelines.problem import PipelinedModel

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
    from hybridrl.preflight.memory_inputs import LongestInputs

    gain = max(predicted_gain(config, graph, pool, r, shape) for pool, r in together)
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


def predicted_gain(
    config: Config, graph: Graph, pool: str, roles: Sequence[str], shape: "PretrainedConfig"
) -> float:
    """The share of separate updates' time that one plan saves at best (`lower_bound`).

    All samples are as long as can be. Time is operations: messages, FSDP and steps are left out.
    """
    from hybridrl.pipelines.evaluation import evaluate, lower_bound
    from hybridrl.pipelines.problem import PipelineProblem
    from hybridrl.pipelines.standard import standard_plan

    separate, models = 0.0, []
    ranks = len(config.cluster.pool_ranks[pool])
    for number, role in enumerate(sorted(roles, key=lambda role: role != "actor")):
        layout, _, _ = _settings(config, role)
        model = _pipeline(config, graph, role, _shape_of(config, role, shape), number % 2 == 1)
        alone = replace(model, ranks=tuple(_chunk_ranks(layout, False)))
        problem = PipelineProblem(models=[alone], num_ranks=layout.pp)
        separate += evaluate(problem, standard_plan(alone, layout.schedule.value)).seconds
        width = layout.replicas * layout.fsdp
        models += [
            replace(model, ranks=tuple(rank * width + place for rank in model.ranks))
            for place in range(width)
        ]
    places = ranks // _settings(config, roles[0])[0].tp
    return 1 - lower_bound(PipelineProblem(models=models, num_ranks=places)) / separate


def _pipeline(
    config: Config, graph: Graph, role: str, shape: "PretrainedConfig", reverse: bool
) -> "PipelinedModel":
    """The pipeline of a replica of a role, on ranks from 0 on, in an optimizer step."""
    from hybridrl.engines.train.row_costs import HALVES, row_costs
    from hybridrl.layout.layout import chunk_bounds
    from hybridrl.models.flops import ForwardFlops
    from hybridrl.pipelines.problem import PassKind, PipelinedModel
    from hybridrl.pipelines.standard import least_micro_batches

    layout, _, _ = _settings(config, role)
    ranks = _chunk_ranks(layout, reverse)
    samples = config.trainer.prompts_per_step * max(
        (s.num_samples or 1 for s in graph.stages.values() if isinstance(s, GenerateStage)),
        default=1,
    )
    replicas = layout.replicas * layout.fsdp
    tokens = samples * config.longest_sample / (replicas * config.trainer.mini_batches)
    rows = max(1, -(-round(tokens) // config.trainer.max_tokens_per_micro_batch))
    rows = least_micro_batches(layout.schedule.value, layout.pp, rows)
    of_row = round(tokens / rows)
    scored = round(of_row * config.rollout.max_new_tokens / config.longest_sample)
    flops = ForwardFlops.of(shape)
    if role != "actor":
        flops = replace(flops, per_scored=2 * shape.hidden_size)
    bounds = chunk_bounds(shape.num_hidden_layers, layout.num_chunks, layout.chunk_layers)
    layers = [stop - start for start, stop in bounds]
    halves = layout.splits_backward
    whole, rest = divmod(of_row, config.longest_sample)
    lengths = [config.longest_sample] * whole + [rest] * (rest > 0)
    costs = row_costs(flops, lengths, scored, layers, shape.hidden_size, halves)
    return PipelinedModel(
        name=role,
        ranks=tuple(ranks),
        costs=[costs] * rows,
        backward=HALVES if halves else (PassKind.backward,),
    )


def _chunk_ranks(layout: TrainLayoutConfig, reverse: bool) -> list[int]:
    """The pipeline rank of each chunk."""
    from hybridrl.layout.layout import rank_of_chunk

    chunks = range(layout.num_chunks)
    ranks = [rank_of_chunk(chunk, layout.pp, layout.zigzag) for chunk in chunks]
    return [layout.pp - 1 - rank for rank in ranks] if reverse else ranks


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
