"""What a model says about its attention: heads, widths, sinks, caps, and keywords of its calls."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

_WITH_SINKS = {"gpt_oss"}
_WITHOUT_EFFECT = frozenset({"position_ids", "use_cache"})
"""Keywords of the model's call that layers pass through and no attention function reads."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of every layer: heads of keys and values, and the widths of a head's.

    With `sinks` each head has a learned score besides those of the keys (gpt-oss). Where scores are
    `capped`, c tanh(s / c) takes the place of a score s (Gemma 2).
    """

    kv_heads: int
    key_size: int
    value_size: int
    sinks: bool
    capped: bool = False

    @property
    def head_size(self) -> int:
        """The wider of keys and values: the narrower ones are padded to it."""
        return max(self.key_size, self.value_size)

    def local_kv_heads(self, tp: int) -> int:
        """Heads of keys and values on one of `tp` ranks; several may hold the same one."""
        return max(1, self.kv_heads // tp)


def attention_shape(config: PretrainedConfig) -> AttentionShape:
    """The shape that `config` says.

    Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) is computed with keys and values
    for every query head; a part of the key's width is rotated.
    """
    heads: int = config.num_attention_heads
    sinks = config.model_type in _WITH_SINKS
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    if getattr(config, "kv_lora_rank", None) is not None:
        keys = config.qk_nope_head_dim + config.qk_rope_head_dim
        return AttentionShape(heads, keys, config.v_head_dim, sinks, capped)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return AttentionShape(kv_heads, size, size, sinks, capped)


NOT_HANDED_ON = "its model does not hand keywords on to its layers, as packed sequences need"
"""Why attention does not learn where sequences begin (Falcon-H1 in transformers 5.10)."""


def check_keywords(module: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise ValueError for a keyword that would be ignored, such as a bias of the positions.

    `keywords` are what transformers hands to an attention function besides its parameters.
    Attention is causal, so `is_causal` may be True alone.
    """
    for name, value in keywords.items():
        is_neutral = value is None or value is False or name in _WITHOUT_EFFECT
        if name == "is_causal":
            is_neutral = value is None or value is True
        if not is_neutral:
            raise ValueError(f"{type(module).__name__}: attention with {name} is not supported")
