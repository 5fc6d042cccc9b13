"""A model's config made small: the same code paths, two layers of each kind, narrow ones."""

import copy
from collections.abc import Iterable
from typing import Any

from transformers import PretrainedConfig

from hybridrl.models.blocks import decoder_layers
from hybridrl.models.config_json import EXPERTS, EXPERTS_PER_TOKEN, num_recurrent
from hybridrl.models.parallel import meta_model
from hybridrl.models.stages import per_layer_lists

HEAD_DIM = 16
VOCABULARY = 67
WINDOW = 7
MOST_PARAMETERS = 20_000_000
"""Above it a config has widths that are not known here."""

_RENAMED = ("hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
_FEED_FORWARD = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim")
_AT_MOST = {
    **dict.fromkeys(EXPERTS, 8),
    **dict.fromkeys(EXPERTS_PER_TOKEN, 4),
    "n_group": 2,
    "topk_group": 1,
    "sliding_window": WINDOW,
    "index_topk": WINDOW,  # tokens that sparse attention chooses
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    # Gated DeltaNet, Kimi Delta Attention and Mamba.
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "mamba_chunk_size": 16,
}


def shrink(config: PretrainedConfig, head_dim: int = HEAD_DIM) -> PretrainedConfig:
    """`config` with small widths, heads of `head_dim`, a small vocabulary and its first layers.

    Layers reach as far as needed for two of every kind: of a type, with or without experts, with or
    without rotation. Of a hybrid's equal layers in a row two are enough. The ratio of query to key
    heads and the experts per token stay, as far as small numbers allow. Raises ValueError for a
    config whose widths are not among those known here.
    """
    settings = copy.deepcopy(config.to_dict())
    settings.pop("trains_tower", None)  # the layers of the text alone
    own_names = {name: config.attribute_map.get(name, name) for name in (*_RENAMED, *_AT_MOST)}
    settings |= {name: settings.pop(own) for name, own in own_names.items() if own in settings}
    if "hidden_size" not in settings:  # a composite, whose parts have configs of their own
        raise ValueError("it has widths that cannot be told by name: there is no hidden_size")
    _shrink_heads(settings, head_dim)
    _shrink_mixers(settings, head_dim)
    at_most = {**_AT_MOST, "qk_nope_head_dim": head_dim, "v_head_dim": head_dim}
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name.startswith("vocab_size"):  # Gemma 4 has a second vocabulary's width
            settings[name] = VOCABULARY
        elif name in at_most:
            settings[name] = min(value, at_most[name])
        elif any(width in name for width in _FEED_FORWARD):
            settings[name] = _width(name)
        elif name.endswith("_token_id"):
            settings[name] = min(value, 1)
    for name in settings:
        if name.endswith("_token_id") and isinstance(settings[name], list):
            settings[name] = 1
    depth = settings["num_hidden_layers"]
    small = _remade(config, settings)
    settings, kinds = small.to_dict(), _kinds(small, depth)
    kept = [*range(_layers_needed(kinds))]
    small = _remade(config, _cut_layers(settings, depth, kept))
    if num_recurrent(config):  # rounding grows with the depth, and more with recurrent layers
        shorter = [i for i in kept if i < 2 or not kinds[i] == kinds[i - 1] == kinds[i - 2]]
        cut = _remade(config, _cut_layers(settings, depth, shorter))
        if _kinds(cut, len(shorter)) == [kinds[i] for i in shorter]:
            small = cut
    size = sum(parameter.numel() for parameter in meta_model(small).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"it has widths that cannot be told by name: {size:,} parameters are left")
    return small


def _width(name: str) -> int:
    """Another width for each of a model's kinds of feed-forward blocks."""
    return 24 if "moe" in name or "expert" in name else 48


def _shrink_heads(settings: dict[str, Any], width: int) -> None:
    hidden, heads = settings["hidden_size"], settings["num_attention_heads"]
    kv_heads = settings.get("num_key_value_heads") or heads
    size = settings.get("head_dim") or hidden // heads
    groups, kv = min(heads // kv_heads, 4), min(kv_heads, 2)
    latent = settings.get("kv_lora_rank") is not None
    if latent:
        groups, kv = 1, min(heads, 2)
        settings["qk_rope_head_dim"] = settings["head_dim"] = width
        settings["qk_head_dim"] = min(settings["qk_nope_head_dim"], width) + width
    elif "head_dim" in settings:
        settings["head_dim"] = width
    settings["num_attention_heads"] = groups * kv
    if "num_key_value_heads" in settings:
        settings["num_key_value_heads"] = kv
    if settings.get("rotary_dim"):
        settings["rotary_dim"] = settings["rotary_dim"] * width // size
    equal = hidden == heads * size or "head_dim" not in settings
    settings["hidden_size"] = groups * kv * width + (0 if equal else 32)
    _shrink_rotation(settings, width, size)


def _shrink_mixers(settings: dict[str, Any], width: int) -> None:
    """Fewer heads of recurrent layers, in the ratio of their kinds; Mamba's have this `width`."""
    if keys := settings.get("linear_num_key_heads"):
        shared = min(settings["linear_num_value_heads"] // keys, 4)
        settings["linear_num_key_heads"] = keys = min(keys, 2)
        settings["linear_num_value_heads"] = keys * shared
    if settings.get("mamba_n_heads"):
        inner = settings["mamba_expand"] * settings["hidden_size"]
        settings |= {"mamba_d_head": width, "mamba_n_heads": inner // width}
        if settings.get("mamba_d_ssm"):  # Falcon-H1's own width
            settings["mamba_d_ssm"] = inner


def _shrink_rotation(settings: dict[str, Any], width: int, size: int) -> None:
    """Factors by frequency are as many as a head has: `width` now, `size` before."""
    rotations = [settings.get(name) for name in ("rope_parameters", "rope_scaling")]
    for rotation in [r for r in rotations if isinstance(r, dict)]:
        for name, value in rotation.items():
            if name.endswith("_factor") and isinstance(value, list):
                rotation[name] = value[: max(1, len(value) * width // size)]


def _remade(config: PretrainedConfig, settings: dict[str, Any]) -> PretrainedConfig:
    own_names = {config.attribute_map.get(name, name): settings[name] for name in settings}
    return type(config).from_dict(own_names)


def _kinds(config: PretrainedConfig, depth: int) -> list[tuple[Any, ...]]:
    """What tells the layers apart: their parameters, and their entries in the config's lists."""
    lists = per_layer_lists(config.to_dict(), depth).values()
    return [
        (
            tuple((name, tuple(p.shape)) for name, p in layer.named_parameters()),
            *(str(values[index]) for values in lists),
        )
        for index, layer in enumerate(decoder_layers(meta_model(config)))
    ]


def _layers_needed(kinds: Iterable[tuple[Any, ...]]) -> int:
    """The layers, from the first, that have two of every kind, or all that there are."""
    kinds = list(kinds)
    places = [[i for i, other in enumerate(kinds) if other == kind][:2] for kind in set(kinds)]
    return max(place for two in places for place in two) + 1


def _cut_layers(settings: dict[str, Any], depth: int, kept: list[int]) -> dict[str, Any]:
    """The layers of these numbers alone, and what the config says of each."""
    cut = {**settings, "num_hidden_layers": len(kept)}
    for name, values in per_layer_lists(settings, depth).items():
        cut[name] = [values[layer] for layer in kept]
    if isinstance(cut.get("mlp_only_layers"), list):
        dense = cut["mlp_only_layers"]
        cut["mlp_only_layers"] = [new for new, layer in enumerate(kept) if layer in dense]
    return cut
