"""Distillation on the student's own samples: a divergence of student and teacher at every token.

The sum over the vocabulary needs both distributions, which the train engine does not keep.
`DistillLoss` needs the sampled token's log-probabilities alone, and has the same expected gradient
as the reverse KL. `TopKDistillLoss` sums over the teacher's likeliest tokens: less noise, for k
more products of the head a token.
"""

import math
from dataclasses import dataclass
from enum import Enum

import torch

from hybridrl.algorithms.kl import k1, k2
from hybridrl.algorithms.losses import CheckedLoss, Fields

LEAST_REST = 1e-6
"""The least probability of all tokens outside of the top k: float32's sums are off by 1e-7."""


@dataclass(frozen=True, kw_only=True)
class DistillLoss(CheckedLoss):
    """Reverse KL per token from the sampled token alone: (log p - log q)^2 / 2.

    Over tokens that the student sampled its expected gradient is that of the exact KL at each
    token: (log p - log q) grad log p is both gradients (k2 in `hybridrl.algorithms.kl`). What a
    token does to later ones is left out, as in GKD (arXiv 2306.13649, section 3), which does not
    differentiate the sampling. Metric: `reverse_kl`, the unbiased estimate log p - log q.
    """

    normalize: str = "token"

    fields = ("teacher_log_probs",)

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """Loss [tokens] and metrics [tokens] of `log_probs` [tokens]."""
        teacher = fields["teacher_log_probs"]
        return k2(log_probs, teacher), {"reverse_kl": k1(log_probs, teacher).detach()}


class Divergence(Enum):
    """A distance of two distributions, student p and teacher q."""

    forward_kl = "forward_kl"  # KL(q, p): p covers all that q does
    reverse_kl = "reverse_kl"  # KL(p, q): p keeps to what q does
    jsd = "jsd"  # Jensen-Shannon: half of both, to their mean


@dataclass(frozen=True, kw_only=True)
class TopKDistillLoss(CheckedLoss):
    """A divergence per token over the teacher's `top_k` likeliest tokens, and all others as one.

    p and q are the probabilities [top_k + 1] of student and teacher, the last that of the rest.

        forward_kl: sum q log(q / p)        reverse_kl: sum p log(p / q)

    `jsd` is the mean of both to (p + q) / 2 (GKD, arXiv 2306.13649, section 3, with beta 1/2).
    verl's forward_kl_topk is the first one without the rest. The rest as one makes it a divergence
    of distributions: never below 0, and 0 only where all agree. With the whole vocabulary it is
    exact. Metrics: `divergence`; `teacher_mass` and `student_mass`, the shares that these tokens
    have.
    """

    top_k: int
    divergence: Divergence = Divergence.reverse_kl
    normalize: str = "token"

    candidates = "teacher_top_ids"
    fields = ("teacher_top_ids", "teacher_top_log_probs")

    @property
    def num_candidates(self) -> int:  # type: ignore[override]
        return self.top_k

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """Loss [tokens] and metrics [tokens]; `log_probs`, of the response, is not read."""
        top = fields["teacher_top_log_probs"].reshape(-1, self.top_k)
        student = with_rest(fields["candidate_log_probs"])
        values = divergence(self.divergence, student, with_rest(top.to(student.dtype)))
        metrics = {
            "divergence": values.detach(),
            "teacher_mass": top.exp().sum(-1),
            "student_mass": fields["candidate_log_probs"].detach().exp().sum(-1),
        }
        return values, metrics


def with_rest(log_probs: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [tokens, k], and that of all other tokens as a last column.

    It is log(1 - sum), and at least log(LEAST_REST) where rounding leaves less. There it has no
    gradient.
    """
    mass = log_probs.exp().sum(-1, keepdim=True)
    return torch.cat([log_probs, (1 - mass).clamp(min=LEAST_REST).log()], -1)


def divergence(kind: Divergence, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The divergence [tokens] of log-probabilities [tokens, tokens of the vocabulary]."""
    match kind:
        case Divergence.forward_kl:
            return kl(teacher, student)
        case Divergence.reverse_kl:
            return kl(student, teacher)
        case Divergence.jsd:
            mean = torch.logaddexp(student, teacher) - math.log(2)
            return (kl(student, mean) + kl(teacher, mean)) / 2


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p, q) [tokens] of log-probabilities [tokens, tokens of the vocabulary]."""
    return (p.exp() * (p - q)).sum(-1)
