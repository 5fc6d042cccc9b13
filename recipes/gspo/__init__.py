"""GSPO: one importance ratio a response (Group Sequence Policy Optimization, arXiv 2507.18071)."""

from dataclasses import dataclass

from hybridrl.algorithms import advantages
from hybridrl.algorithms.rewards import has_spread
from hybridrl.algorithms.sequence_losses import GSPOLoss
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class GSPOConfig(RolloutCorrection):
    """Settings of GSPO."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""
    clip_low: float = bounded(3e-4, least=0, most=1)
    """The ratio, a mean over tokens, is clipped below at 1 - clip_low."""
    clip_high: float = bounded(4e-4, least=0)
    """The ratio is clipped above at 1 + clip_high."""


@recipe("gspo")
def gspo(flow: Flow, cfg: GSPOConfig) -> None:
    """Sample groups, compare within each, clip whole responses."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples).filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    samples = samples.by_group(advantages.group_relative)
    loss = GSPOLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, **stale)
    flow.actor.update(samples, loss=loss)
