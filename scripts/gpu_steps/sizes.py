"""The models of the report, and the sizes that each is measured with."""

from dataclasses import dataclass, replace
from typing import Any

from gpu_steps.steps import Settings
from hybridrl.models.attention_shape import AttentionShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """A Hugging Face config, and numbers of tokens and samples."""

    shape: dict[str, Any]
    sequence_tokens: int
    """Tokens of a sample that is trained; a quarter of it is the prompt."""
    row_tokens: int
    """Tokens of a micro-batch, which is one packed row."""
    prompt_tokens: int
    """Tokens of a prompt in decoding."""
    new_tokens: int
    """Tokens of a response in decoding."""
    decode_rows: tuple[int, ...] = (1, 64, 256)
    """Samples that decode together."""
    mismatch_samples: int = 16
    """Samples of which two engines' log-probabilities are compared."""

    @property
    def head_size(self) -> int:
        """Width of an attention head."""
        return int(self.shape["head_dim"])

    @property
    def attention(self) -> AttentionShape:
        """Heads and widths of the attention."""
        kv_heads = int(self.shape["num_key_value_heads"])
        return AttentionShape(kv_heads, self.head_size, self.head_size, sinks=False)


_1_5B = Sizes(
    shape={  # of Qwen2.5-1.5B
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    sequence_tokens=512,
    row_tokens=8192,
    prompt_tokens=512,
    new_tokens=64,
)
_TINY = Sizes(
    shape={
        "model_type": "qwen2",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "vocab_size": 512,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
    },
    sequence_tokens=32,
    row_tokens=256,
    prompt_tokens=16,
    new_tokens=8,
    mismatch_samples=4,
)
_SIZES = {"tiny": _TINY, "1.5b": _1_5B}
# A row of 8192 tokens of 1.5b has some 30 GiB of activations, besides 25 GB of state and gradients.
_WHOLE_ROW_BYTES, _SHORT_ROW = 70 * 2**30, 2048


def sizes_of(settings: Settings) -> Sizes:
    """The sizes of the model that is measured; a small GPU gets a shorter row."""
    sizes = _SIZES[settings.model]
    if 0 < settings.gpu_memory < _WHOLE_ROW_BYTES:
        return replace(sizes, row_tokens=min(sizes.row_tokens, _SHORT_ROW))
    return sizes
