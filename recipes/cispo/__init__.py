"""CISPO: importance weights are clipped, no token's gradient is (MiniMax-M1, arXiv 2506.13585)."""

from dataclasses import dataclass

from hybridrl.algorithms import advantages, losses
from hybridrl.algorithms.rewards import has_spread
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class CISPOConfig(RolloutCorrection):
    """Settings of CISPO."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""
    clip_low: float = bounded(1.0, least=0, most=1)
    """The weight is at least 1 - clip_low; 1 is no bound, as in the paper."""
    clip_high: float = bounded(4.0, least=0)
    """The weight is at most 1 + clip_high."""


@recipe("cispo")
def cispo(flow: Flow, cfg: CISPOConfig) -> None:
    """Sample groups, compare within each, and follow every token's gradient."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples).filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    samples = samples.by_group(advantages.group_relative)
    loss = losses.CISPOLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, **stale)
    flow.actor.update(samples, loss=loss)
