"""DPO: a policy from preferences, without a reward model (Rafailov et al., arXiv 2305.18290)."""

from dataclasses import dataclass

from hybridrl.algorithms.sequence_losses import DPOLoss, DPOVariant
from hybridrl.config import bounded
from hybridrl.flow import Flow, recipe
from hybridrl.recipes.reference import add_reference


@dataclass(kw_only=True, slots=True)
class DPOConfig:
    """Settings of DPO."""

    beta: float = bounded(0.1, above=0)
    """Scale of the implicit reward, beta log(p / p_reference): larger stays nearer."""
    variant: DPOVariant = DPOVariant.sigmoid
    """sigmoid or ipo."""
    label_smoothing: float = bounded(0.0, least=0, below=0.5)
    """How often a preference is taken to be the wrong way round."""
    reference_ema_decay: float | None = bounded(None, above=0, below=1)
    """Decay of an averaged reference at an optimizer step; null: the policy at start."""


@recipe("dpo")
def dpo(flow: Flow, cfg: DPOConfig) -> None:
    """Raise the likelihood of the chosen response over that of the rejected one."""
    pairs = flow.targets("chosen").pair(flow.targets("rejected"))
    pairs = add_reference(flow, pairs, cfg.reference_ema_decay)
    loss = DPOLoss(beta=cfg.beta, variant=cfg.variant, label_smoothing=cfg.label_smoothing)
    flow.actor.update(pairs, loss=loss)
