"""The neural roles of a recipe as the planner has them."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hybridrl.config import VALUE_MODELS, Config, LoraConfig
from hybridrl.costs.mapping import ACTOR, PlannedRole
from hybridrl.costs.model_shape import ModelShape, RecurrentShape
from hybridrl.flow import Graph
from hybridrl.flow.executor import Scope
from hybridrl.flow.graph import ComputeStage, UpdateStage
from hybridrl.models.config_json import layers_with_keys, num_recurrent
from hybridrl.models.flops import mixer_flops
from hybridrl.models.load import TORCH_DTYPES, load_config
from hybridrl.models.parallel import meta_model
from hybridrl.models.recurrent import mixers_of, state_shapes, use_batches
from hybridrl.models.states import state_bytes
from hybridrl.preflight.placement import scope_of
from hybridrl.preflight.train_sizes import adapters_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Shapes = Mapping[str, "PretrainedConfig"]
"""The config of each role's model."""


def role_shapes(config: Config, graph: Graph, shape: "PretrainedConfig") -> Shapes:
    """Return the config of each neural role's model, the actor first; `shape` is the actor's."""
    paths: dict[str, str | None] = {ACTOR: None}
    for stage in graph.stages.values():
        role = stage.role
        if role is None or role in paths or not isinstance(stage, ComputeStage | UpdateStage):
            continue
        if role in VALUE_MODELS and role in graph.learned:
            paths[role] = config.value_model_of(role).path
        elif role in graph.judges:
            if config.is_neural(role):
                paths[role] = config.judge_of(role).model
        else:
            paths[role] = config.teacher.path if role == "teacher" else None
    return {role: load_config(path) if path else shape for role, path in paths.items()}


def planned_roles(config: Config, graph: Graph, shapes: Shapes) -> list[PlannedRole]:
    """Each role with its model's sizes and its stages. Raises ValueError for missing sizes."""
    roles = []
    for name, shape in shapes.items():
        sizes = ModelShape.of_config(shape.to_dict(), recurrent_shape(shape, config))
        stages = [s for s in graph.stages.values() if s.role == name]
        update = next((s for s in stages if isinstance(s, UpdateStage)), None)
        is_value = name in VALUE_MODELS and name in graph.learned
        lora = config.value_model_of(name).lora if is_value else config.actor.lora
        roles.append(
            PlannedRole(
                name=name,
                shape=sizes,
                trained=update is not None,
                passes=tuple(s.name for s in stages if isinstance(s, ComputeStage)),
                value_head=name in graph.judges or is_value,
                scores_in_generation=all(
                    scope_of(stage, config) is not Scope.WORLD
                    for stage in stages
                    if isinstance(stage, ComputeStage)
                ),
                epochs=update.epochs if update else None,
                mini_batches=update.mini_batches if update else None,
                adapters=_adapters_of_layer(shape, lora) if update else 0,
            )
        )
    return roles


def recurrent_shape(shape: "PretrainedConfig", config: Config) -> RecurrentShape | None:
    """The sizes of a model's recurrent layers, as it generates; None without any."""
    layers = num_recurrent(shape)
    if not layers:
        return None
    model = meta_model(shape, dtype=TORCH_DTYPES[config.rollout.dtype])
    use_batches(model)
    mixers, shapes = mixers_of(model), state_shapes(model)
    return RecurrentShape(
        layers=layers,
        parameters=sum(p.numel() for mixer in mixers for p in mixer.module.parameters()),
        state_bytes=state_bytes(shapes),
        state_flops=mixer_flops(mixers, shapes),
        attending=layers - layers_with_keys(shape).count(False),
    )


def _adapters_of_layer(shape: "PretrainedConfig", lora: LoraConfig) -> int:
    """Parameters of a layer's adapters on average, of those of the model."""
    if not lora.rank:
        return 0
    total = sum(math.prod(each.shape) for each in adapters_of(shape, lora))
    return -(-total // int(shape.num_hidden_layers))
