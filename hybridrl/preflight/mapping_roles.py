"""The neural roles of a recipe as the planner has them, and the bytes that their layers keep."""

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from hybridrl.config import VALUE_MODELS, ActivationMode, Config, ConfigError
from hybridrl.costs.mapping import ACTOR, PlannedRole
from hybridrl.costs.model_shape import ModelShape
from hybridrl.costs.train_memory import ActivationSizes
from hybridrl.flow import Graph
from hybridrl.flow.executor import Scope
from hybridrl.flow.graph import ComputeStage, UpdateStage
from hybridrl.models.activations import head_activations, layer_activations, prefill_activations
from hybridrl.models.load import TORCH_DTYPES, load_config
from hybridrl.preflight.memory_inputs import attention_of, has_triton
from hybridrl.preflight.placement import scope_of

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
        sizes = ModelShape.of_config(shape.to_dict())
        stages = [s for s in graph.stages.values() if s.role == name]
        update = next((s for s in stages if isinstance(s, UpdateStage)), None)
        optim = config.trainer.optim
        if name in VALUE_MODELS and name in graph.learned:
            optim = config.value_model_of(name).optim
        roles.append(
            PlannedRole(
                name=name,
                shape=sizes,
                trained=update is not None,
                passes=tuple(s.name for s in stages if isinstance(s, ComputeStage)),
                value_head=name in graph.judges or (name in VALUE_MODELS and name in graph.learned),
                scores_in_generation=all(
                    scope_of(stage, config) is not Scope.WORLD
                    for stage in stages
                    if isinstance(stage, ComputeStage)
                ),
                epochs=update.epochs if update else None,
                mini_batches=update.mini_batches if update else None,
                optim=optim.name,
            )
        )
    return roles


def check_planned_models(config: Config, graph: Graph, shapes: Shapes) -> None:
    """Raise ConfigError for a model of experts, and for adapters, whose memory is not searched."""
    for name, shape in shapes.items():
        try:
            reason = "a mixture of experts" * bool(ModelShape.of_config(shape.to_dict()).experts)
        except ValueError as error:
            reason = str(error)
        if reason:
            key = "model" if name == ACTOR else name
            raise ConfigError(key, shape.model_type, f"a dense decoder: {reason}")
    adapters = {"actor.lora": config.actor.lora} | {
        f"{VALUE_MODELS[role]}.lora": config.value_model_of(role).lora
        for role in VALUE_MODELS
        if role in shapes and role in graph.learned
    }
    for key, lora in adapters.items():
        if lora.rank:
            allowed = "0 with plan auto, whose costs are those of training all weights"
            raise ConfigError(f"{key}.rank", lora.rank, allowed)


class CountedLayerBytes:
    """Activations as torch allocates them, on tensors without memory: `LayerBytes`."""

    def __init__(self, config: Config, shapes: Shapes) -> None:
        self.config, self.shapes = config, shapes
        self.dtype = TORCH_DTYPES[config.model.compute_dtype]
        # A search asks thousands of times, and a count is looked up by the whole JSON of a model.
        self.layer = lru_cache(None)(self._layer)
        self.head = lru_cache(None)(self._head)
        self.scoring = lru_cache(None)(self._scoring)
        self.prefill = lru_cache(None)(self._prefill)

    def _layer(
        self,
        role: PlannedRole,
        tokens: int,
        tp: int,
        sequence_parallel: bool,
        mode: ActivationMode,
    ) -> ActivationSizes:
        """Bytes of a decoder layer's activations over a row, from forward to backward."""
        shape = self.shapes[role.name]
        counts = layer_activations(
            shape,
            tokens,
            dtype=self.dtype,
            attention=attention_of(self.config, shape),
            tp=tp,
            sequence_parallel=sequence_parallel,
            mode=mode,
        )
        return ActivationSizes(counts.kept, counts.backward)

    def _head(self, role: PlannedRole, scored: int, tp: int) -> ActivationSizes:
        """Bytes of the activations of the vocabulary's head in training."""
        shape = self.shapes[role.name]
        counts = head_activations(
            shape, scored, dtype=self.dtype, triton=has_triton(self.config), tp=tp
        )
        return ActivationSizes(counts.kept, counts.backward)

    def _scoring(self, role: PlannedRole, tokens: int, scored: int, tp: int) -> int:
        """Bytes of a forward pass without a backward pass.

        With 0 scored tokens it has no vocabulary's head.
        """
        shape = self.shapes[role.name]
        attention = attention_of(self.config, shape)
        most = layer_activations(
            shape, tokens, dtype=self.dtype, attention=attention, tp=tp
        ).scoring
        if scored:
            triton = has_triton(self.config)
            head = head_activations(shape, scored, dtype=self.dtype, triton=triton, tp=tp)
            most = max(most, head.scoring)
        return most

    def _prefill(self, role: PlannedRole, tokens: int, tp: int) -> int:
        """Bytes of a decoder layer in a prefill of full samples."""
        longest = min(tokens, self.config.longest_generated)
        return prefill_activations(self.shapes[role.name], tokens, longest, dtype=self.dtype, tp=tp)
