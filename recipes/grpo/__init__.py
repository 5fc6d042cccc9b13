"""Group-relative policy optimization (DeepSeekMath, arXiv 2402.03300, section 4.1)."""

from dataclasses import dataclass
from enum import Enum
from functools import partial

from hybridrl.algorithms import advantages, losses
from hybridrl.algorithms.corrections import response_ratio
from hybridrl.algorithms.rewards import has_spread
from hybridrl.config import ConfigError, bounded
from hybridrl.flow import Flow, Stream, recipe
from hybridrl.recipes.reference import add_reference
from hybridrl.recipes.rollout_correction import OldLogProbs, RolloutCorrection, add_old_log_probs


class Baseline(Enum):
    """The baseline of the rewards of a group."""

    mean = "mean"
    minimum_variance = "minimum_variance"  # stale responses count by W^2, all by their length


@dataclass(kw_only=True, slots=True)
class GRPOConfig(RolloutCorrection):
    """Settings of GRPO; the defaults are DAPO's token mean without a KL term."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""
    baseline: Baseline = Baseline.mean
    """The baseline of rewards: mean, or minimum_variance (VCPO, arXiv 2602.17616)."""
    std_normalize: bool = True
    """Divide by the group's standard deviation; Dr.GRPO (arXiv 2503.20783) does not."""
    skip_equal_groups: bool = True
    """Leave out groups whose rewards are all equal: they have no advantage."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high; DAPO (arXiv 2503.14476) takes 0.28."""
    dual_clip: float | None = bounded(None, above=1)
    """Bound of the loss for negative advantages (arXiv 1912.09729); null: none."""
    kl_coef: float = bounded(0.0, least=0)
    """Weight of the KL term to the reference policy; 0 needs no reference."""
    kl: str = "k3"
    """Estimator of that KL: k1, k2 or k3."""
    reference_ema_decay: float | None = bounded(None, above=0, below=1)
    """Decay of an averaged reference at an optimizer step; null: the policy at start."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    normalize: str = "token"
    """token (DAPO), sequence (GRPO) or constant (Dr.GRPO)."""


@recipe("grpo")
def grpo(flow: Flow, cfg: GRPOConfig) -> None:
    """Sample groups, compare within each, take a clipped step."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples)
    if cfg.skip_equal_groups:
        samples = samples.filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    if cfg.kl_coef:
        samples = add_reference(flow, samples, cfg.reference_ema_decay)
    samples = add_advantages(samples, cfg)
    loss = losses.ClippedLoss(
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        dual_clip=cfg.dual_clip,
        kl_coef=cfg.kl_coef,
        kl=cfg.kl,
        entropy_coef=cfg.entropy_coef,
        normalize=cfg.normalize,
        **stale,
    )
    flow.actor.update(samples, loss=loss)


def add_advantages(samples: Stream, cfg: GRPOConfig) -> Stream:
    """One advantage a response, from the rewards of its group."""
    if cfg.baseline is Baseline.mean:
        compared = partial(advantages.group_relative, std_normalize=cfg.std_normalize)
        return samples.by_group(compared)
    if cfg.correction.old_log_probs is not OldLogProbs.trainer or cfg.std_normalize:
        allowed = (
            "mean, or recipe.correction.old_log_probs=trainer recipe.std_normalize=false with it"
        )
        raise ConfigError("recipe.baseline", cfg.baseline.value, allowed)
    samples = samples.map(len, ("log_probs",), scalars=("length",))
    samples = samples.map(response_ratio, ("old_log_probs", "log_probs"), scalars=("ratio",))
    return samples.by_group(advantages.minimum_variance, ("reward", "length", "ratio"))
