"""The keywords that transformers hands to an attention function besides its tensors."""

from collections.abc import Mapping
from typing import Any

from torch import nn

_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache"})
"""Keywords of the model's call that layers pass through and no attention function reads."""


def check_keywords(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise ValueError for a keyword that would be ignored, such as a bias of the positions.

    `keywords` are those without a parameter in the attention function. Attention is causal, so
    `is_causal` may be True alone.
    """
    for name, value in keywords.items():
        is_neutral = value is None or value is False or name in _WITHOUT_EFFECT
        if name == "is_causal":
            is_neutral = value is None or value is True
        if not is_neutral:
            raise ValueError(f"{type(module).__name__}: attention with {name} is not supported")
