"""KL-Cov: the tokens that would lower the entropy most are held (arXiv 2505.22617)."""

from dataclasses import dataclass
from functools import partial

from hybridrl.algorithms import advantages, covariance
from hybridrl.algorithms.rewards import has_spread
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.covariance import add_covariances
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class KLCovConfig(RolloutCorrection):
    """Settings of KL-Cov."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""
    cov_ratio: float = bounded(2e-4, above=0, most=1)
    """The share of the batch's tokens that is held, one token at least."""
    cov_kl_coef: float = bounded(1.0, least=0)
    """Weight of their distance from the old policy."""
    mini_batches: int | None = bounded(4, least=1)
    """Optimizer steps a batch, in which that distance can grow; null: trainer.mini_batches."""


@recipe("kl_cov")
def kl_cov(flow: Flow, cfg: KLCovConfig) -> None:
    """Take unclipped steps, and hold the tokens of the largest covariance to the old policy."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples).filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    samples = samples.by_group(advantages.group_relative)
    samples = add_covariances(samples, cfg)
    # The largest covariances of the batch: each rank says its own largest ones.
    largest = partial(covariance.largest, ratio=cfg.cov_ratio)
    threshold = partial(covariance.threshold, ratio=cfg.cov_ratio)
    samples = samples.map(largest, ("covariance", "batch_tokens"), scalars=("largest",))
    samples = samples.by_batch(threshold, ("largest", "batch_tokens"), ("least_held",))
    samples = samples.map(covariance.hold, ("covariance", "least_held"), ("cov_held",))
    loss = covariance.KLCovLoss(cov_kl_coef=cfg.cov_kl_coef, **stale)
    flow.actor.update(samples, loss=loss, mini_batches=cfg.mini_batches)
