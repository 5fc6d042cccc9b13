"""Losses of Tinker's training API: sums over target tokens, not means.

With p the probability of a target token, q what it was sampled with (`logprobs`), r = p / q and A
the advantage, each is the sum over tokens and data of

| name | per token | inputs |
|---|---|---|
| `cross_entropy` | -w log p | `weights` |
| `importance_sampling` | -r A | `logprobs`, `advantages` |
| `ppo` | -min(r A, clip(r, low, high) A), (0.8, 1.2) | `logprobs`, `advantages` |
| `cispo` | -clip(r, low, high) A log p, (0.0, 4.0), r without gradient | `logprobs`, `advantages` |
| `dro` | -(A log p - beta / 2 (log r)^2) | `logprobs`, `advantages` |
| `gspo` | as `ppo` with one ratio a datum (arXiv 2507.18071) | `logprobs`, `advantages` |

Clip bounds are those of the ratio itself, not distances from 1. The formulas are Tinker's, from its
page on losses; that of `gspo`, which it does not give, is `sequence_losses.GSPOLoss`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from hybridrl.algorithms.losses import Fields, bounded_log_ratio
from hybridrl.algorithms.sequence_losses import sequence_mean
from hybridrl.config.loss import Loss

TARGETS = "target_tokens"
"""The field with the target tokens [tokens, num_candidates], where they are not the next input."""


@dataclass(frozen=True, kw_only=True)
class TinkerLoss(Loss[torch.Tensor]):
    """A loss of target tokens, summed; a subclass gives it for each of them.

    Targets are the next input tokens, or with `num_candidates` those of the field `TARGETS`.
    """

    num_candidates: int = 0
    inputs: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")
    """Float fields, in the shape of the targets."""
    several: ClassVar[bool] = False
    """Whether a position may have several targets."""

    @property
    def candidates(self) -> str | None:  # type: ignore[override]
        return TARGETS if self.num_candidates else None

    @property
    def fields(self) -> tuple[str, ...]:
        """The loss's inputs, and the targets where they are not the next input tokens."""
        return (*self.inputs, TARGETS) if self.num_candidates else self.inputs

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """Loss [tokens] of `log_probs` [tokens], or of those of the targets; no metrics."""
        targets = fields["candidate_log_probs"] if self.num_candidates else log_probs[:, None]
        inputs = {name: fields[name].reshape(targets.shape) for name in self.inputs}
        return self.of_targets(targets, inputs, fields["sequence"]).sum(-1), {}

    def of_targets(
        self, targets: torch.Tensor, inputs: Fields, sequence: torch.Tensor
    ) -> torch.Tensor:
        """Loss [tokens, k] of the targets' log-probabilities and the `inputs` [tokens, k].

        `sequence` [tokens] is the number of each token's datum.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class WeightedCrossEntropy(TinkerLoss):
    """Negative log-likelihood of the targets, times their weights."""

    inputs: ClassVar[tuple[str, ...]] = ("weights",)
    several: ClassVar[bool] = True

    def of_targets(
        self, targets: torch.Tensor, inputs: Fields, sequence: torch.Tensor
    ) -> torch.Tensor:
        """See `TinkerLoss`."""
        return -inputs["weights"] * targets


@dataclass(frozen=True, kw_only=True)
class ImportanceSampling(TinkerLoss):
    """The policy gradient with the ratio as its weight, unbounded."""

    def of_targets(
        self, targets: torch.Tensor, inputs: Fields, sequence: torch.Tensor
    ) -> torch.Tensor:
        """See `TinkerLoss`."""
        return -self.log_ratio(targets, inputs, sequence).exp() * inputs["advantages"]

    def log_ratio(
        self, targets: torch.Tensor, inputs: Fields, sequence: torch.Tensor
    ) -> torch.Tensor:
        """The log-ratio [tokens, k] of what is trained and what has sampled."""
        return bounded_log_ratio(targets - inputs["logprobs"])


@dataclass(frozen=True, kw_only=True)
class ClippedRatio(ImportanceSampling):
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7)."""

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def of_targets(
        self, targets: torch.Tensor, inputs: Fields, sequence: torch.Tensor
    ) -> torch.Tensor:
        """See `TinkerLoss`."""
        ratio, advantages = self.log_ratio(targets, inputs, sequence).exp(), inputs["advantages"]
        clipped = ratio.clamp(self.clip_low_threshold, self.clip_high_threshold)
        return -torch.minimum(ratio * advantages, clipped * advantages)


@dataclass(frozen=True, kw_only=True)
class SequenceRatio(ClippedRatio):
    """GSPO: the clipped surrogate with one ratio a datum, over the tokens that have an advantage.

    The bounds are those of the paper's section 5.1.
    """

    clip_low_threshold: float = 1 - 3e-4
    clip_high_threshold: float = 1 + 4e-4

    def log_ratio(
        self, targets: torch.Tensor, inputs: Fields, sequence: torch.Tensor
    ) -> torch.Tensor:
        """The mean log-ratio of each datum; the gradient is each token's own (section 4.3)."""
        log_ratio, trained = targets - inputs["logprobs"], inputs["advantages"] != 0
        mean = torch.zeros_like(log_ratio)
        mean[trained] = sequence_mean(log_ratio[trained], sequence[:, None][trained])
        return bounded_log_ratio(mean)


@dataclass(frozen=True, kw_only=True)
class BoundedWeight(ImportanceSampling):
    """CISPO: the policy gradient of every token, with a bounded weight (arXiv 2506.13585)."""

    clip_low_threshold: float = 0.0
    clip_high_threshold: float = 4.0

    def of_targets(
        self, targets: torch.Tensor, inputs: Fields, sequence: torch.Tensor
    ) -> torch.Tensor:
        """See `TinkerLoss`."""
        ratio = self.log_ratio(targets.detach(), inputs, sequence).exp()
        weight = ratio.clamp(self.clip_low_threshold, self.clip_high_threshold)
        return -weight * inputs["advantages"] * targets


@dataclass(frozen=True, kw_only=True)
class DirectReward(TinkerLoss):
    """DRO: the policy gradient with a quadratic penalty (arXiv 2405.19107)."""

    beta: float

    def of_targets(
        self, targets: torch.Tensor, inputs: Fields, sequence: torch.Tensor
    ) -> torch.Tensor:
        """See `TinkerLoss`."""
        penalty = 0.5 * self.beta * (targets - inputs["logprobs"]).square()
        return penalty - targets * inputs["advantages"]


LOSSES: dict[str, type[TinkerLoss]] = {
    "cross_entropy": WeightedCrossEntropy,
    "importance_sampling": ImportanceSampling,
    "ppo": ClippedRatio,
    "cispo": BoundedWeight,
    "dro": DirectReward,
    "gspo": SequenceRatio,
}


def tinker_loss(name: str, settings: Mapping[str, float], num_candidates: int) -> TinkerLoss:
    """The loss of a name with its `loss_fn_config`; raises ValueError with one line.

    `num_candidates` are the targets of each position where they are not the next input tokens.
    """
    if name == "stable_reinforce":
        raise ValueError(
            "loss_fn=stable_reinforce needs records that no server but Tinker's makes;"
            " set loss_fn=importance_sampling"
        )
    if name not in LOSSES:
        raise ValueError(f"loss_fn={name}: available are {', '.join(LOSSES)}")
    kind = LOSSES[name]
    known = {field.name for field in fields(kind)} - {"num_candidates"}
    if unknown := sorted(settings.keys() - known):
        available = ", ".join(sorted(known)) or "none"
        raise ValueError(f"loss_fn_config.{unknown[0]}: settings of {name} are {available}")
    if name == "dro" and "beta" not in settings:
        raise ValueError("loss_fn_config.beta: loss_fn=dro needs it")
    if num_candidates > 1 and not kind.several:
        raise ValueError(f"loss_fn={name} has one target a position, not {num_candidates}")
    loss = kind(num_candidates=num_candidates, **settings)
    if isinstance(loss, ClippedRatio | BoundedWeight):
        low, high = loss.clip_low_threshold, loss.clip_high_threshold
        if not 0 <= low <= high:
            told = f"wanted 0 to clip_high_threshold, {high}"
            raise ValueError(f"loss_fn_config.clip_low_threshold={low}: {told}")
    return loss
