"""Decides before a run what happens to activations (`trainer.activations=auto`)."""

import copy
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from hybridrl.config import VALUE_MODELS, ActivationMode, Config, Device
from hybridrl.costs.memory import GIB
from hybridrl.flow import Graph
from hybridrl.preflight.memory_plan import Room, gpu_room, local_room, plan_run, unknown_room

if TYPE_CHECKING:
    from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

KEY = "trainer.activations"
CHOICES = ActivationMode.keep, ActivationMode.selective, ActivationMode.recompute
"""The modes that `auto` chooses from, by how much of a layer is computed again."""


def decide_activations(
    config: Config,
    graph: Graph,
    shape: "PretrainedConfig",
    gpu_memory: int | None = None,
    pads: int | None = None,
) -> str:
    """Set `trainer.activations=auto` to the first of `CHOICES` that fits, with one line in the log.

    It returns the line, which is empty where the key has another value.

    `shape` is the actor's model, `gpu_memory` bytes of a GPU of the cluster, where that is known;
    `pads`: see `LongestInputs`. The attention is the one that ranks like this process would choose,
    so that ranks without flash-attn have room. Where no plan says what fits, the activations are
    recomputed.
    """
    if config.trainer.activations is not ActivationMode.auto:
        return ""
    reason = _without_a_plan(config)
    if reason is not None:
        config.trainer.activations = ActivationMode.keep
    elif gpu_memory is None and (reason := unknown_room(config)):
        config.trainer.activations = ActivationMode.recompute
    else:
        room = local_room(config) if gpu_memory is None else gpu_room(gpu_memory)
        try:
            chosen = choose_activations(config, graph, shape, room, pads)
            config.trainer.activations, reason = chosen
        except RuntimeError as error:  # torch has no `meta` kernel for an operation of the model
            config.trainer.activations = ActivationMode.recompute
            reason = f"since there is no memory plan: {' '.join(str(error).split())}"
    level = logging.INFO if config.cluster.device is Device.cuda else logging.DEBUG
    line = line_of(config.trainer.activations, reason)
    logger.log(level, "%s", line)
    return line


def choose_activations(
    config: Config,
    graph: Graph,
    shape: "PretrainedConfig",
    room: Room,
    pads: int | None = None,
) -> tuple[ActivationMode, str]:
    """What `auto` is on ranks with this room, and why. `pads`: see `LongestInputs`."""
    if reason := _without_a_plan(config):
        return ActivationMode.keep, reason
    available = room.capacity - room.reserved
    chosen, reason = ActivationMode.keep, ""
    for mode, needed in _needed(config, graph, shape, room, pads):
        chosen, sizes = mode, f"{needed / GIB:.1f} of {available / GIB:.1f} GiB"
        if needed <= available:
            reason = reason or f"which needs {sizes}"
            break
        if mode is not CHOICES[-1]:
            reason = f"since {mode.value} needs {sizes}"
    return chosen, reason


def line_of(mode: ActivationMode, reason: str) -> str:
    """The line that says what `auto` is."""
    return f"{KEY}=auto: {mode.value}, {reason}"


def _needed(
    config: Config, graph: Graph, shape: "PretrainedConfig", room: Room, pads: int | None
) -> Iterator[tuple[ActivationMode, int]]:
    """Bytes of the largest phase of training under each choice, in any pool.

    Other roles' weights and moments leave then: they stay where this leaves room for them.
    """
    from hybridrl.preflight.memory_inputs import LongestInputs

    config, inputs = copy.copy(config), LongestInputs.of(config, graph, pads)
    eager = (ActivationMode.selective,) if config.trainer.compile else ()
    for mode in (mode for mode in CHOICES if mode not in eager):
        config.trainer = replace(config.trainer, activations=mode)
        pools = plan_run(config, graph, shape, room, inputs, staying=()).pools.values()
        phases = [phase for plan in pools for phase in plan.phases]
        trained = [phase.total for phase in phases if phase.name.startswith("train ")]
        yield mode, max(trained, default=0)


def _without_a_plan(config: Config) -> str | None:
    """Why activations are kept whatever their size; None where a plan decides."""
    layouts = {"trainer": config.trainer.layout}
    layouts |= {place: config.value_model_of(role).layout for role, place in VALUE_MODELS.items()}
    for place, layout in layouts.items():
        if layout.splits_backward:
            return f"since {place}.layout.schedule={layout.schedule.value} recomputes none"
    on_cpus = "as on all CPUs, whose ranks share a node's memory"
    return on_cpus if config.cluster.device is Device.cpu else None
