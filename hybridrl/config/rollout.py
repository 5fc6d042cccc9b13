"""How responses are generated."""

from dataclasses import dataclass, field
from enum import Enum

from hybridrl.config.errors import ConfigError
from hybridrl.config.layout import RolloutLayoutConfig
from hybridrl.config.model import DType


class Engine(Enum):
    """Rollout engines."""

    native = "native"  # of this repository
    vllm = "vllm"  # vLLM, in the worker processes


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFeatures:
    """What a rollout engine can do, for whoever must know more of it than its name."""

    exports_kv: bool
    """Whether it hands out the keys and values of a sample."""
    deterministic: bool
    """Whether it can compute every sample alone, so that runs agree bit for bit."""
    shares_weights: bool
    """Whether a module has its weights, which others may compute with."""
    caches_last_token: bool
    """Whether its KV cache needs room for a response's last token."""
    block_multiple: int = 1
    """What `rollout.block_size` must be a multiple of."""
    vocab_multiple: int = 1
    """What rows of the embedding are padded to a multiple of."""
    ascending: bool = False
    """Whether an instance's ranks must be in ascending order."""


ENGINES = {
    Engine.native: EngineFeatures(
        exports_kv=True, deterministic=True, shares_weights=True, caches_last_token=False
    ),
    Engine.vllm: EngineFeatures(
        exports_kv=False,
        deterministic=False,  # what it computes for a sample depends on what it computes with it
        shares_weights=False,  # they are packed for itself
        caches_last_token=True,
        ascending=True,
        vocab_multiple=64,
        block_multiple=32,  # of its CPU attention; the GPU ones take multiples of 16
    ),
}


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    """The rollout engine of every generation instance."""

    engine: Engine = Engine.native
    """Which engine; choose it by `rollout=native` or `rollout=vllm`, which sets what it needs."""
    dtype: DType = DType.float32
    """Format of the generation weights."""
    max_new_tokens: int = 24
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Softmax temperature of training rollouts; 0 is greedy."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens whose probability reaches this."""
    top_k: int = 0
    """Only the k most probable tokens; 0 is all."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response, besides the end-of-text token. The response keeps them. One that
    is a token of the vocabulary counts as that token alone; any other wherever it appears."""
    max_running: int = 256
    """Samples that decode at the same time on an instance."""
    block_size: int = 16
    """Tokens per block of the paged KV cache."""
    kv_cache_tokens: int = 0
    """Tokens that the KV cache of an instance holds; 0 sizes it for `max_running` full samples."""
    decode_steps: int = 64
    """Decode steps per bounded call of an instance."""
    layout: RolloutLayoutConfig = field(default_factory=RolloutLayoutConfig)
    """How the weights lie on the ranks in generation."""

    def __post_init__(self) -> None:
        for key in ("max_new_tokens", "max_running", "block_size", "decode_steps"):
            if getattr(self, key) < 1:
                raise ConfigError(f"rollout.{key}", getattr(self, key), "1 or more")
        if "" in self.stop:
            raise ConfigError("rollout.stop", self.stop, "texts of one or more characters")
        if self.temperature < 0:
            raise ConfigError("rollout.temperature", self.temperature, "0 (greedy) or above")
        if not 0 < self.top_p <= 1:
            raise ConfigError("rollout.top_p", self.top_p, "above 0, at most 1")
        if self.top_k < 0:
            raise ConfigError("rollout.top_k", self.top_k, "0 (all tokens) or above")
        if self.block_size % self.features.block_multiple:
            multiple = self.features.block_multiple
            allowed = f"a multiple of {multiple} with rollout.engine={self.engine.value}"
            raise ConfigError("rollout.block_size", self.block_size, allowed)

    @property
    def features(self) -> EngineFeatures:
        """What the engine can do."""
        return ENGINES[self.engine]
