"""What a model's `config.json` alone rules out, read before torch or transformers are imported."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.config import (
    ConfigError,
    ModelConfig,
    RolloutLayoutConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.models.weight_scheme import scheme_of

RECURRENT_TYPES = frozenset({"linear_attention", "mamba", "conv"})
"""The layers that `models.recurrent` computes, where it finds a mixer in them."""
PARALLEL_TYPE = "hybrid"
"""The layers that have a mixer and attend, side by side, in `PARALLEL_FAMILIES`.

Other families have the same word for other layers: Zamba's share one attention, ZAYA's convolve it.
"""
PARALLEL_FAMILIES = frozenset({"falcon_h1"})
LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", *RECURRENT_TYPES})
"""The layers that are computed in all families: the probe says of which they are right."""

IMAGE_TEXT = {
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
"""Model types for images and text, and those of causal language models that are their text part."""
IMAGE_FAMILIES = frozenset({"qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"})
"""The model types whose images are computed (`hybridrl.models.vision`)."""

_UNSUPPORTED_KEYS = {
    "attention_chunk_size": "chunked attention",
    "lru_width": "linear attention",
    "rescale_every": "linear attention",
    "ssm_state_size": "mamba",
    "state_size": "mamba",
    "vision_config": "images",
    "audio_config": "sound",
}
"""Keys of a config that only models with such parts have."""


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the text part of a model for images and text; other models' as they are.

    How weights are quantized is said of the whole model.
    """
    text, model_type = settings.get("text_config"), settings.get("model_type")
    if model_type not in IMAGE_TEXT or not isinstance(text, dict):
        return settings
    whole = {key: settings[key] for key in ("quantization_config",) if key in settings}
    return {**text, **whole, "model_type": IMAGE_TEXT[model_type]}


_LAYER_KINDS = ("layer_types", "layers_block_type")
"""The keys under which configs name the kinds of their layers."""


def layer_kinds(config: Any) -> list[str]:
    """The kinds of a model's layers, as its Hugging Face config names them; none if it does not."""
    return next((list(kinds) for key in _LAYER_KINDS if (kinds := getattr(config, key, None))), [])


def layers_with_keys(config: Any) -> list[bool]:
    """Whether each layer has keys and values: all do but those that have a state in their place."""
    kinds = layer_kinds(config) if num_recurrent(config) else ()
    return [kind not in RECURRENT_TYPES for kind in kinds] or [True] * config.num_hidden_layers


def num_recurrent(config: Any) -> int:
    """The layers that have a state, in place of keys and values or besides them."""
    return sum(kind in {*RECURRENT_TYPES, PARALLEL_TYPE} for kind in layer_kinds(config))


def unsupported(settings: Mapping[str, Any]) -> str | None:
    """The part of a model with these settings that no engine computes; None if all may be."""
    if settings.get("is_encoder_decoder"):
        return "an encoder"
    if settings.get("use_bidirectional_attention") in (True, "all"):  # EmbeddingGemma
        return "attention to later tokens"
    kinds = {kind for key in _LAYER_KINDS for kind in settings.get(key) or ()}
    own = {PARALLEL_TYPE} if settings.get("model_type") in PARALLEL_FAMILIES else set()
    if others := kinds - LAYER_TYPES - own:
        return ", ".join(sorted(others))
    for key, component in _UNSUPPORTED_KEYS.items():
        if settings.get(key):
            return component
    quantization = settings.get("quantization_config")
    if quantization and not is_read(quantization):
        method = quantization.get("quant_method", "an unknown method")
        of_method = f" ({format})" if (format := quantization.get("format")) else ""
        return f"weights quantized by {method}{of_method}"
    return None


def is_read(quantization: Mapping[str, Any] | None) -> bool:
    """Whether weights are quantized in a way that `hybridrl.models.quantized` reads."""
    if not quantization:
        return False
    if scheme_of(quantization) is not None or scale_block(quantization) is not None:
        return True
    return quantization.get("quant_method") == "mxfp4"


def scale_block(quantization: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Rows and columns of an FP8 weight that have one scale; None where it is not of that kind."""
    if not quantization or quantization.get("quant_method") != "fp8":
        return None
    block = quantization.get("weight_block_size")
    if not isinstance(block, list | tuple) or len(block) != 2:
        return None
    return int(block[0]), int(block[1])


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The keys under which families have the number of a layer's experts."""
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts", "moe_topk",
)  # fmt: skip
"""The keys under which they have the number that a token takes."""


def check_has_experts(path: str | None, trainer: TrainerConfig) -> None:
    """Raise ConfigError for settings of experts where `config.json` at `path` has none."""
    check_expert_settings(_read(path), trainer)


def check_expert_settings(settings: Mapping[str, Any], trainer: TrainerConfig) -> None:
    """Raise ConfigError for settings of experts where a model with these `settings` has none.

    Without any `settings` it passes.
    """
    if settings and not any(map(settings.get, EXPERTS)):
        for key, value, default in trainer.of_experts:
            allowed = f"{default} ({settings.get('model_type', 'the model')} has no experts)"
            raise ConfigError(key, value, allowed)


def check_layouts(model: ModelConfig, train: TrainLayoutConfig, gen: RolloutLayoutConfig) -> None:
    """Raise ConfigError for an ep that `config.json` rules out, or the tiny model's sizes.

    Other axes depend on transformers' plans: see `hybridrl.models.parallel`.
    """
    settings = _of_actor(model)
    _check_ep(settings, train.ep, "trainer.layout.ep")
    _check_ep(settings, gen.ep, "rollout.layout.ep")


def check_value_layout(
    path: str | None, model: ModelConfig, layout: TrainLayoutConfig, key: str
) -> None:
    """As `check_layouts`, for a value model at `path`, or of the actor; `key` is its settings'."""
    _check_ep(_of_actor(model) if path is None else _read(path), layout.ep, f"{key}.layout.ep")


def _of_actor(model: ModelConfig) -> Mapping[str, Any]:
    """The settings of the actor's model, as far as they are known here."""
    if model.path is not None or model.shape:
        return _read(model.path)
    return {"model_type": model.tiny.model_type, "num_experts": model.tiny.num_experts}


def _check_ep(settings: Mapping[str, Any], ep: int, key: str) -> None:
    if settings:
        experts = next((n for name in EXPERTS if isinstance(n := settings.get(name), int) and n), 0)
        if allowed := ep_allowed(settings.get("model_type", "unknown"), experts, ep):
            raise ConfigError(key, ep, allowed)


def ep_allowed(model_type: str, experts: int, ep: int) -> str | None:
    """The allowed values and the reason; None if a model with so many experts takes `ep`."""
    if ep == 1:
        return None
    if not experts:
        return f"1 (model type {model_type} has no experts)"
    if experts % ep == 0:
        return None
    choices = [str(n) for n in range(1, experts + 1) if experts % n == 0]
    return f"one of {', '.join(choices)} (it must divide the {experts} experts)"


def _read(path: str | None) -> Mapping[str, Any]:
    """The settings of the text model in `config.json`; none without such a file, or a good one."""
    file = Path(path or "") / "config.json"
    if not path or not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return text_settings(settings) if isinstance(settings, dict) else {}


def check_config_json(path: str | None, key: str) -> None:
    """Raise ConfigError, which names `key`, where `config.json` shows that no engine computes it.

    A path without such a file passes here: other checks name what is wrong with it.
    """
    settings = _read(path)
    if component := unsupported(settings):
        model_type = settings.get("model_type", "unknown")
        allowed = f"a decoder of layers that are computed ({model_type} has {component})"
        raise ConfigError(key, path, allowed)
    if wrong := wrong_experts(settings):
        raise ConfigError(key, path, f"a config.json {wrong}")


def wrong_experts(settings: Mapping[str, Any]) -> str | None:
    """What `config.json` ought to say of experts; None where it does. Lists are left to the model.

    A probe does not see it: it has few experts, and fewer a token.
    """
    name, experts = next(((n, settings[n]) for n in EXPERTS if settings.get(n)), ("", 0))
    if not name or isinstance(experts, list):
        return None
    if not isinstance(experts, int) or experts < 0:
        return f"with a whole number of {name}, not {experts!r}"
    for per_token in EXPERTS_PER_TOKEN:
        chosen = settings.get(per_token, 1)
        if isinstance(chosen, int) and not 1 <= chosen <= experts:
            return f"with {per_token} of 1 to {name}={experts}, not {chosen}"
    return None
