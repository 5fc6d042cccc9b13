"""Loads Hugging Face decoders, from safetensors only; refuses unsupported architectures."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from hybridrl.config import ConfigError, DType
from hybridrl.models.config_json import unsupported
from hybridrl.models.logits import logits_transform
from hybridrl.models.stages import prepare_training

TORCH_DTYPES = {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16}


def load_config(path: str, key: str = "model.path") -> PretrainedConfig:
    """The model's config. A local directory stays local.

    Raises ConfigError, which names `key`, if `path` is no model.
    """
    directory = Path(path)
    if directory.exists() and not (directory / "config.json").is_file():
        raise ConfigError(key, path, "a directory with config.json and *.safetensors")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=directory.exists())
    except (OSError, ValueError) as error:
        raise ConfigError(key, path, f"a Hugging Face model ({_line(error)})") from error


def load_causal_lm(
    path: str, attn_implementation: str, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model at `path` on CPU in `dtype`, in training mode with dropout off.

    Raises ConfigError where the weights are missing, incomplete or not in safetensors. Raises
    ValueError for a family whose layers the engines do not compute (see `check_supported`).
    """
    config = load_config(path)
    model, missing = _load(AutoModelForCausalLM, path, config, attn_implementation, dtype)
    if missing:
        raise _incomplete("model.path", path, missing)
    return model


def load_value_model(
    path: str, attn_implementation: str, dtype: torch.dtype = torch.float32, key: str = "model.path"
) -> PreTrainedModel:
    """A value model, one number a token: a sequence classifier with a head `score` without bias.

    A classifier's directory has the head. With a causal language model the head starts at zero, and
    the vocabulary's head is dropped. So every rank starts alike without a seed, and the first
    values are 0: the first advantages are plain returns. The first step changes the head alone; no
    random gradient reaches the trained layers. Nothing is tied.

    Raises as `load_causal_lm` does, in the name of `key`; also for a classifier with more than one
    label.
    """
    config = load_value_config(path, key)
    model, missing = _load(
        AutoModelForSequenceClassification, path, config, attn_implementation, dtype, key
    )
    if missing == [SCORE] and not is_classifier(config):
        nn.init.zeros_(model.score.weight)
    elif missing:
        raise _incomplete(key, path, missing)
    return model


def load_value_config(path: str, key: str = "model.path") -> PretrainedConfig:
    """The config of `load_value_model`; raises as that does for an unsuitable config."""
    config = load_config(path, key)
    if is_classifier(config) and config.num_labels != 1:
        allowed = f"a classifier with one label (num_labels is {config.num_labels})"
        raise ConfigError(key, path, allowed)
    config.num_labels = 1
    config.tie_word_embeddings = False  # there is no vocabulary's head
    return config


def is_classifier(config: PretrainedConfig) -> bool:
    """Whether a directory's config is a sequence classifier's."""
    return any("SequenceClassification" in name for name in config.architectures or [])


SCORE = "score.weight"
"""The name of a sequence classifier's head, [labels, features]."""


def _load(
    auto: Any,
    path: str,
    config: PretrainedConfig,
    attn_implementation: str,
    dtype: torch.dtype,
    key: str = "model.path",
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the parameters that `path` lacks."""
    check_supported(config)
    dropouts = {name: value for name, value in config.to_dict().items() if _is_dropout(name, value)}
    for name in dropouts:  # modules read these when they are made
        setattr(config, name, 0.0)
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # one bar a rank would drown the run's own
    try:
        model, info = auto.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=Path(path).exists(),
            output_loading_info=True,
        )
    except OSError as error:
        raise ConfigError(key, path, f"a model with *.safetensors ({_line(error)})") from error
    finally:
        if bar:
            transformers_logging.enable_progress_bar()
    if not model._supports_attention_backend:
        raise ValueError(
            f"model type {config.model_type}: its attention does not go through transformers'"
            " attention interface, which packed sequences need"
        )
    for name, value in dropouts.items():  # what is saved with the weights stays
        setattr(model.config, name, value)
    mismatched = sorted(str(name) for name in info["mismatched_keys"])
    return prepare_training(model), sorted(info["missing_keys"]) + mismatched


def _incomplete(key: str, path: str, missing: list[str]) -> ConfigError:
    return ConfigError(key, path, f"complete weights; missing: {', '.join(missing)}")


def _is_dropout(name: str, value: object) -> bool:
    return ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float)


def check_supported(config: PretrainedConfig) -> None:
    """Raise ValueError for a model whose config shows that no engine computes it, with the reason.

    Refused: layers that are neither full nor sliding-window attention (recurrent ones would leak
    between sequences), encoders, images, and logits that `logits_transform` does not know. Whether
    the others come out right is a matter of the numbers, see `hybridrl.engines.probe`. Dropout is
    not refused: it is turned off.
    """
    logits_transform(config)
    component = unsupported(config.to_dict()) or unsupported(
        {"layer_types": getattr(config, "layer_types", None)}
    )
    if component:
        raise ValueError(
            f"model type {config.model_type}: {component} is not supported; supported are decoders"
            " of full or sliding-window attention"
        )


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
