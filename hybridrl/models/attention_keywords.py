"""The keywords that transformers hands to an attention function besides its tensors."""

from collections.abc import Mapping
from typing import Any

from torch import nn

_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache"})
"""Keywords of the model's call that layers pass through and no attention function reads."""


def check_keywords(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise ValueError for a keyword that would be ignored, such as gpt-oss's `s_aux`.

    `keywords` are those without a parameter in the attention function.
    """
    for name, value in keywords.items():
        if value is not None and value is not False and name not in _WITHOUT_EFFECT:
            raise ValueError(f"{type(module).__name__}: attention with {name} is not supported")
