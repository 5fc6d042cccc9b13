"""Numbers that a recipe adapts from step to step: KL coefficients and Lagrange multipliers.

Controllers are pure: they map the present number and what was measured to the next number. The
number itself is recipe state (`Flow.state`), which is checkpointed; `by_batch` reads and sets it.
Costs and advantages join in `with_cost`.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import torch

from hybridrl.config import ConfigError

Number = TypeVar("Number", float, torch.Tensor)


@dataclass(frozen=True, kw_only=True)
class AdaptiveKL:
    """A KL coefficient that keeps the KL to the reference near `target`.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon): Ziegler et al., "Fine-Tuning
    Language Models from Human Preferences", arXiv 1909.08593, section 2.2. `target` is a KL in the
    unit of what is measured: per token (verl) or per response (the paper). Raises ConfigError for
    one of the two that is not above 0.
    """

    target: float
    horizon: float = 10000.0

    def __post_init__(self) -> None:
        for name, value in (("kl_target", self.target), ("kl_horizon", self.horizon)):
            if not value > 0:
                raise ConfigError(f"recipe.{name}", value, "above 0")

    def __call__(self, coef: float, kl: float, num_samples: int) -> float:
        """The next coefficient after `num_samples` responses of mean `kl`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coef * (1 + error * num_samples / self.horizon)


@dataclass(frozen=True, kw_only=True)
class Multiplier:
    """Safe-RLHF's Lagrange multiplier, which grows while responses cost more than allowed.

    ln m' = ln m + lr m (cost - threshold), at most ln `maximum`: gradient ascent in ln m on
    m (cost - threshold) (Dai et al., "Safe RLHF", arXiv 2310.12773, equation 31; the bound is that
    of the authors' code). Start above 0: 0 stays 0. Raises ConfigError for a setting that cannot
    work.

    Example: with lr 0.1 and threshold 0, m = 1 becomes 1.105 at a mean cost of 1.
    """

    lr: float = 0.1
    threshold: float = 0.0
    maximum: float | None = 5.0

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ConfigError("recipe.multiplier_lr", self.lr, "0 or above")
        if self.maximum is not None and not self.maximum > 0:
            raise ConfigError("recipe.multiplier_max", self.maximum, "above 0, or null")

    def __call__(self, multiplier: float, cost: float) -> float:
        """The next multiplier; `cost` is the mean cost of recent responses."""
        step = self.lr * multiplier * (cost - self.threshold)
        largest = math.inf if self.maximum is None else self.maximum
        # The exponent is bounded before exp, which overflows at 709.
        return min(multiplier * math.exp(min(step, 700.0)), largest)


def with_cost(reward_advantages: Number, cost_advantages: Number, multiplier: float) -> Number:
    """Safe-RLHF's advantages: (A_reward - m A_cost) / (1 + m), of the shape of both.

    arXiv 2310.12773, equation 30; the division keeps their size while m grows. For `Stream.map`
    over tensors [response_tokens], with the multiplier as a scalar field.
    """
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)
