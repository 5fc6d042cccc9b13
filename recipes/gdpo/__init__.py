"""GDPO: several rewards, each normalized apart (arXiv 2601.05242)."""

from dataclasses import dataclass, field
from functools import partial

from hybridrl.algorithms import advantages, losses
from hybridrl.config import RewardPartConfig, bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class GDPOConfig(RolloutCorrection):
    """Settings of GDPO."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""
    parts: dict[str, RewardPartConfig] = field(default_factory=dict)
    """The rewards by name, of which each has a weight: reward.parts. None: the reward alone."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high."""
    normalize: str = "token"
    """Weights of tokens: token, sequence or constant."""


@recipe("gdpo")
def gdpo(flow: Flow, cfg: GDPOConfig) -> None:
    """Sample groups, compare within each by every reward, and add up what they say."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    weights = {f"reward_{name}": judge.weight for name, judge in cfg.parts.items()}
    samples = flow.reward.score(samples, parts=tuple(cfg.parts))
    samples, stale = add_old_log_probs(flow, samples, cfg)
    rewards = [name for name, weight in weights.items() if weight] or ["reward"]
    for name in rewards:
        relative = advantages.group_relative
        samples = samples.by_group(relative, (name,), (f"{name}_advantage",), name=f"group_{name}")
    total = partial(
        advantages.standardized_sum, weights=[weights.get(name, 1.0) for name in rewards]
    )
    samples = samples.by_batch(total, [f"{name}_advantage" for name in rewards])
    loss = losses.ClippedLoss(
        clip_low=cfg.clip_low, clip_high=cfg.clip_high, normalize=cfg.normalize, **stale
    )
    flow.actor.update(samples, loss=loss)
