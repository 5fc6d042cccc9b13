"""XRPO: samples go where the mean reward is least certain, rare right ones count more."""

from dataclasses import dataclass
from functools import partial

import torch

from hybridrl.algorithms import advantages, budgets, losses
from hybridrl.algorithms.rewards import has_spread
from hybridrl.config import bounded, check_at_least
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class XRPOConfig(RolloutCorrection):
    """Settings of XRPO."""

    group_size: int = bounded(4, least=2)
    """Samples of every prompt before any is preferred."""
    rounds: int = bounded(2, least=0)
    """How often more of the budget is dealt, by the rewards until then."""
    round_samples: int = bounded(64, least=1)
    """Samples that a round deals to the step's prompts."""
    max_samples: int = 32
    """Samples per prompt at most."""
    confidence: float = bounded(0.95, above=0, below=1)
    """Confidence of the interval of a prompt's mean reward."""
    exploration: float = bounded(0.1, least=0)
    """Weight of the bonus for prompts with few samples."""
    novelty: float = bounded(0.5, least=0)
    """Weight of the bonus of a right response that is less likely than its group; 0: none."""
    novelty_bound: float = bounded(0.5, least=0)
    """The largest bonus, as a share of its advantage."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high."""

    def __post_init__(self) -> None:
        check_at_least(self, "max_samples", "group_size")


@recipe("xrpo")
def xrpo(flow: Flow, cfg: XRPOConfig) -> None:
    """Sample, deal the budget by uncertainty in rounds, compare, and prefer the rare right ones."""
    deal = partial(
        budgets.by_uncertainty,
        budget=cfg.round_samples,
        max_samples=cfg.max_samples,
        confidence=cfg.confidence,
        exploration=cfg.exploration,
    )
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples)
    for number in range(1, cfg.rounds + 1):
        count = f"more{number}"
        samples = samples.by_batch(deal, ("reward",), (count,), grouped=True, name=f"deal{number}")
        more = flow.reward.score(flow.actor.generate_more(samples, count, name=count))
        samples = samples.merge(more, name=f"merge{number}")
    samples = samples.filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    if cfg.novelty:
        samples = samples.map(likelihood, ("log_probs",), scalars=("likelihood",))
        samples = samples.by_group(advantages.group_relative, outputs=("plain_advantage",))
        sharpen = partial(advantages.novelty_sharpened, weight=cfg.novelty, bound=cfg.novelty_bound)
        samples = samples.by_group(sharpen, ("plain_advantage", "likelihood"), ("advantage",))
    else:
        samples = samples.by_group(advantages.group_relative)
    loss = losses.ClippedLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, **stale)
    flow.actor.update(samples, loss=loss)


def likelihood(log_probs: torch.Tensor) -> float:
    """Mean log-probability of a response's tokens."""
    return float(log_probs.double().mean()) if log_probs.numel() else 0.0
