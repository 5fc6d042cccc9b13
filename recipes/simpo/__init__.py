"""SimPO: preferences without a reference model (Meng et al., arXiv 2405.14734)."""

from dataclasses import dataclass

from hybridrl.algorithms.preference_losses import SimPOLoss
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe


@dataclass(kw_only=True, slots=True)
class SimPOConfig:
    """Settings of SimPO."""

    beta: float = bounded(2.0, above=0)
    """Scale of the reward, beta times the mean log-probability of a response's tokens."""
    gamma: float = bounded(1.0, least=0)
    """The margin by which the chosen response's reward is to be larger."""


@recipe("simpo")
def simpo(flow: Flow, cfg: SimPOConfig) -> None:
    """Make the chosen response's tokens likelier than those of the rejected one, by a margin."""
    pairs = flow.targets("chosen").pair(flow.targets("rejected"))
    flow.actor.update(pairs, loss=SimPOLoss(beta=cfg.beta, gamma=cfg.gamma))
