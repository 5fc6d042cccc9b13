"""GMPO: the geometric mean of a response's ratios (Zhao et al., arXiv 2507.20673)."""

from dataclasses import dataclass

from hybridrl.algorithms import advantages
from hybridrl.algorithms.rewards import has_spread
from hybridrl.algorithms.sequence_losses import GMPOLoss
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class GMPOConfig(RolloutCorrection):
    """Settings of GMPO."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""
    clip_low: float = bounded(0.4, least=0)
    """A token's log-ratio is clipped below at -clip_low."""
    clip_high: float = bounded(0.4, least=0)
    """A token's log-ratio is clipped above at clip_high."""


@recipe("gmpo")
def gmpo(flow: Flow, cfg: GMPOConfig) -> None:
    """Sample groups, compare within each, clip tokens and take the mean of their logarithms."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples).filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    samples = samples.by_group(advantages.group_relative)
    loss = GMPOLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, **stale)
    flow.actor.update(samples, loss=loss)
