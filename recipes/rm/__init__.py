"""A reward model from preferences (arXiv 1706.03741; InstructGPT, arXiv 2203.02155)."""

from dataclasses import dataclass

from hybridrl.algorithms.sequence_losses import BradleyTerryLoss
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe


@dataclass(kw_only=True, slots=True)
class RMConfig:
    """Settings of reward modeling; the model and its optimizer are `roles.reward.*`."""

    center: float = bounded(0.0, least=0)
    """Weight of the square of a pair's sum of rewards, which keeps rewards about 0."""


@recipe("rm")
def rm(flow: Flow, cfg: RMConfig) -> None:
    """Score the chosen response above the rejected one."""
    pairs = flow.targets("chosen").pair(flow.targets("rejected"))
    flow.reward.update(pairs, loss=BradleyTerryLoss(center=cfg.center))
