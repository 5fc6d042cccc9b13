"""TTRL: learning without labels, from the majority of one's own answers (arXiv 2504.16084)."""

from dataclasses import dataclass

import torch

from hybridrl.algorithms import advantages, losses
from hybridrl.algorithms.rewards import has_spread, majority_vote
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class TTRLConfig(RolloutCorrection):
    """Settings of TTRL, and of ETTRL's reshaping."""

    group_size: int = bounded(16, least=2)
    """Samples per prompt, which vote and are trained on; the paper takes 64 votes."""
    entropy_reshaping: bool = False
    """Give less weight to responses that the policy was unsure of (ETTRL, arXiv 2508.11356)."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high."""


@recipe("ttrl")
def ttrl(flow: Flow, cfg: TTRLConfig) -> None:
    """Sample, let the answers vote, and reward those that agree with the majority."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    # The verifier extracts the answer of each response; its reward is only recorded.
    samples = flow.reward.score(samples, name="true_reward", text="answer")
    samples = samples.by_group(majority_vote, ("answer",), ("reward",)).filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    if cfg.entropy_reshaping:
        samples = samples.map(surprise, ("log_probs",), scalars=("surprise",))
        samples = samples.by_group(advantages.group_relative, outputs=("plain_advantage",))
        inputs = ("plain_advantage", "surprise")
        samples = samples.by_group(advantages.entropy_reshaped, inputs, ("advantage",))
    else:
        samples = samples.by_group(advantages.group_relative)
    loss = losses.ClippedLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, **stale)
    flow.actor.update(samples, loss=loss)


def surprise(log_probs: torch.Tensor) -> float:
    """Mean of -log p over the tokens: each is an unbiased sample of the entropy at its place."""
    return float(-log_probs.double().mean()) if log_probs.numel() else 0.0
