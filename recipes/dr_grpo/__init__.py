"""Dr.GRPO: GRPO without its two biases (Liu et al., arXiv 2503.20783, section 3.2)."""

from dataclasses import dataclass
from functools import partial

from hybridrl.algorithms import advantages, losses
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class DrGRPOConfig(RolloutCorrection):
    """Settings of Dr.GRPO."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high."""


@recipe("dr_grpo")
def dr_grpo(flow: Flow, cfg: DrGRPOConfig) -> None:
    """Sample groups, take their means off, and weigh every token alike."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    # Not divided by the deviation, which would favor prompts that are nearly solved or hopeless;
    samples = samples.by_group(partial(advantages.group_relative, std_normalize=False))
    # nor by a response's own length, which would favor long wrong answers.
    loss = losses.ClippedLoss(
        clip_low=cfg.clip_low, clip_high=cfg.clip_high, normalize="constant", **stale
    )
    flow.actor.update(samples, loss=loss)
