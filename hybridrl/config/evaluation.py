"""Held-out evaluation: any number of sets, each with its own data, judge and sampling."""

import re
from dataclasses import dataclass, field

from hybridrl.config.bounds import bounded
from hybridrl.config.data import SourceConfig
from hybridrl.config.errors import ConfigError
from hybridrl.config.reward import RewardConfig
from hybridrl.config.sampling import SamplingConfig

MAIN = "main"
"""The set whose accuracy a run's result has, as `eval_accuracy`."""


@dataclass(kw_only=True, slots=True)
class EvalSetConfig(SamplingConfig):
    """Prompts that are never trained on, how they are answered, and who judges the answers."""

    source: SourceConfig | None = None
    """Its prompts; null: those held out of the training mixture (`data.eval_size`)."""
    prompt_template: str | None = None
    """Text of the prompt, as `data.prompt_template`; null: that one."""
    reward: RewardConfig | None = None
    """Its judge; null: the run's."""
    num_prompts: int = bounded(0, least=0)
    """Prompts to use, the first ones; 0 uses all, of a generated source `data.eval_size`."""
    num_samples: int = bounded(1, least=1)
    """Responses per prompt."""
    k: list[int] = field(default_factory=list)
    """The k of pass@k and maj@k; empty: powers of two up to `num_samples`, and `num_samples`."""
    temperature: float | None = bounded(None, least=0, allowed="0 (greedy) or above")
    """Softmax temperature; null: 0 with one sample a prompt, else 1."""
    max_new_tokens: int | None = bounded(None, least=1)
    """Longest response, in tokens; null: `rollout.max_new_tokens`."""
    every: int | None = bounded(10, least=1)
    """Evaluate every so many steps; null: before the recipe's first step and after its last."""
    success_threshold: float = 1.0
    """A response counts as right when its reward reaches this."""

    @property
    def drawn_at(self) -> float:
        """The softmax temperature, filled in."""
        if self.temperature is not None:
            return self.temperature
        return 0.0 if self.num_samples == 1 else 1.0

    @property
    def sizes(self) -> list[int]:
        """The k of pass@k and maj@k, ascending."""
        powers = [2**i for i in range(self.num_samples.bit_length())]
        return sorted({*(self.k or [*powers, self.num_samples])})

    def check(self, key: str, max_new_tokens: int) -> None:
        """Raise ConfigError for settings that cannot work; `key` is their place.

        `max_new_tokens` is training's longest response.
        """
        self.check_sampling(key, self.max_new_tokens or max_new_tokens)
        for k in self.k:
            if not 1 <= k <= self.num_samples:
                allowed = f"1 to {key}.num_samples={self.num_samples}"
                raise ConfigError(f"{key}.k", k, allowed)
        if self.temperature == 0 and self.num_samples > 1:
            allowed = f"above 0 with {key}.num_samples={self.num_samples}: greedy answers are equal"
            raise ConfigError(f"{key}.temperature", self.temperature, allowed)
        if self.reward is not None:
            self.reward.check(f"{key}.reward")


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    """Held-out evaluation."""

    sets: dict[str, EvalSetConfig] = field(default_factory=lambda: {MAIN: EvalSetConfig()})
    """The sets, by names of your choice; `main` gives the run's `eval_accuracy`."""

    def check(self, max_new_tokens: int) -> None:
        """Raise ConfigError for a set that cannot work; training's responses are that long."""
        for name, settings in self.sets.items():
            if not _NAME.fullmatch(name):
                allowed = "names of lower-case letters, digits, _ and -"
                raise ConfigError("eval.sets", name, allowed)
            settings.check(f"eval.sets.{name}", max_new_tokens)


_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
