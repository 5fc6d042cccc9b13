"""Checks of runs whose prompts have images."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from hybridrl.config import (
    VALUE_MODELS,
    Config,
    ConfigError,
    RewardKind,
    TrainLayoutConfig,
    Vision,
)
from hybridrl.data import Item
from hybridrl.flow import Graph
from hybridrl.layout.layout import chunk_bounds, stages_of_layers
from hybridrl.preflight.models import judges_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def most_pads(shape: "PretrainedConfig", items: Iterable[Item]) -> int:
    """The most pads of images in a prompt; 0 where no item has an image."""
    return max((x.prompt_ids.count(shape.image_pads[0]) for x in items if x.images), default=0)


def check_tower_files(config: Config, path: str, items: Iterable[Item]) -> None:
    """Raise ConfigError where `items` have images and the frozen tower at `path` cannot be read.

    A tower that trains is checked with the model's other weights.
    """
    from hybridrl.models.vision import check_tower

    if not config.cluster.holds_models or config.model.vision is Vision.train:
        return
    if any(item.images for item in items):
        try:
            check_tower(path)
        except (OSError, ValueError) as error:
            allowed = f"a model whose image tower can be read ({error})"
            raise ConfigError("model.path", path, allowed) from None


def check_images(
    config: Config,
    graph: Graph,
    shape: "PretrainedConfig",
    trained: Iterable[Item],
    items: Iterable[Item],
) -> None:
    """Raise for what cannot be done where one of `items`, of the run's prompts, has images.

    Also where a tower is to train, and no `trained` prompt has any. The model has this `shape`.
    """
    item = next((item for item in items if item.images), None)
    trains = config.model.vision is Vision.train
    if trains and not any(one.images for one in trained):
        raise ConfigError("model.vision", "train", "frozen: no prompt that trains has an image")
    if item is None:
        return
    why = f"prompts have images ({item.source}, {item.place})"
    if not config.rollout.features.reads_images:
        raise ConfigError("rollout.engine", config.rollout.engine.value, f"native: {why}")
    if (cp := config.trainer.layout.cp) > 1:
        raise ConfigError("trainer.layout.cp", cp, f"1: {why}")
    gen = config.rollout.layout
    of_stage = stages_of_layers(shape.num_hidden_layers, gen.pp).count(0)
    _check_first_chunk(config.trainer.layout, "trainer.layout", shape, why)
    _check_deep_layers(gen.pp, of_stage, "rollout.layout.pp", "stage", shape, why)
    if config.rollout.tail_tp != "off":
        raise ConfigError("rollout.tail_tp", config.rollout.tail_tp, f"off: {why}")
    if config.trainer.chunk_tokens:
        raise ConfigError("trainer.chunk_tokens", config.trainer.chunk_tokens, f"0: {why}")
    if trains and config.actor.lora.rank:
        allowed = "0 with model.vision=train: adapters leave the tower's weights as they are"
        raise ConfigError("actor.lora.rank", config.actor.lora.rank, allowed)
    for role in judges_of(config, graph):
        kind = config.judge_of(role).kind
        if kind is RewardKind.model:
            raise ConfigError(f"{role}.kind", kind.value, f"a judge of texts: {why}")
    for role in ("critic", "cost_critic"):
        if role in graph.learned:
            _check_critic(config, role, shape, why)
    others = ["reward"] * ("reward" in graph.learned) + ["teacher"] * ("teacher" in graph.roles)
    if others:
        raise ConfigError("recipe", f"role {others[0]}", f"a recipe without that model: {why}")


def _check_critic(config: Config, role: str, shape: "PretrainedConfig", why: str) -> None:
    """Raise for a critic that cannot read the images: its tower is the actor's, and frozen."""
    settings, name = config.value_model_of(role), VALUE_MODELS[role]
    if settings.path not in (None, shape.name_or_path):
        allowed = f"null, or the value of model.path: its image tower is the actor's, since {why}"
        raise ConfigError(f"{name}.path", settings.path, allowed)
    if config.model.vision is Vision.train:
        raise ConfigError("model.vision", "train", f"frozen with the role {role}: {why}")
    if (cp := settings.layout.cp) > 1:
        raise ConfigError(f"{name}.layout.cp", cp, f"1: {why}")
    _check_first_chunk(settings.layout, f"{name}.layout", shape, why)


def _check_first_chunk(
    layout: TrainLayoutConfig, key: str, shape: "PretrainedConfig", why: str
) -> None:
    _, first = chunk_bounds(shape.num_hidden_layers, layout.num_chunks, layout.chunk_layers)[0]
    _check_deep_layers(layout.pp, first, f"{key}.pp", "chunk", shape, why)


def _check_deep_layers(
    pp: int, first: int, key: str, unit: str, shape: "PretrainedConfig", why: str
) -> None:
    """Raise where a pipeline's `first` layers are fewer than DeepStack adds features behind.

    A whole model of fewer layers is right: it leaves out the features of those that it lacks.
    """
    deep = len(getattr(shape.tower_config, "deepstack_visual_indexes", ()))
    if pp > 1 and first < deep:
        layout = f"a layout whose first {unit} has {deep} layers or more, and not {first}"
        raise ConfigError(key, pp, f"{layout}: DeepStack adds features there, since {why}")
