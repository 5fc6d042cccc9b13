"""Which model is trained, and how it is computed."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError


class DType(Enum):
    """Floating-point formats of a computation."""

    auto = "auto"  # of the model: bfloat16 on GPUs, else float32; of generation: the model's
    float32 = "float32"
    bfloat16 = "bfloat16"

    def on(self, device: str) -> "DType":
        """The format on a device of type cpu or cuda."""
        if self is not DType.auto:
            return self
        return DType.bfloat16 if device == "cuda" else DType.float32

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return {DType.float32: 4, DType.bfloat16: 2}[self]


class Attention(Enum):
    """Which attention computes a packed batch."""

    auto = "auto"  # on a GPU the first of these that computes the model, else torch
    flash = "flash"  # flash-attn, where it is installed
    varlen = "varlen"  # torch.nn.attention.varlen: the same kernel, as torch builds it
    torch = "torch"  # scaled_dot_product_attention, once for each distinct length


class Vision(Enum):
    """What becomes of a model's image tower."""

    frozen = "frozen"  # its weights stay: neither gradients nor the switch know of it
    train = "train"  # it trains with the text, and generation gets its new weights


@dataclass(kw_only=True, slots=True)
class TinyModelConfig:
    """A small model with a character tokenizer, made where `model.path` is null.

    It is a Qwen3, a Qwen3-MoE, a Qwen3.5 (`attention_interval`) or a Qwen3-VL (`vision_layers`).
    """

    hidden_size: int = bounded(192, least=1)
    """Width of the residual stream."""
    intermediate_size: int = bounded(512, least=1)
    """Width of the feed-forward layer."""
    num_experts: int = bounded(0, least=0)
    """Experts of each feed-forward layer (a Qwen3-MoE); 0 is dense."""
    experts_per_token: int = bounded(2, least=1)
    """Experts that compute each token."""
    moe_intermediate_size: int = bounded(256, least=1)
    """Width of an expert."""
    num_layers: int = bounded(3, least=1)
    """Number of decoder layers."""
    attention_interval: int = bounded(1, least=1)
    """Every layer of such a number attends, and the others are Gated DeltaNet (a Qwen3.5) with
    twice the key and value heads; 1: all attend."""
    vision_layers: int = bounded(0, least=0)
    """Layers of an image tower (a Qwen3-VL) for small pictures; 0: it reads text alone."""
    num_heads: int = bounded(6, least=1)
    """Number of query heads."""
    num_kv_heads: int = bounded(2, least=1)
    """Number of key and value heads."""
    head_dim: int = bounded(32, least=1)
    """Width of one head."""
    max_positions: int = bounded(512, least=1)
    """Longest sequence, in tokens."""
    alphabet: str = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 #:,>=+-*/().?"
    """Characters that the tokenizer knows, one token each."""

    @property
    def model_type(self) -> str:
        """transformers' name of its family."""
        if self.attention_interval > 1:
            return "qwen3_5_text"
        if self.vision_layers:
            return "qwen3_vl_text"
        return "qwen3_moe" if self.num_experts else "qwen3"


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """The actor's model."""

    path: str | None = None
    """A Hugging Face directory or hub name; null makes the tiny model below."""
    shape: dict[str, Any] = field(default_factory=dict)
    """A Hugging Face config in place of a model; `hybridrl plan` needs no weights."""
    compute_dtype: DType = DType.auto
    """Format of the forward and backward pass; the master weights are always float32. `auto`:
    bfloat16 on GPUs, float32 on CPUs."""
    attention: Attention = Attention.auto
    """Attention of the packed training pass."""
    vision: Vision = Vision.frozen
    """What becomes of the image tower of a model whose prompts have images: it is `frozen`, or it
    trains with the text."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)
    """Shape of the model that is made when there is no path."""

    def check(self) -> None:
        """Raise ConfigError for an empty path or a tiny model of sizes that do not fit together."""
        if self.path == "":
            raise ConfigError("model.path", "", "a Hugging Face directory or hub name")
        if self.tiny.num_heads % self.tiny.num_kv_heads:
            raise ConfigError(
                "model.tiny.num_kv_heads",
                self.tiny.num_kv_heads,
                f"a divisor of model.tiny.num_heads={self.tiny.num_heads}",
            )
        experts = self.tiny.num_experts
        if experts and self.tiny.experts_per_token > experts:
            allowed = f"at most model.tiny.num_experts={experts}"
            raise ConfigError("model.tiny.experts_per_token", self.tiny.experts_per_token, allowed)
        interval = self.tiny.attention_interval
        if interval > self.tiny.num_layers:
            allowed = f"at most model.tiny.num_layers={self.tiny.num_layers}"
            raise ConfigError("model.tiny.attention_interval", interval, allowed)
        if experts and interval > 1:
            allowed = f"0 with model.tiny.attention_interval={interval}"
            raise ConfigError("model.tiny.num_experts", experts, allowed)
        for key, default in (("num_experts", 0), ("attention_interval", 1)):
            value, layers = getattr(self.tiny, key), self.tiny.vision_layers
            if layers and value != default:
                allowed = f"{default} with model.tiny.vision_layers={layers}"
                raise ConfigError(f"model.tiny.{key}", value, allowed)
