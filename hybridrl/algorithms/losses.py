"""Losses per response token, each a `hybridrl.config.loss.Loss`.

Packed tensors [tokens] in, packed tensors out: no padding, no mask. The engine weights the tokens
(`hybridrl.algorithms.normalize`) and averages the metrics. Losses that look at whole sequences are
in `hybridrl.algorithms.sequence_losses`.
"""

import abc
from dataclasses import dataclass

import torch

from hybridrl.algorithms import KL_ESTIMATORS, NORMALIZATIONS, resolve
from hybridrl.algorithms.corrections import Correction, StepScale, step_scale
from hybridrl.algorithms.kl import MAX_LOG_RATIO
from hybridrl.config import ConfigError, bounded
from hybridrl.config.bounds import check_bounds
from hybridrl.config.loss import Loss

Fields = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class CheckedLoss(Loss[torch.Tensor]):
    """A loss whose settings are checked when it is made. Raises ConfigError."""

    def __post_init__(self) -> None:
        check_bounds(self, "recipe")
        resolve(NORMALIZATIONS, "recipe.normalize", self.normalize)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss(CheckedLoss):
    """What policy losses have in common: per token

        w surrogate + kl_coef KL - entropy_coef H

    where a subclass gives the surrogate. KL is to `reference_log_probs` by the estimator `kl`
    (GRPO: arXiv 2402.03300, eq. 3 and 4; see `hybridrl.algorithms.kl` for its gradients). With a
    `correction`, w are the `rollout_weights` which that correction has made of the samples
    (`hybridrl.algorithms.corrections`), else 1. KL and entropy are not weighted, as in verl.

    `step_scale` (`sqrt`, `linear`) makes the learning rate of a step smaller by the effective
    sample size of its responses (VCPO, `hybridrl.algorithms.corrections.step_scale`).

    Metrics per token: the surrogate's, `kl` where there is a reference, and `correction_weight` and
    `correction_cut` (the share truncated or masked) where there is a correction.
    """

    kl_coef: float = 0.0
    kl: str = "k3"
    entropy_coef: float = 0.0
    normalize: str = "token"
    correction: Correction | None = None
    step_scale: StepScale = StepScale.none

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve(KL_ESTIMATORS, "recipe.kl", self.kl)

    @property
    def surrogate_fields(self) -> tuple[str, ...]:
        return ("advantages", "old_log_probs")

    @abc.abstractmethod
    def surrogate(self, log_probs: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, Fields]:
        """Policy term [tokens], to be made small, and its metrics [tokens]."""

    def lr_scale(self, share: float) -> float | None:
        """`step_scale` of `share`; None without one."""
        scales = self.step_scale is not StepScale.none
        return step_scale(share, rule=self.step_scale) if scales else None

    @property
    def fields(self) -> tuple[str, ...]:
        """The surrogate's; `reference_log_probs` for a KL term; `rollout_weights`."""
        reference = ("reference_log_probs",) if self.kl_coef else ()
        weights = ("rollout_weights",) if self.correction else ()
        return (*self.surrogate_fields, *reference, *weights)

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_coef != 0

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """Loss [tokens] and metrics [tokens] of `log_probs` and `entropy` [tokens]."""
        loss, metrics = self.surrogate(log_probs, fields)
        if self.correction:
            weights = fields["rollout_weights"]
            loss = loss * weights
            metrics["correction_weight"] = weights
            metrics["correction_cut"] = self.correction.cut(weights).to(weights.dtype)
        if self.kl_coef:
            kl = resolve(KL_ESTIMATORS, "recipe.kl", self.kl)(
                log_probs, fields["reference_log_probs"]
            )
            loss = loss + self.kl_coef * kl
            metrics["kl"] = kl.detach()
        if self.needs_entropy:
            assert entropy is not None, "needs_entropy asks for it"
            loss = loss - self.entropy_coef * entropy
        return loss, metrics


def check_clips(low: float, high: float) -> None:
    """Raise ConfigError for bounds between which a ratio may not move."""
    if low == high == 0:
        allowed = "above 0, or clip_low above 0: a ratio that may not move teaches nothing"
        raise ConfigError("recipe.clip_high", high, allowed)


@dataclass(frozen=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """The clipped surrogate of PPO (arXiv 1707.06347, eq. 7) with the variants of GRPO.

    With r = exp(log_probs - old_log_probs) and advantage A, per token

        -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    `clip_high` above `clip_low` is DAPO's clip-higher (arXiv 2503.14476, section 3.1). `dual_clip`
    c > 1 bounds it by -c A where A < 0 (arXiv 1912.09729, section 5.3), so that a token whose ratio
    exploded does not.

    Where `old_log_probs` are not of the policy that sampled, a truncating `correction` leads there.
    That is the decoupled objective, with the old policy as the proximal one (PPO-EWMA, arXiv
    2110.00641; AReaL, arXiv 2505.24298, equation 5).

    Metrics per token: `clip_fraction_low`, `clip_fraction_high`, `clip_fraction_dual`,
    `approx_kl` (k3 of old and new policy), `ratio`, and those of `PolicyLoss`.
    """

    clip_low: float = bounded(0.2, least=0, most=1)
    clip_high: float = bounded(0.2, least=0)
    dual_clip: float | None = bounded(None, above=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clips(self.clip_low, self.clip_high)

    def surrogate(self, log_probs: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, Fields]:
        """Clipped surrogate [tokens] against `old_log_probs`."""
        log_ratio = bounded_log_ratio(log_probs - fields["old_log_probs"])
        return self.clipped(log_ratio, log_ratio, fields["advantages"])

    def clipped(
        self, log_ratio: torch.Tensor, token_log_ratio: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, Fields]:
        """Clipped surrogate [tokens] of r = exp(log_ratio); `approx_kl` is of the tokens' own."""
        ratio = log_ratio.exp()
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = torch.maximum(unclipped, clipped)
        at_bound = clipped > unclipped
        negative = advantages < 0
        dual = torch.zeros_like(negative)
        if self.dual_clip is not None:
            bound = -advantages * self.dual_clip
            dual = negative & (loss > bound)
            loss = torch.where(dual, bound, loss)
        flags = {"low": at_bound & negative, "high": at_bound & ~negative, "dual": dual}
        metrics = {f"clip_fraction_{name}": flag.to(ratio.dtype) for name, flag in flags.items()}
        return loss, metrics | ratio_metrics(ratio, token_log_ratio)


@dataclass(frozen=True, kw_only=True)
class CISPOLoss(PolicyLoss):
    """CISPO: the policy gradient of every token, with a bounded importance weight.

    With r = exp(log_probs - old_log_probs), and no gradient through the weight, per token

        -clip(r, 1 - clip_low, 1 + clip_high) A log p

    (MiniMax-M1, arXiv 2506.13585, equations 4 and 5). Where PPO's clipping drops a token's
    gradient, this bounds it. `clip_low` 1 is no lower bound, as in the paper. The paper gives no
    number for `clip_high`; 5 is from ScaleRL (arXiv 2510.13786).

    Metrics per token: `clip_fraction_low`, `clip_fraction_high` (of the weights), `ratio`,
    `approx_kl`, and those of `PolicyLoss`.
    """

    clip_low: float = bounded(1.0, least=0, most=1)
    clip_high: float = bounded(4.0, least=0)

    def surrogate(self, log_probs: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, Fields]:
        """Weighted policy gradient's loss [tokens]."""
        log_ratio = bounded_log_ratio(log_probs.detach() - fields["old_log_probs"])
        ratio = log_ratio.exp()
        low, high = 1 - self.clip_low, 1 + self.clip_high
        metrics = {
            "clip_fraction_low": (ratio < low).to(ratio.dtype),
            "clip_fraction_high": (ratio > high).to(ratio.dtype),
        }
        loss = -ratio.clamp(low, high) * fields["advantages"] * log_probs
        return loss, metrics | ratio_metrics(ratio, log_ratio)


@dataclass(frozen=True, kw_only=True)
class SAPOLoss(PolicyLoss):
    """SAPO: a gate that closes softly, where others clip (Gao et al., arXiv 2511.20347).

    With r = exp(log_probs - old_log_probs), advantage A, and tau = tau_pos where A > 0, else
    tau_neg, per token

        -(4 / tau) sigmoid(tau (r - 1)) A

    The gradient is that of r A, times 4 s (1 - s) for the sigmoid s. That is 1 at r = 1, less with
    the distance from there, never 0. A larger tau closes sooner; that of bad responses is the
    larger one, since what they push up are the vocabulary's other tokens.

    Metrics per token: `gate`, 4 s (1 - s), and those of `PolicyLoss`, `ratio`, `approx_kl`.
    """

    tau_pos: float = bounded(1.0, above=0)
    tau_neg: float = bounded(1.05, above=0)
    normalize: str = "sequence"

    def surrogate(self, log_probs: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, Fields]:
        """Gated policy gradient's loss [tokens]."""
        log_ratio = bounded_log_ratio(log_probs - fields["old_log_probs"])
        ratio, advantages = log_ratio.exp(), fields["advantages"]
        taus = ratio.new_tensor([self.tau_neg, self.tau_pos])
        tau = taus[(advantages > 0).long()]
        soft = (tau * (ratio - 1)).sigmoid()
        gate = (4 * soft * (1 - soft)).detach()
        loss = -4 / tau * soft * advantages
        return loss, {"gate": gate} | ratio_metrics(ratio, log_ratio)


@dataclass(frozen=True, kw_only=True)
class ReinforceLoss(PolicyLoss):
    """The policy gradient itself: -A log p per token (Williams 1992).

    For samples of the policy that is trained: one optimizer step an update, or a `correction`.
    """

    @property
    def on_policy(self) -> bool:
        """Whether it is right only for samples of the very policy that is trained."""
        return self.correction is None

    @property
    def surrogate_fields(self) -> tuple[str, ...]:
        return ("advantages",)

    def surrogate(self, log_probs: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, Fields]:
        """-A log p [tokens]."""
        return -fields["advantages"] * log_probs, {}


def bounded_log_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Log-ratios within `MAX_LOG_RATIO`; past it, no gradient."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def ratio_metrics(ratio: torch.Tensor, log_ratio: torch.Tensor) -> Fields:
    """`approx_kl`, k3 of old and new policy, and `ratio`, [tokens] each."""
    with torch.no_grad():
        return {"approx_kl": torch.expm1(log_ratio) - log_ratio, "ratio": ratio.detach()}


@dataclass(frozen=True, kw_only=True)
class CrossEntropyLoss(CheckedLoss):
    """Negative log-likelihood of the target tokens: supervised fine-tuning."""

    normalize: str = "token"

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """Loss [tokens] of `log_probs` [tokens]; no metrics."""
        return -log_probs, {}
