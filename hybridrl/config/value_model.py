"""A model with a value head: its initial weights, its optimizer, its sharding."""

from dataclasses import dataclass, field

from hybridrl.config.layout import TrainLayoutConfig
from hybridrl.config.lora import LoraConfig
from hybridrl.config.trainer import OptimConfig

VALUE_MODELS = {role: f"roles.{role}" for role in ("critic", "cost_critic", "reward")}
"""The roles that are value models when a recipe trains them, and the key of each one's settings."""


@dataclass(kw_only=True, slots=True)
class ValueModelConfig:
    """A value model, for recipes that have one; its micro-batches and passes are the trainer's."""

    path: str | None = None
    """A Hugging Face directory or hub name: a sequence classifier with one label (a reward model),
    or a language model: its value head begins at zero. Null: the actor as the recipe starts."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-5))
    """The optimizer."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters in place of all weights; the value head is trained whole."""
    layout: TrainLayoutConfig = field(default_factory=TrainLayoutConfig)
    """Sharding of the weights; by default that of the actor in training, but for ep: 1."""

    def check(self, ranks: int, key: str, ranks_key: str = "cluster.ranks") -> None:
        """Raise ConfigError for settings that cannot work on so many `ranks`.

        `key` is the place of these settings, `ranks_key` that of the number.
        """
        self.optim.check(f"{key}.optim")
        self.layout.check(ranks, f"{key}.layout", ranks_key)
        self.lora.check(f"{key}.lora", self.layout.tp)


@dataclass(kw_only=True, slots=True)
class RolesConfig:
    """The value models by the names of their roles."""

    critic: ValueModelConfig = field(default_factory=ValueModelConfig)
    """The value model."""
    cost_critic: ValueModelConfig = field(default_factory=ValueModelConfig)
    """The value model of the cost (Safe-RLHF)."""
    reward: ValueModelConfig = field(default_factory=ValueModelConfig)
    """The reward model that a recipe trains; the one that judges is `reward.model`."""
