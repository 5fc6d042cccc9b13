"""Hugging Face causal language models: from safetensors only, and only what is computed right."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from hybridrl.config import ConfigError

_ALTERED_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def load_config(path: str) -> PretrainedConfig:
    """The model's config; ConfigError where `path` is no model. A local directory stays local."""
    directory = Path(path)
    if directory.exists() and not (directory / "config.json").is_file():
        raise ConfigError("model.path", path, "a directory with config.json and *.safetensors")
    try:
        return AutoConfig.from_pretrained(path, local_files_only=directory.exists())
    except (OSError, ValueError) as error:
        raise ConfigError("model.path", path, f"a Hugging Face model ({_line(error)})") from error


def load_causal_lm(
    path: str, attn_implementation: str, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The model at `path` on CPU in `dtype`, in training mode with dropout off.

    Raises ConfigError where the weights are missing, incomplete or not in safetensors, and
    ValueError for a family whose logits or attention the engines do not compute (see
    `check_supported`).
    """
    config = load_config(path)
    check_supported(config)
    dropouts = {name: value for name, value in config.to_dict().items() if _is_dropout(name, value)}
    for name in dropouts:  # modules read these when they are made
        setattr(config, name, 0.0)
    bar = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # one bar a rank would drown the run's own
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            use_safetensors=True,
            local_files_only=Path(path).exists(),
            output_loading_info=True,
        )
    except OSError as error:
        wanted = f"a model with *.safetensors ({_line(error)})"
        raise ConfigError("model.path", path, wanted) from error
    finally:
        if bar:
            transformers_logging.enable_progress_bar()
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        raise ConfigError("model.path", path, f"complete weights; missing: {', '.join(missing)}")
    if model.get_output_embeddings().bias is not None:
        raise ValueError(f"model type {config.model_type}: a head with a bias is not supported")
    if not model._supports_attention_backend:
        raise ValueError(
            f"model type {config.model_type}: its attention does not go through transformers'"
            " attention interface, which packed sequences need"
        )
    for name, value in dropouts.items():  # what is saved with the weights stays
        setattr(model.config, name, value)
    return model.train()


def _is_dropout(name: str, value: object) -> bool:
    return ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float)


def check_supported(config: PretrainedConfig) -> None:
    """Raise ValueError for a model whose logits or attention would come out wrong, naming why.

    Refused: logits that are scaled or capped after the head, capped attention scores, layers that
    are neither full nor sliding-window attention (recurrent ones would leak between sequences).
    """
    supported = "supported are decoders such as llama, mistral, qwen2, qwen3"
    for name in (*_ALTERED_LOGITS, "attn_logit_softcapping"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ValueError(
                f"model type {config.model_type}: {name} is not supported; {supported}"
            )
    other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if other or getattr(config, "is_encoder_decoder", False):
        what = ", ".join(sorted(other)) or "an encoder"
        raise ValueError(f"model type {config.model_type}: {what} is not supported; {supported}")


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
