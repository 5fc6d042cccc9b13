"""Which modules of a model are recurrent: its mixers, told by what they have, and not by name."""

import inspect

from torch import nn

CACHE_KEYWORDS = ("cache_params", "past_key_values", "cache")  # the last from 5.24 on
"""The keywords by which a mixer takes a cache, of which it has one."""

_RATES, _NORMS = ("A_log", "dt_bias"), ("norm", "o_norm")


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a mixer: it has a convolution over tokens, and takes a cache."""
    has_convolution = any(isinstance(child, nn.Conv1d) for child in module.children())
    return has_convolution and _takes_cache(module)


def recurrent_modules(model: nn.Module) -> list[nn.Module]:
    """The mixers of a model, or of a layer, in order."""
    return [module for module in model.modules() if is_recurrent(module)]


def norms_of(mixer: nn.Module) -> list[nn.Module]:
    """The norm of a mixer's output, where it has one."""
    return [child for name, child in mixer.named_children() if name in _NORMS]


def has_keys(layer: nn.Module) -> bool:
    """Whether a decoder layer caches keys and values: all do but those with a mixer in their place.

    A layer may have both (Falcon-H1).
    """
    return not recurrent_modules(layer) or any(
        _takes_cache(module)
        for module in layer.modules()
        if module is not layer and hasattr(module, "layer_idx") and not is_recurrent(module)
    )


def _takes_cache(module: nn.Module) -> bool:
    names = inspect.signature(type(module).forward).parameters
    return any(name in names for name in CACHE_KEYWORDS)


def precise_names(model: nn.Module) -> frozenset[str]:
    """The parameters of mixers that stay in float32 whatever format a model computes in.

    Rates of decay are exponentials of exponentials, which a rounding moves by whole tokens. vLLM
    keeps them so, too. A convolution is among them where transformers has it in float32 (Bailing).
    """
    strict = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return frozenset(
        f"{name}.{own}"
        for name, module in model.named_modules()
        if is_recurrent(module)
        for own, _ in module.named_parameters()
        # Rates may be in a module of their own (Kimi Linear).
        if own.rpartition(".")[2] in _RATES
        or own.removesuffix(".weight") in _NORMS
        or own.partition(".")[0] in strict
    )
