"""The keywords that transformers hands to an attention function besides its tensors."""

from collections.abc import Mapping
from typing import Any

from torch import nn

_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache"})
"""Keywords of the model's own call, which layers hand on and no attention function reads."""


def check_keywords(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise ValueError for one that has a value and is not computed, such as gpt-oss's `s_aux`.

    `keywords` are those that the attention function has no parameter for.
    """
    for name, value in keywords.items():
        if value is not None and value is not False and name not in _WITHOUT_EFFECT:
            raise ValueError(f"{type(module).__name__}: attention with {name} is not supported")
