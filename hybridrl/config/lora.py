"""Low-rank adapters: they are trained in place of all weights of a model."""

from dataclasses import dataclass, field

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError

ALL_LINEAR = "all-linear"
"""In `target_modules`: every linear layer of the decoder blocks."""


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """LoRA (Hu et al., arXiv 2106.09685): weights W stay, and W + alpha / rank B A computes."""

    rank: int = bounded(0, least=0, allowed="0 (all weights are trained) or above")
    """Rank of the adapters; 0 has none and trains all weights."""
    alpha: int = bounded(16, least=1)
    """The factor of the adapters' product, times the rank."""
    dropout: float = bounded(0.0, least=0, below=1)
    """Share of an adapter's inputs that is dropped while training."""
    target_modules: list[str] = field(default_factory=lambda: [ALL_LINEAR])
    """The linear layers that get adapters (q_proj, v_proj, ...); all-linear: all of a block."""

    def check(self, key: str, tp: int) -> None:
        """Raise ConfigError for settings that cannot work; `key` is their place.

        `tp` is the model's tensor parallelism in training.
        """
        if self.dropout and self.rank and tp > 1:  # each rank would drop other inputs
            raise ConfigError(f"{key}.dropout", self.dropout, f"0 with tensor parallelism ({tp=})")
        if not self.target_modules:
            allowed = f"[{ALL_LINEAR}], or names of linear layers"
            raise ConfigError(f"{key}.target_modules", "[]", allowed)

    @property
    def scaling(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank


@dataclass(kw_only=True, slots=True)
class ActorConfig:
    """The trained weights of the actor; optimizer and ranks are the trainer's."""

    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters in place of all weights."""

    def check(self, tp: int) -> None:
        """Raise ConfigError for settings that cannot work; see `LoraConfig.check`."""
        self.lora.check("actor.lora", tp)
