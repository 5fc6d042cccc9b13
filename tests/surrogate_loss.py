"""A smooth policy loss, for tests that compare gradients."""

from dataclasses import dataclass

import torch

from hybridrl.algorithms import Loss


@dataclass(frozen=True, slots=True)
class Surrogate(Loss):
    """The importance-weighted advantage, less an entropy bonus, so that all gradients are used."""

    normalize: str = "token"
    entropy_bonus: float = 0.01

    @property
    def fields(self) -> tuple[str, ...]:
        return "advantages", "old_log_probs"

    @property
    def needs_entropy(self) -> bool:
        return self.entropy_bonus > 0

    def __call__(
        self,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        fields: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        ratio = (log_probs - fields["old_log_probs"]).exp()
        loss = -ratio * fields["advantages"]
        if entropy is not None:
            loss = loss - self.entropy_bonus * entropy
        return loss, {"ratio": ratio}
