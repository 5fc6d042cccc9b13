"""Supervised fine-tuning: maximum likelihood of the dataset's answers."""

from dataclasses import dataclass

from hybridrl.algorithms import losses
from hybridrl.flow import Flow, recipe


@dataclass(kw_only=True, slots=True)
class SFTConfig:
    """Settings of supervised fine-tuning."""

    normalize: str = "token"
    """Mean over all answer tokens (token), or over answers of their mean (sequence)."""


@recipe("sft")
def sft(flow: Flow, cfg: SFTConfig) -> None:
    """Raise the likelihood of the answers."""
    flow.actor.update(flow.answers, loss=losses.CrossEntropyLoss(normalize=cfg.normalize))
