"""Clip-Cov: a few tokens that would lower the entropy most are left out (arXiv 2505.22617)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from hybridrl.algorithms import advantages, covariance
from hybridrl.algorithms.rewards import has_spread
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.covariance import add_covariances
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class ClipCovConfig(RolloutCorrection):
    """Settings of Clip-Cov."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high."""
    cov_ratio: float = bounded(2e-4, above=0, most=1)
    """The share of the batch's tokens that is left out, one token at least."""
    cov_low: float = 1.0
    """Tokens are left out whose covariance is above this,"""
    cov_high: float = 5.0
    """and below this."""
    seed: int = 0
    """Seed of the choice among these tokens: run.seed."""


@recipe("clip_cov")
def clip_cov(flow: Flow, cfg: ClipCovConfig) -> None:
    """Take GRPO's clipped step without some tokens of large covariance."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples).filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    samples = samples.by_group(advantages.group_relative)
    samples = add_covariances(samples, cfg)
    # As many tokens of the batch as cov_ratio says, by chance among those between the bounds.
    draws = flow.state("draws", 0.0)

    def share_out(lengths: Sequence[int], candidates: Sequence[int]) -> tuple[list[int], list[int]]:
        draws.set(draws.get() + 1)
        random = Random(f"{cfg.seed}/{draws.get():.0f}")
        return covariance.share_out(lengths, candidates, ratio=cfg.cov_ratio, random=random)

    between = partial(covariance.num_between, low=cfg.cov_low, high=cfg.cov_high)
    samples = samples.map(between, ("covariance",), scalars=("candidates",))
    samples = samples.by_batch(share_out, ("length", "candidates"), ("num_left_out", "draw"))
    inputs = ("covariance", "num_left_out", "draw")
    keep = partial(covariance.keep, low=cfg.cov_low, high=cfg.cov_high)
    samples = samples.map(keep, inputs, ("cov_kept",))
    loss = covariance.ClipCovLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, **stale)
    flow.actor.update(samples, loss=loss)
