"""SAPO: a soft gate in place of a clip (Soft Adaptive Policy Optimization, arXiv 2511.20347)."""

from dataclasses import dataclass

from hybridrl.algorithms import advantages
from hybridrl.algorithms.losses import SAPOLoss
from hybridrl.algorithms.rewards import has_spread
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.rollout_correction import RolloutCorrection, add_old_log_probs


@dataclass(kw_only=True, slots=True)
class SAPOConfig(RolloutCorrection):
    """Settings of SAPO."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""
    tau_pos: float = bounded(1.0, above=0)
    """How soon the gate closes on good responses; larger is sooner."""
    tau_neg: float = bounded(1.05, above=0)
    """How soon it closes on bad ones."""


@recipe("sapo")
def sapo(flow: Flow, cfg: SAPOConfig) -> None:
    """Sample groups, compare within each, follow tokens less the farther they have moved."""
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples).filter(has_spread)
    samples, stale = add_old_log_probs(flow, samples, cfg)
    samples = samples.by_group(advantages.group_relative)
    flow.actor.update(samples, loss=SAPOLoss(tau_pos=cfg.tau_pos, tau_neg=cfg.tau_neg, **stale))
