"""How tokens are drawn, besides the temperature: training's rollouts and evaluation sets alike."""

from dataclasses import dataclass, field, fields

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError

MAX_BIAS = 100
"""Largest `logit_bias`, as in OpenAI's API and vLLM."""


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """What is drawn of the model's distribution; vLLM's parameters, under its names.

    The defaults draw from the whole distribution.
    """

    top_p: float = bounded(1.0, above=0, most=1)
    """Nucleus: the smallest set of tokens whose probability reaches this."""
    top_k: int = bounded(0, least=0, allowed="0 (all tokens) or above")
    """Only the k most probable tokens; 0 is all."""
    min_p: float = bounded(0.0, least=0, most=1)
    """Only tokens with at least this share of the most probable one's probability; 0 is all."""
    repetition_penalty: float = bounded(1.0, above=0)
    """Divides positive logits of the tokens in prompt and response, multiplies negative ones; 1 is
    none."""
    presence_penalty: float = bounded(0.0, least=-2, most=2)
    """Subtracted from the logits of the tokens in the response; 0 is none."""
    frequency_penalty: float = bounded(0.0, least=-2, most=2)
    """Likewise, times their number in the response; 0 is none."""
    min_new_tokens: int = bounded(0, least=0)
    """Shortest response: before, tokens and texts that end it do not."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that a response does not contain: the last of their tokens is not drawn."""
    ignore_eos: bool = False
    """Whether the end-of-text token ends no response; `rollout.stop` still does."""

    def check_sampling(self, key: str, max_new_tokens: int) -> None:
        """Raise ConfigError for values that cannot work; `key` is their place."""
        if self.min_new_tokens > max_new_tokens:
            allowed = f"at most the longest response, {max_new_tokens}"
            raise ConfigError(f"{key}.min_new_tokens", self.min_new_tokens, allowed)
        for token, bias in self.logit_bias.items():
            if abs(bias) > MAX_BIAS:
                allowed = f"-{MAX_BIAS} to {MAX_BIAS}"
                raise ConfigError(f"{key}.logit_bias.{token}", bias, allowed)
        if not all(word.strip() for word in self.bad_words):
            allowed = "texts of one or more characters, not spaces alone"
            raise ConfigError(f"{key}.bad_words", self.bad_words, allowed)

    @property
    def truncating(self) -> list[str]:
        """The settings, as `name=value`, that leave tokens out of the distribution."""
        names = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p")}
        neutral = {"top_p": 1, "top_k": 0, "min_p": 0}
        return [f"{name}={value}" for name, value in names.items() if value != neutral[name]]

    @property
    def differing(self) -> list[str]:
        """The settings, as `name=value`, that draw from another distribution than the model's."""
        names = (setting.name for setting in fields(SamplingConfig))
        values = {name: getattr(self, name) for name in names if name != "ignore_eos"}
        neutral = {name: getattr(SamplingConfig(), name) for name in values}
        return [f"{name}={value}" for name, value in values.items() if value != neutral[name]]
