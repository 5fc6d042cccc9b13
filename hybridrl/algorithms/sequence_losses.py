"""Losses that look at whole sequences, or at pairs of them.

Each is a `hybridrl.config.loss.Loss`: the field `sequence` [tokens], which the engine adds, is the
index of every token's sequence. Each token of a sequence has the sequence's loss, so
the normalization `sequence` counts every sequence once, whatever the split into ranks and
micro-batches. Of a pair (`samples_per_row` is 2) sequence 2i is the chosen one and 2i + 1 the
rejected one, as `Stream.pair` orders them.
"""

from dataclasses import dataclass
from enum import Enum

import torch
from torch.nn.functional import logsigmoid

from hybridrl.algorithms.losses import (
    CheckedLoss,
    ClippedLoss,
    Fields,
    PolicyLoss,
    bounded_log_ratio,
    check_clips,
    ratio_metrics,
)
from hybridrl.config import ConfigError, bounded


class DPOVariant(Enum):
    """The loss of the difference of the two implicit rewards."""

    sigmoid = "sigmoid"  # DPO: the logistic loss
    ipo = "ipo"  # squared, towards 1 / (2 beta) (arXiv 2310.12036)


@dataclass(frozen=True, kw_only=True)
class GSPOLoss(ClippedLoss):
    """GSPO: the clipped surrogate with one ratio a sequence (Zheng et al., arXiv 2507.18071).

    With s = exp(mean over the sequence's tokens of log_probs - old_log_probs), per token

        -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    (section 4.1, equations 5 and 7; the bounds are those of section 5.1). Advantages may differ
    between the tokens of a sequence. The gradient of s is then each token's own, s grad log p
    (GSPO-token, section 4.3). Where they do not differ it is the same.

    Metrics: those of `ClippedLoss`; `ratio` is s, `approx_kl` of the tokens' own ratios.
    """

    clip_low: float = bounded(3e-4, least=0, most=1)
    clip_high: float = bounded(4e-4, least=0)
    normalize: str = "sequence"

    def surrogate(self, log_probs: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, Fields]:
        """Clipped surrogate [tokens] of the sequences' ratios."""
        token_log_ratio = log_probs - fields["old_log_probs"]
        log_ratio = bounded_log_ratio(sequence_mean(token_log_ratio, fields["sequence"]))
        return self.clipped(log_ratio, bounded_log_ratio(token_log_ratio), fields["advantages"])


@dataclass(frozen=True, kw_only=True)
class GMPOLoss(PolicyLoss):
    """GMPO: the geometric mean of a response's clipped ratios (Zhao et al., arXiv 2507.20673).

    With x the tokens' log_probs - old_log_probs, clipped one by one and on one side only,

        c = min(x, clip_high) where A > 0, else max(x, -clip_low)

    a response's loss is -exp(mean of c) A. The bounds are those of log-ratios: 0.4 allows ratios of
    e^-0.4 to e^0.4. Unlike GSPO's, a token that is clipped leaves the others their gradient.
    Advantages may differ between the tokens, as in `GSPOLoss`; then each has its own gradient.

    Metrics per token: `clip_fraction_low`, `clip_fraction_high`, `ratio`, which is exp(mean of c),
    `approx_kl` of the tokens' own ratios, and those of `PolicyLoss`.
    """

    clip_low: float = bounded(0.4, least=0)
    clip_high: float = bounded(0.4, least=0)
    normalize: str = "sequence"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self.clip_low, self.clip_high)

    def surrogate(self, log_probs: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, Fields]:
        """Surrogate [tokens] of the responses' mean clipped log-ratios."""
        advantages = fields["advantages"]
        log_ratio = bounded_log_ratio(log_probs - fields["old_log_probs"])
        positive = advantages > 0
        low = (log_ratio < -self.clip_low) & (advantages < 0)
        high = (log_ratio > self.clip_high) & positive
        clipped = torch.where(
            positive, log_ratio.clamp(max=self.clip_high), log_ratio.clamp(min=-self.clip_low)
        )
        ratio = sequence_mean(clipped, fields["sequence"]).exp()
        flags = {"clip_fraction_low": low, "clip_fraction_high": high}
        metrics = {name: flag.to(ratio.dtype) for name, flag in flags.items()}
        return -ratio * advantages, metrics | ratio_metrics(ratio, log_ratio)


@dataclass(frozen=True, kw_only=True)
class PairLoss(CheckedLoss):
    """A loss of pairs: the settings that all of them have."""

    normalize = "sequence"
    samples_per_row = 2


@dataclass(frozen=True, kw_only=True)
class DPOLoss(PairLoss):
    """Direct preference optimization of pairs (Rafailov et al., arXiv 2305.18290, equation 7).

    With h = log p - log p_reference of a whole response and m = beta (h_chosen - h_rejected), a
    pair's loss is

        sigmoid   -(1 - label_smoothing) log sigmoid(m) - label_smoothing log sigmoid(-m)
        ipo       (h_chosen / tokens - h_rejected / tokens - 1 / (2 beta))^2

    `label_smoothing` is the share of labels that are thought to be wrong (Mitchell, "A note on DPO
    with noisy preferences & relationship to IPO", 2023). IPO is from arXiv 2310.12036, equation 17;
    h per token is not in the paper; its authors did so, says TRL.

    A pair of which one side has no trained token counts as a whole. Metrics: `accuracy`, the share
    of pairs with m > 0; `reward_margin`, m; `chosen_reward` and `rejected_reward`, beta h.
    """

    beta: float = bounded(0.1, above=0)
    variant: DPOVariant = DPOVariant.sigmoid
    label_smoothing: float = 0.0

    fields = ("reference_log_probs",)

    def __post_init__(self) -> None:
        super().__post_init__()
        smooths = self.variant is DPOVariant.sigmoid
        allowed = "0 to 0.5" if smooths else "0: it is for variant=sigmoid"
        if not 0 <= self.label_smoothing <= (0.5 if smooths else 0):
            raise ConfigError("recipe.label_smoothing", self.label_smoothing, allowed)

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """The pair's loss and metrics at every token [tokens]."""
        sequence = fields["sequence"]
        log_ratios = per_pair(log_probs - fields["reference_log_probs"], sequence)
        counts = per_pair(torch.ones_like(log_probs), sequence)
        rewards = self.beta * log_ratios
        if self.variant is DPOVariant.ipo:
            chosen, rejected = (log_ratios / counts.clamp(min=1)).unbind(1)
            loss = (chosen - rejected - 1 / (2 * self.beta)).square()
        else:
            margin = rewards[:, 0] - rewards[:, 1]
            smoothing = self.label_smoothing
            loss = -(1 - smoothing) * logsigmoid(margin) - smoothing * logsigmoid(-margin)
        return at_tokens(loss, counts, sequence), reward_metrics(rewards, sequence)


@dataclass(frozen=True, kw_only=True)
class BradleyTerryLoss(PairLoss):
    """A reward model's loss on pairs: -log sigmoid(r_chosen - r_rejected).

    Bradley and Terry 1952; InstructGPT, arXiv 2203.02155, equation 1. `center` c adds
    c (r_chosen + r_rejected)^2, which keeps rewards about 0 (Eisenstein et al., arXiv 2312.09244,
    equation 2). `signed` adds -log sigmoid(s r) of each side, with the scalar field `sign`: s = 1
    for a harmful response, -1 for a safe one. That is the loss of Safe-RLHF's cost model (arXiv
    2310.12773): there the more costly response is the chosen one, and costs below 0 are allowed.

    Its first argument are values (`TrainEngine(gives_values=True)`), one a sequence.
    `needs_last_token_only` has the engine read the value head at the sequence's last token, as of a
    reward model.

    Metrics: as `DPOLoss`, of the rewards r; with `signed` `sign_accuracy`, the share of responses
    whose r has their sign.
    """

    center: float = bounded(0.0, least=0)
    signed: bool = False

    needs_last_token_only = True

    @property
    def fields(self) -> tuple[str, ...]:
        return ("sign",) * self.signed

    def __call__(
        self, values: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """The pair's loss and metrics, of `values` and at each sequence's end [sequences]."""
        sequence = fields["sequence"]
        rewards = per_pair(values, sequence)
        difference = rewards[:, 0] - rewards[:, 1]
        loss = -logsigmoid(difference) + self.center * rewards.sum(1).square()
        metrics = reward_metrics(rewards, sequence)
        if self.signed:
            signed = per_pair(fields["sign"], sequence) * rewards
            loss = loss - logsigmoid(signed).sum(1)
            right = (signed.detach() > 0).to(signed.dtype).mean(1)
            metrics["sign_accuracy"] = right[sequence // 2]
        return loss[sequence // 2], metrics


def per_sequence(x: torch.Tensor, sequence: torch.Tensor, samples_per_row: int = 1) -> torch.Tensor:
    """Sums [sequences] of `x` [tokens] over each sequence's tokens, by `sequence` [tokens].

    Up to the last one that has a token, rounded up to a multiple of `samples_per_row`; one without
    tokens has 0.
    """
    number = int(sequence.max()) + 1 if len(sequence) else 0
    sums = x.new_zeros(-(-number // samples_per_row) * samples_per_row)
    return sums.index_add(0, sequence, x)


def per_pair(x: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """Sums [pairs, 2] of `x` [tokens]: of the chosen, and of the rejected sequence."""
    return per_sequence(x, sequence, samples_per_row=2).view(-1, 2)


def sequence_mean(x: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """The mean of `x` [tokens] over each token's sequence, with the gradient of each x whole.

    With one weight for all tokens of a sequence, the sum has the gradient of the mean.
    """
    counts = per_sequence(torch.ones_like(x), sequence)
    means = (per_sequence(x.detach(), sequence) / counts)[sequence]
    return means + (x - x.detach())


def at_tokens(loss: torch.Tensor, counts: torch.Tensor, sequence: torch.Tensor) -> torch.Tensor:
    """`loss` [pairs] at every token [tokens]; `counts` [pairs, 2] are the sides' tokens.

    Each side's tokens have half of the pair's weight, but all of it where the other has none.
    """
    return (loss * 2 / (counts > 0).sum(1).clamp(min=1))[sequence // 2]


def reward_metrics(rewards: torch.Tensor, sequence: torch.Tensor) -> Fields:
    """Metrics of both pair losses from `rewards` [pairs, 2], at every token [tokens]."""
    chosen, rejected = rewards.detach().unbind(1)
    margin = chosen - rejected
    by_pair = {
        "accuracy": (margin > 0).to(margin.dtype),
        "reward_margin": margin,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    return {name: value[sequence // 2] for name, value in by_pair.items()}
