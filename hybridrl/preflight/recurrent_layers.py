"""What a run cannot have with recurrent layers: each is refused by its key before it starts."""

from importlib.metadata import version
from typing import Any

from hybridrl.config import (
    Config,
    ConfigError,
    Device,
    DType,
    Engine,
    SharePrompts,
    TrainLayoutConfig,
)
from hybridrl.config.versions import release_of
from hybridrl.models.config_json import num_recurrent


def check_recurrent_layers(config: Config, model: Any) -> None:
    """Raise ConfigError for settings that the actor's `model` does not take.

    `model` is a Hugging Face config. tp is refused with layouts, where transformers' plans are
    asked (`models.parallel`).
    """
    if not num_recurrent(model):
        return
    check_recurrent_training(config, model, config.trainer.layout, "trainer.layout")
    if config.cluster.pools.rollout and config.rollout.dtype is DType.bfloat16:
        allowed = f"float32 with cluster.pools.rollout: {_of(model)} and one format is pushed"
        raise ConfigError("rollout.dtype", config.rollout.dtype.value, allowed)
    if config.rollout.engine is not Engine.native:
        allowed = f"native: {_of(model)} whose weights no switch writes into another engine's"
        raise ConfigError("rollout.engine", config.rollout.engine.value, allowed)


def check_recurrent_value_model(
    config: Config, model: Any, layout: TrainLayoutConfig, key: str, own: bool
) -> None:
    """Raise ConfigError for settings that a value model, perhaps of its `own` path, does not take.

    Whether prompts are shared follows from the actor's model, and counts for both.
    """
    check_recurrent_training(config, model, layout, f"{key}.layout")
    shares = config.trainer.share_prompts
    if own and num_recurrent(model) and shares is not SharePrompts.never:
        allowed = f"never: the model of {key}.path has recurrent layers, whose states none shares"
        raise ConfigError("trainer.share_prompts", shares.value, allowed)


def check_recurrent_training(
    config: Config, model: Any, layout: TrainLayoutConfig, key: str
) -> None:
    """Raise ConfigError for settings of training that a `model` does not take.

    `key` names its layout.
    """
    if not num_recurrent(model):
        return
    check_recurrent_numbers(config, model)
    trainer = config.trainer
    if layout.cp > 1:
        allowed = f"1: {_of(model)} whose state does not pass between ranks"
        raise ConfigError(f"{key}.cp", layout.cp, allowed)
    if trainer.chunk_tokens:
        allowed = f"0: {_of(model)} whose state does not pass between chunks"
        raise ConfigError("trainer.chunk_tokens", trainer.chunk_tokens, allowed)
    if trainer.compile:
        allowed = f"false: {_of(model)} whose batches follow the lengths of a row's sequences"
        raise ConfigError("trainer.compile", True, allowed)


def check_recurrent_numbers(config: Config, model: Any) -> None:
    """Raise ConfigError for a device or a format in which no `model` of any role computes."""
    if not num_recurrent(model):
        return
    if config.cluster.device is Device.cuda:
        allowed = f"cpu: {_of(model)} which have run on CPUs alone"
        raise ConfigError("cluster.device", config.cluster.device.value, allowed)
    dtype = config.model.compute_dtype
    if dtype is DType.bfloat16 and release_of(version("torch")) < (2, 12):
        allowed = f"float32, or torch 2.12: {_of(model)} whose rates of decay stay in float32"
        raise ConfigError("model.compute_dtype", dtype.value, allowed)


def _of(model: Any) -> str:
    return f"{model.model_type} has recurrent layers,"
