"""OPO: exact on-policy training with the optimal reward baseline (arXiv 2505.23585)."""

from dataclasses import dataclass

from hybridrl.algorithms import advantages, losses
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe


@dataclass(kw_only=True, slots=True)
class OPOConfig:
    """Settings of OPO."""

    group_size: int = bounded(8, least=2)
    """Samples per prompt."""


@recipe("opo")
def opo(flow: Flow, cfg: OPOConfig) -> None:
    """Sample groups, take off the baseline of least variance, follow the policy gradient once.

    No clipping, no KL, no entropy: every batch is seen once, in one optimizer step, for the loss
    has no ratio.
    """
    samples = flow.actor.generate(flow.prompts, num_samples=cfg.group_size)
    samples = flow.reward.score(samples)
    samples = samples.map(len, ("log_probs",), scalars=("length",))
    samples = samples.by_group(advantages.optimal_baseline, ("reward", "length"))
    flow.actor.update(samples, loss=losses.ReinforceLoss(normalize="constant"))
