"""Clip-Cov and KL-Cov: smaller steps on the few tokens that let a policy's entropy fall.

Cui et al., "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv
2505.22617. A step lowers the entropy by the covariance of log-probability and advantage; a token's
share of it is

    cov = (log p - mean log p) (A - mean A)

with means over all tokens of the batch. Clip-Cov leaves some tokens of large shares out of the
step, KL-Cov holds the largest to the old policy. The choice is over the whole batch, by the
log-probabilities before the update: tensors stay on their ranks, and scalars go to the driver
(`recipes/covariance.py`). So no split into ranks or micro-batches changes it.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from hybridrl.algorithms.losses import (
    ClippedLoss,
    Fields,
    PolicyLoss,
    bounded_log_ratio,
    ratio_metrics,
)
from hybridrl.config import bounded


@dataclass(frozen=True, kw_only=True)
class ClipCovLoss(ClippedLoss):
    """Clip-Cov: the clipped surrogate of the tokens whose field `cov_kept` is 1; others have none.

    Left out they count in the normalization still. Metrics: those of `ClippedLoss`, and
    `clip_fraction_cov`, the share of tokens left out.
    """

    @property
    def surrogate_fields(self) -> tuple[str, ...]:
        return (*super().surrogate_fields, "cov_kept")

    def surrogate(self, log_probs: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, Fields]:
        """Clipped surrogate [tokens] of the kept tokens, else 0."""
        loss, metrics = super().surrogate(log_probs, fields)
        kept = fields["cov_kept"]
        return loss * kept, metrics | {"clip_fraction_cov": 1 - kept}


@dataclass(frozen=True, kw_only=True)
class KLCovLoss(PolicyLoss):
    """KL-Cov: no clipping, but a penalty on the tokens whose field `cov_held` is 1.

    With r = exp(log_probs - old_log_probs) and advantage A, per token

        -r A + cov_kl_coef cov_held |log r|

    The absolute log-ratio is the authors' and verl's estimate of the KL to the old policy.
    Metrics per token: `held_fraction`, and those of `PolicyLoss`, `ratio`, `approx_kl`.
    """

    cov_kl_coef: float = bounded(1.0, least=0)

    @property
    def surrogate_fields(self) -> tuple[str, ...]:
        return (*super().surrogate_fields, "cov_held")

    def surrogate(self, log_probs: torch.Tensor, fields: Fields) -> tuple[torch.Tensor, Fields]:
        """Policy gradient's loss [tokens], and the penalty where tokens are held."""
        log_ratio = bounded_log_ratio(log_probs - fields["old_log_probs"])
        ratio, held = log_ratio.exp(), fields["cov_held"]
        loss = -fields["advantages"] * ratio + self.cov_kl_coef * held * log_ratio.abs()
        return loss, {"held_fraction": held} | ratio_metrics(ratio, log_ratio)


def log_prob_sum(log_probs: torch.Tensor) -> tuple[int, float]:
    """A response's tokens, and the sum of their log-probabilities [tokens]."""
    return len(log_probs), log_probs.double().sum().item()


def token_means(
    lengths: Sequence[int], sums: Sequence[float], advantages: Sequence[float]
) -> tuple[list[float], list[float], list[int]]:
    """Means over the batch's tokens of log-probability and advantage, and their number.

    `lengths`, `sums` (of log-probabilities) and `advantages` [samples]; each sample gets the same.
    """
    total, size = sum(lengths), len(lengths)
    weighted = math.fsum(a * n for a, n in zip(advantages, lengths, strict=True))
    means = math.fsum(sums) / max(total, 1), weighted / max(total, 1)
    return [means[0]] * size, [means[1]] * size, [total] * size


def covariances(
    log_probs: torch.Tensor, advantage: float, mean_log_prob: float, mean_advantage: float
) -> torch.Tensor:
    """Each token's share of the covariance [tokens], float64."""
    return (log_probs.double() - mean_log_prob) * (advantage - mean_advantage)


def num_between(covariance: torch.Tensor, *, low: float, high: float) -> int:
    """Number of a response's tokens whose covariance is above `low` and below `high`."""
    return int(_between(covariance, low, high).sum())


def share_out(
    lengths: Sequence[int], candidates: Sequence[int], *, ratio: float, random: Random
) -> tuple[list[int], list[int]]:
    """How many of each response's candidates Clip-Cov leaves out, and a seed to draw them.

    Of all `candidates` [samples] it leaves out max(1, ratio * tokens) at most, each as likely. Here
    the number of each response's is drawn, by `keep` which of its candidates.
    """
    ends = list(itertools.accumulate(candidates))
    total = ends[-1] if ends else 0
    number = min(max(int(ratio * sum(lengths)), 1), total)
    counts = [0] * len(ends)
    for place in random.sample(range(total), number):
        counts[bisect.bisect_right(ends, place)] += 1
    return counts, [random.getrandbits(32) for _ in ends]


def keep(
    covariance: torch.Tensor, number: float, seed: float, *, low: float, high: float
) -> torch.Tensor:
    """`cov_kept` [tokens]: 0 for `number` of the candidates by chance, else 1.

    Both numbers are whole, and floats as scalars from the driver are.
    """
    (candidates,) = torch.where(_between(covariance, low, high))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(int(seed)))
    kept = torch.ones(len(covariance))
    kept[candidates[order[: int(number)]]] = 0.0
    return kept


def largest(covariance: torch.Tensor, batch_tokens: float, *, ratio: float) -> str:
    """The response's covariances that may be among the batch's largest, as text for the driver."""
    number = min(_num_held(batch_tokens, ratio), len(covariance))
    return " ".join(map(repr, covariance.topk(number).values.tolist()))


def threshold(texts: Sequence[str], batch_tokens: Sequence[float], *, ratio: float) -> list[float]:
    """The smallest covariance that KL-Cov holds, of the batch; each sample gets the same.

    That is number max(1, ratio * tokens) from above. Equals of it are held as well. `texts` are by
    `largest`.
    """
    values = (float(value) for text in texts for value in text.split())
    number = _num_held(batch_tokens[0], ratio) if texts else 0
    chosen = heapq.nlargest(number, values)
    return [chosen[-1] if chosen else math.inf] * len(texts)


def hold(covariance: torch.Tensor, least: float) -> torch.Tensor:
    """`cov_held` [tokens]: 1 where the covariance is `least` or more, else 0."""
    return (covariance >= least).float()


def _between(covariance: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (covariance > low) & (covariance < high)


def _num_held(tokens: float, ratio: float) -> int:
    return max(1, int(tokens * ratio))
