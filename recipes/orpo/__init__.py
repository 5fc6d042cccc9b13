"""ORPO: fine-tuning and preferences in one loss (Hong et al., arXiv 2403.07691)."""

from dataclasses import dataclass

from hybridrl.algorithms.preference_losses import ORPOLoss
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe


@dataclass(kw_only=True, slots=True)
class ORPOConfig:
    """Settings of ORPO."""

    odds_weight: float = bounded(0.1, least=0)
    """Weight of the odds ratio's loss; the paper's lambda."""


@recipe("orpo")
def orpo(flow: Flow, cfg: ORPOConfig) -> None:
    """Raise the likelihood of the chosen response, and its odds over the rejected one's."""
    pairs = flow.targets("chosen").pair(flow.targets("rejected"))
    flow.actor.update(pairs, loss=ORPOLoss(odds_weight=cfg.odds_weight))
