"""Preferences without a reference model (SimPO, ORPO), and of responses apart (KTO).

As in `hybridrl.algorithms.sequence_losses`, each token has the loss of its sequence or pair. The
normalization `sequence` makes that a mean over all of the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from hybridrl.algorithms.losses import CheckedLoss, Fields
from hybridrl.algorithms.sequence_losses import (
    PairLoss,
    at_tokens,
    per_pair,
    per_sequence,
    reward_metrics,
)
from hybridrl.config import ConfigError, bounded

SURE = -1e-6
"""The largest mean log-probability in ORPO's odds, which are infinite at 0."""


@dataclass(frozen=True, kw_only=True)
class SimPOLoss(PairLoss):
    """SimPO: the reward is what the policy samples by (Meng et al., arXiv 2405.14734, equation 6).

    With h the mean of a response's log p, a pair's loss is

        -log sigmoid(beta h_chosen - beta h_rejected - gamma)

    where `gamma` is the margin that is wanted. A side without a trained token has h = 0. Metrics:
    as `DPOLoss`, of the rewards beta h.
    """

    beta: float = bounded(2.0, above=0)
    gamma: float = bounded(1.0, least=0)

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """The pair's loss and metrics at every token [tokens]."""
        sequence = fields["sequence"]
        means, counts = _pair_means(log_probs, sequence)
        rewards = self.beta * means
        loss = -logsigmoid(rewards[:, 0] - rewards[:, 1] - self.gamma)
        return at_tokens(loss, counts, sequence), reward_metrics(rewards, sequence)


@dataclass(frozen=True, kw_only=True)
class ORPOLoss(PairLoss):
    """ORPO: fine-tuning on the chosen response, and the odds ratio (Hong et al., arXiv 2403.07691).

    With h the mean of a response's log p, and its odds p / (1 - p) for p = exp(h), a pair's loss is

        -h_chosen - odds_weight log sigmoid(log(odds_chosen / odds_rejected))

    (equations 3, 6 and 7). In the odds h is at most -1e-6; a pair of which one side has no trained
    token has none. Metrics: as `DPOLoss`, of the rewards odds_weight h as in TRL; `nll`, the first
    term; `log_odds_ratio`.
    """

    odds_weight: float = bounded(0.1, least=0)

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """The pair's loss and metrics at every token [tokens]."""
        sequence = fields["sequence"]
        means, counts = _pair_means(log_probs, sequence)
        bounded = means.clamp(max=SURE)
        log_odds = bounded - torch.log(-torch.expm1(bounded))
        ratio, both = log_odds[:, 0] - log_odds[:, 1], (counts > 0).all(1)
        loss = -means[:, 0] - self.odds_weight * logsigmoid(ratio) * both
        metrics = reward_metrics(self.odds_weight * means, sequence)
        of_pairs = {"nll": -means[:, 0].detach(), "log_odds_ratio": ratio.detach()}
        metrics |= {name: value[sequence // 2] for name, value in of_pairs.items()}
        return at_tokens(loss, counts, sequence), metrics


@dataclass(frozen=True, kw_only=True)
class KTOLoss(CheckedLoss):
    """KTO: responses that are wanted or not, without pairs (Ethayarajh et al., arXiv 2402.01306).

    With h = log p - log p_reference of a whole response, z the scalar field `kl` and s the scalar
    field `sign` (1: desirable, -1: undesirable), a response's loss is

        weight (1 - sigmoid(beta s (h - z)))

    (equations 7 and 8) with `desirable_weight` or `undesirable_weight`. z is the batch's
    `reference_point`, without a gradient. Metrics: `accuracy`, the share of responses on their side
    of z; `reward_margin`, beta s (h - z); `kl`, z.
    """

    beta: float = bounded(0.1, above=0)
    desirable_weight: float = bounded(1.0, least=0)
    undesirable_weight: float = bounded(1.0, least=0)

    normalize = "sequence"
    fields = ("reference_log_probs", "sign", "kl")

    def __post_init__(self) -> None:
        CheckedLoss.__post_init__(self)
        if self.desirable_weight == self.undesirable_weight == 0:
            allowed = "above 0, or undesirable_weight above 0: responses of weight 0 teach nothing"
            raise ConfigError("recipe.desirable_weight", self.desirable_weight, allowed)

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """The response's loss and metrics at every token [tokens]."""
        sequence, sign = fields["sequence"], fields["sign"]
        log_ratios = per_sequence(log_probs - fields["reference_log_probs"], sequence)
        margin = self.beta * sign * (log_ratios[sequence] - fields["kl"])
        weights = margin.new_tensor([self.undesirable_weight, self.desirable_weight])
        loss = weights[(sign > 0).long()] * (-margin).sigmoid()
        metrics = {
            "accuracy": (margin.detach() > 0).to(margin.dtype),
            "reward_margin": margin.detach(),
            "kl": fields["kl"],
        }
        return loss, metrics


def reference_point(log_ratios: Sequence[float]) -> list[float]:
    """KTO's z for each sample: the mean of h of responses to other prompts, at least 0.

    It estimates the KL of policy and reference (arXiv 2402.01306, section 4.1). `log_ratios`
    [samples] are h of the batch's responses, each after the prompt of another.
    """
    mean = math.fsum(log_ratios) / max(len(log_ratios), 1)
    return [max(mean, 0.0)] * len(log_ratios)


def log_ratio(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> float:
    """h of one response: log p - log p_reference, summed over its tokens, in float64."""
    return (log_probs.double() - reference_log_probs.double()).sum().item()


def desirability(side: str) -> float:
    """`sign` of a sample of a pair: 1 for the chosen one, -1 for the rejected one."""
    return 1.0 if side == "chosen" else -1.0


def reward_sign(reward: float) -> float:
    """`sign` of a response by itself: 1 where its reward is above 0, else -1."""
    return 1.0 if reward > 0 else -1.0


def _pair_means(
    log_probs: torch.Tensor, sequence: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Means of log p, and numbers of tokens, of chosen and rejected responses, [pairs, 2]."""
    counts = per_pair(torch.ones_like(log_probs), sequence)
    return per_pair(log_probs, sequence) / counts.clamp(min=1), counts
