"""The mismatch between rollout and trainer log-probabilities, and weights that correct it.

The rollout engine samples from pi_rollout, the trainer computes pi_trainer of the same weights;
kernels, formats and batch shapes make the two differ. Below, w = pi_trainer / pi_rollout of a
sampled token, W the product of w over a response.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from hybridrl.algorithms.kl import MAX_LOG_RATIO, k3
from hybridrl.config import ConfigError


class CorrectionRule(Enum):
    """The bound on importance weights far from 1."""

    none = "none"  # no weights: the engines' mismatch is not corrected
    truncate = "truncate"  # at most the bound
    mask = "mask"  # 0 beyond the bound, and below its inverse


class CorrectionLevel(Enum):
    """The unit of an importance weight."""

    token = "token"
    sequence = "sequence"  # the product over the response


class StepScale(Enum):
    """The effect of the effective sample size on the learning rate."""

    none = "none"
    sqrt = "sqrt"  # the root of the effective share, for optimizers like Adam
    linear = "linear"  # the effective share


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weights of tokens that another engine sampled; they carry no gradient.

    `rule` bounds a weight far from 1: `truncate` takes min(w, bound) (Yao et al., "Your efficient
    RL framework secretly brings you off-policy RL training", 2025), `mask` takes w where
    1 / bound <= w <= bound and 0 elsewhere (IcePop, Ling team, 2025; Liu et al., "When speed kills
    stability", 2025). `level` is the unit of a weight: a `token`, or a `sequence`, whose tokens all
    have W. Exponents are clamped to `kl.MAX_LOG_RATIO`, as in verl. Raises ConfigError for an
    impossible setting.

    Example: for w of 0.4, 1.5 and 3 and the bound 2, `truncate` gives 0.4, 1.5 and 2, `mask` gives
    0, 1.5 and 0. Per sequence W is 1.8, and all three tokens weigh 1.8.
    """

    rule: CorrectionRule = CorrectionRule.truncate
    level: CorrectionLevel = CorrectionLevel.token
    bound: float = 2.0

    def __post_init__(self) -> None:
        assert self.rule is not CorrectionRule.none, "without a rule there is no correction"
        if not 1 < self.bound < float("inf"):
            raise ConfigError("recipe.correction.bound", self.bound, "a number above 1")

    def __call__(
        self, trainer_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor
    ) -> torch.Tensor:
        """Weights [response_tokens] of one response from its log-probabilities, float32."""
        log_w = trainer_log_probs.detach().double() - rollout_log_probs.detach().double()
        if self.level is CorrectionLevel.sequence:
            log_w = log_w.sum().expand(log_w.shape)
        w = log_w.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if self.rule is CorrectionRule.truncate:
            return w.clamp(max=self.bound).float()
        kept = (w >= 1 / self.bound) & (w <= self.bound)
        return torch.where(kept, w, 0.0).float()

    def cut(self, weights: torch.Tensor) -> torch.Tensor:
        """Whether each of its weights is truncated or masked, of the same shape, bool."""
        # No other weight has this value: the clamp keeps unmasked ones above 0.
        return weights == (0.0 if self.rule is CorrectionRule.mask else self.bound)


def compare(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, counts: Sequence[int]
) -> torch.Tensor:
    """Partial figures [9], float64, of packed responses; `combine` joins them, `describe` reads.

    `log_probs` and `rollout_log_probs` are [tokens]; tokens with NaN in the latter are excluded.
    `counts` are the tokens of each response. The figures are four sums (tokens, |log w|, k3,
    responses), four logarithms of sums (w, w^2, W, W^2) and a maximum (|log w|).
    """
    known = ~rollout_log_probs.isnan()
    trainer = log_probs.detach().double().where(known, 0.0)
    rollout = rollout_log_probs.double().where(known, 0.0)
    log_w = trainer - rollout
    # By response. An empty response comes first, so that the list is never empty.
    responses = [log_w.new_zeros(0), *log_w.split(list(counts))]
    has_tokens = torch.stack(
        [response.any() for response in (known[:0], *known.split(list(counts)))]
    )
    log_products = torch.stack([response.sum() for response in responses]).where(
        has_tokens, -torch.inf
    )
    # By token, and all figures. Logarithms of sums: a product of ratios overflows float64.
    log_w_known = log_w.where(known, -torch.inf)
    return torch.stack(
        [
            known.sum().double(),
            log_w.abs().sum(),
            k3(rollout, trainer).sum(),
            has_tokens.sum().double(),
            log_w_known.logsumexp(0),
            (2 * log_w_known).logsumexp(0),
            log_products.logsumexp(0),
            (2 * log_products).logsumexp(0),
            torch.cat([log_w.new_zeros(1), log_w.abs()]).max(),
        ]
    )


def combine(parts: torch.Tensor) -> torch.Tensor:
    """Joined figures [9] of several partial ones, `parts` [parts, 9].

    Repeating every part equally often does not change `describe`, which returns ratios.
    """
    return torch.cat([parts[:, :4].sum(0), parts[:, 4:8].logsumexp(0), parts[:, 8:].amax(0)])


def describe(figures: torch.Tensor, prefix: str) -> dict[str, float]:
    """The metrics of joined figures [9], none if no token was compared.

    - `<prefix>/mean`, `<prefix>/max`: of |log pi_trainer - log pi_rollout| per token, nats;
    - `<prefix>/kl`: KL(rollout || trainer) per token by k3, the mean of w - 1 - log w: never
      negative, unbiased for tokens that the rollout engine sampled;
    - `<prefix>/ess_token`, `<prefix>/ess_sequence`: effective sample size of the weights w, and of
      W, as a share. It is (sum w)^2 / (n sum w^2): 1 where all are alike, 1 / n where one has all.
    """
    tokens, total, kl, responses, w, w2, product, product2, largest = figures.tolist()
    if not tokens:
        return {}
    metrics = {
        "mean": total / tokens,
        "max": largest,
        "kl": kl / tokens,
        "ess_token": math.exp(2 * w - w2) / tokens,
        "ess_sequence": math.exp(2 * product - product2) / responses,
    }
    return {f"{prefix}/{name}": value for name, value in metrics.items()}


def response_ratio(trainer_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> float:
    """W of one response, from its log-probabilities [response_tokens]; its logarithm is clamped.

    For `Stream.map`; with it and the response's length, `advantages.minimum_variance` is VCPO's.
    """
    log_w = trainer_log_probs.detach().double() - rollout_log_probs.detach().double()
    return math.exp(log_w.sum().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).item())


def step_scale(ess: float, *, reference: float = 1.0, rule: StepScale = StepScale.sqrt) -> float:
    """The learning rate's factor for stale samples by their effective sample size: 0 to 1.

    min(1, ess / reference) to the power of a half with `sqrt`, for optimizers like Adam, or of one
    with `linear` (VCPO: "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", arXiv
    2602.17616, step scaling by effective sample size). `ess` is the share `ess_sequence` of
    `describe`, of weights that nothing cut. `reference` is what it is on policy: 1, or less where
    the engines differ. Raises ConfigError for a setting that cannot work.
    """
    if not 0 < reference <= 1:
        raise ConfigError("recipe.step_scale_reference", reference, "above 0, up to 1")
    power = {StepScale.none: 0.0, StepScale.sqrt: 0.5, StepScale.linear: 1.0}[rule]
    return float(min(1.0, max(ess, 0.0) / reference) ** power)
