"""RLOO: REINFORCE, a sample's baseline being the others' mean (arXiv 2402.14740)."""

from dataclasses import dataclass
from functools import partial

import torch

from hybridrl.algorithms import advantages, losses
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.reference import add_reference


@dataclass(kw_only=True, slots=True)
class RLOOConfig:
    """Settings of RLOO."""

    group_size: int = bounded(4, least=2)
    """Samples per prompt."""
    kl_coef: float = bounded(0.0, least=0)
    """The penalty, in reward, of a nat of log p / p_reference of the response; the paper has
    0.03 to 0.1 with a reward model. 0 needs no reference."""
    reference_ema_decay: float | None = bounded(None, above=0, below=1)
    """Decay of an averaged reference at an optimizer step; null: the policy at start."""


@recipe("rloo")
def rloo(flow: Flow, cfg: RLOOConfig) -> None:
    """Sample groups, compare each response with the others, and follow the policy gradient."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples)
    if cfg.kl_coef:
        samples = add_reference(flow, samples, cfg.reference_ema_decay)
        samples = samples.map(log_ratio, ("log_probs", "reference_log_probs"), scalars=("kl",))
        samples = samples.by_group(
            partial(penalized, kl_coef=cfg.kl_coef), ("reward", "kl"), ("return",)
        )
    samples = samples.by_group(
        advantages.leave_one_out, ("return",) if cfg.kl_coef else ("reward",)
    )
    # A response is one action: its log-probability is the sum over its tokens.
    flow.actor.update(samples, loss=losses.ReinforceLoss(normalize="constant"))


def log_ratio(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> float:
    """log p / p_reference of a whole response."""
    return float((log_probs.double() - reference_log_probs.double()).sum())


def penalized(rewards: list[float], kl: list[float], *, kl_coef: float) -> list[float]:
    """Rewards less the penalty for leaving the reference."""
    return [reward - kl_coef * k for reward, k in zip(rewards, kl, strict=True)]
