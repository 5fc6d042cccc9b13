"""DARS: hard prompts are sampled again, in a second stage (Depth-Breadth Synergy in RLVR)."""

from dataclasses import dataclass
from enum import Enum
from functools import partial

from hybridrl.algorithms import advantages, budgets, losses
from hybridrl.algorithms.rewards import has_spread
from hybridrl.config import bounded, check_at_least
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


class Rebalancing(Enum):
    """The weight of a hard prompt."""

    equal_treatment = "equal_treatment"  # as much as one that is solved half of the time
    hardness_weighted = "hardness_weighted"  # more, the harder it is


_BUDGETS = {
    Rebalancing.equal_treatment: budgets.equal_treatment,
    Rebalancing.hardness_weighted: budgets.hardness_weighted,
}


@dataclass(kw_only=True, slots=True)
class DARSConfig(RolloutCorrection):
    """Settings of DARS."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt in the first stage."""
    rebalancing: Rebalancing = Rebalancing.equal_treatment
    """equal_treatment or hardness_weighted."""
    max_samples: int = 32
    """Samples per prompt in both stages; the authors take 32, and 64 for hardness_weighted."""
    clip_low: float = bounded(0.2, least=0, most=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = bounded(0.2, least=0)
    """The ratio is clipped above at 1 + clip_high."""

    def __post_init__(self) -> None:
        check_at_least(self, "max_samples", "group_size")


@recipe("dars")
def dars(flow: Flow, cfg: DARSConfig) -> None:
    """Sample, sample hard prompts again, and compare within the joint groups."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples)
    rebalance = _BUDGETS[cfg.rebalancing]
    samples = samples.by_batch(
        partial(rebalance, max_samples=cfg.max_samples), ("reward",), ("more",), grouped=True
    )
    more = flow.reward.score(flow.actor.generate_more(samples, "more"))
    samples = samples.merge(more).filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    # The sum of |R - mean| is rebalanced, so advantages are not divided by the deviation.
    samples = samples.by_group(partial(advantages.group_relative, std_normalize=False))
    loss = losses.ClippedLoss(clip_low=cfg.clip_low, clip_high=cfg.clip_high, **stale)
    flow.actor.update(samples, loss=loss)
