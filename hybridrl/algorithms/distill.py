"""Distillation on the student's own samples: the reverse KL, KL(student || teacher).

The sum over the vocabulary needs both distributions, which the train engine does not keep: its
head gives the sampled tokens' log-probabilities alone. `DistillLoss` needs no more than those, of
student and teacher, and has the same expected gradient for tokens that the student sampled.
"""

from dataclasses import dataclass

import torch

from hybridrl.algorithms import NORMALIZATIONS, resolve
from hybridrl.algorithms.kl import k1, k2
from hybridrl.algorithms.losses import Fields
from hybridrl.config.loss import Loss


@dataclass(frozen=True, kw_only=True)
class DistillLoss(Loss[torch.Tensor]):
    """Reverse KL per token from the sampled token alone: (log p - log q)^2 / 2.

    Over tokens that the student sampled its expected gradient is that of the exact KL at each
    token: (log p - log q) grad log p is both gradients (k2 in `hybridrl.algorithms.kl`). What a
    token does to later ones is left out, as in GKD (arXiv 2306.13649, section 3), which does not
    differentiate the sampling. Metric: `reverse_kl`, the unbiased estimate log p - log q.
    """

    normalize: str = "token"

    def __post_init__(self) -> None:
        resolve(NORMALIZATIONS, "recipe.normalize", self.normalize)

    @property
    def fields(self) -> tuple[str, ...]:
        """`teacher_log_probs`."""
        return ("teacher_log_probs",)

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, fields: Fields
    ) -> tuple[torch.Tensor, Fields]:
        """Loss [tokens] and metrics [tokens] of `log_probs` [tokens]."""
        teacher = fields["teacher_log_probs"]
        return k2(log_probs, teacher), {"reverse_kl": k1(log_probs, teacher).detach()}
