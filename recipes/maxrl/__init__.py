"""MaxRL: from expected reward towards maximum likelihood of being right (arXiv 2602.02710)."""

from dataclasses import dataclass

from hybridrl.algorithms import advantages, losses
from hybridrl.algorithms.rewards import has_spread
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class MaxRLConfig(RolloutCorrection):
    """Settings of MaxRL."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt. The series of log p is followed up to one term less."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high."""
    normalize: str = "token"
    """Weights of tokens: token, sequence or constant."""


@recipe("maxrl")
def maxrl(flow: Flow, cfg: MaxRLConfig) -> None:
    """Sample groups, compare within each, weigh hard prompts by how seldom they are right."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples).filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    samples = samples.by_group(advantages.mean_normalized)
    loss = losses.ClippedLoss(
        clip_low=cfg.clip_low, clip_high=cfg.clip_high, normalize=cfg.normalize, **stale
    )
    flow.actor.update(samples, loss=loss)
