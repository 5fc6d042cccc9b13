"""Makes Hugging Face decoders, without their weights; refuses unsupported architectures."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from hybridrl.config import ConfigError, DType, Vision
from hybridrl.models.buffers import fill_buffers
from hybridrl.models.config_json import is_read, layer_kinds, unsupported, wrong_experts
from hybridrl.models.image_text import attach_tower, language_config
from hybridrl.models.logits import logits_transform
from hybridrl.models.recurrent import use_batches
from hybridrl.models.stages import prepare_training

TORCH_DTYPES = {DType.float32: torch.float32, DType.bfloat16: torch.bfloat16}


def load_config(
    path: str, key: str = "model.path", vision: Vision = Vision.frozen
) -> PretrainedConfig:
    """The model's config; of a model for images and text that of its text part.

    With `vision` as `train` the tower is a part of the model. A local directory stays local. Where
    the files are quantized in a way that is read (`hybridrl.models.quantized`), the config is that
    of the dequantized model. Raises ConfigError, which names `key`, if `path` is no model, or
    `model.vision` if it has no tower.
    """
    directory = Path(path)
    if not directory.exists() and path.startswith(("/", ".", "~")):
        raise ConfigError(key, path, "a directory that exists, or a hub name")
    if directory.exists() and not (directory / "config.json").is_file():
        raise ConfigError(key, path, "a directory with config.json and *.safetensors")
    try:
        local = directory.exists()
        config = AutoConfig.from_pretrained(path, local_files_only=local, trust_remote_code=False)
    # A family's config class raises the last two.
    except (
        OSError, ValueError, TypeError, StrictDataclassError, LookupError, ArithmeticError
    ) as error:  # fmt: skip
        raise ConfigError(key, path, f"a Hugging Face model ({one_line(error)})") from error
    if is_read(getattr(config, "quantization_config", None)):
        del config.quantization_config
    try:
        return language_config(config, trains_tower=vision is Vision.train)
    except ValueError as error:
        raise ConfigError("model.vision", vision.value, f"frozen: {error}") from None


def empty_causal_lm(
    path: str,
    attn_implementation: str,
    key: str = "model.path",
    vision: Vision = Vision.frozen,
) -> PreTrainedModel:
    """The model at `path` without its weights: parameters in float32 on the meta device.

    In training mode with dropout off; buffers that the config gives are on the CPU. Raises
    ConfigError, which names `key`, where `path` is no model. Raises ValueError for a family whose
    layers the engines do not compute (see `check_supported`).
    """
    config = load_config(path, key, vision)
    return _empty(AutoModelForCausalLM, config, path, attn_implementation)


def empty_value_model(
    path: str, attn_implementation: str, key: str = "model.path"
) -> PreTrainedModel:
    """A value model, one number a token: a sequence classifier with a head `score` without bias.

    A classifier's directory has the head. With a causal language model the head starts at zero (see
    `absent_parameters`), and the vocabulary's head is dropped. So every rank starts alike without a
    seed, and the first values are 0: the first advantages are plain returns. The first step changes
    the head alone; no random gradient reaches the trained layers. Nothing is tied.

    Raises as `empty_causal_lm` does; also for a classifier with more than one label.
    """
    config = load_value_config(path, key)
    return _empty(AutoModelForSequenceClassification, config, path, attn_implementation)


def absent_parameters(config: PretrainedConfig) -> tuple[str, ...]:
    """What the weights of a value model of `config` may lack: a causal language model's head."""
    return () if is_classifier(config) else (SCORE,)


def load_value_config(path: str, key: str = "model.path") -> PretrainedConfig:
    """The config of `empty_value_model`; raises as that does for an unsuitable config."""
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


def _empty(
    auto: Any, config: PretrainedConfig, path: str, attn_implementation: str
) -> PreTrainedModel:
    """The model as `from_pretrained` makes it, less its parameters' memory."""
    check_supported(config)
    dropouts = {name: value for name, value in config.to_dict().items() if _is_dropout(name, value)}
    for name in dropouts:  # modules read these when they are made
        setattr(config, name, 0.0)
    config.name_or_path = path
    with torch.device("meta"):
        model = auto.from_config(
            config, dtype=torch.float32, attn_implementation=attn_implementation
        )
    attach_tower(model)
    mixers = use_batches(model)
    # Hybrids are said not to ask the interface, though they do; the probe tells who is right.
    if not (model._supports_attention_backend or mixers):
        raise ValueError(
            f"model type {config.model_type}: its attention does not go through transformers'"
            " attention interface, which packed sequences need"
        )
    for name, value in dropouts.items():  # what is saved with the weights stays
        setattr(model.config, name, value)
    fill_buffers(model, torch.device("cpu"))
    if model.can_generate():
        model.generation_config = generation_config(path)
    return prepare_training(model)


def generation_config(path: str) -> GenerationConfig:
    """The file of a directory or a hub's model; without one what `config.json` says of it."""
    local = Path(path).exists()
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=local)
    except OSError:
        return GenerationConfig.from_pretrained(
            path, "config.json", local_files_only=local, _from_model_config=True
        )


def end_token_ids(path: str, config: Any) -> frozenset[int]:
    """All ends that `config.json` and `generation_config.json` name, within the vocabulary.

    Chat models have several: GLM ends at `<|endoftext|>`, `<|user|>` and `<|observation|>`, Llama
    at `<|eot_id|>` and `<|eom_id|>` besides the tokenizer's eos.
    """
    named = [config.eos_token_id, generation_config(path).eos_token_id]
    ids = {id for value in named for id in _ids(value)}
    return frozenset(id for id in ids if 0 <= id < config.vocab_size)


def _ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return tuple(map(int, value)) if isinstance(value, list | tuple) else (int(value),)


def load_tokenizer(path: str, chat_template: str | None = None) -> Any:
    """The tokenizer of a directory or a hub's model, with another chat template where one is given.

    Raises OSError or ValueError where there is none.
    """
    local = Path(path).exists()
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=local)
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _is_dropout(name: str, value: object) -> bool:
    drops = "dropout" in name or name.endswith(("pdrop", "layerdrop"))
    return drops and isinstance(value, float)


def check_supported(config: PretrainedConfig) -> None:
    """Raise ValueError for a model whose config shows that no engine computes it, with the reason.

    Refused: layers of a kind that no engine computes, encoders, images, and logits that
    `logits_transform` does not know. Whether the others come out right is a matter of the numbers,
    see `hybridrl.engines.probe`. Dropout is not refused: it is turned off.
    """
    logits_transform(config)
    if component := unsupported({**config.to_dict(), "layer_types": layer_kinds(config)}):
        raise ValueError(
            f"model type {config.model_type}: {component} is not supported; supported are decoders"
            " of full or sliding-window attention and of recurrent layers"
        )
    if wrong := wrong_experts(config.to_dict()):
        raise ValueError(f"a config {wrong}")


def one_line(error: Exception) -> str:
    """The first line of a message; of a config's field that is of a wrong type, all of them."""
    if isinstance(error, StrictDataclassError):
        return " ".join(str(error).split())
    return str(error).strip().splitlines()[0]
