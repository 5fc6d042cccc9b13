"""What the train engine takes and gives."""

from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(slots=True)
class TrainSequence:
    """One sequence to train on or to score.

    `ids` [tokens] holds prompt and response; the last `response_tokens` of them are the response.
    `fields` holds per-token tensors [response_tokens] (`old_log_probs`, `reference_log_probs`, ...)
    or scalars (`advantages`, one for all tokens). `mask` [response_tokens] is False where a token
    is not to be trained; None trains all.
    """

    ids: torch.Tensor
    response_tokens: int
    fields: dict[str, torch.Tensor | float] = field(default_factory=dict)
    mask: torch.Tensor | None = None


class Loss(Protocol):
    """A policy or supervised loss: pure, picklable, one value per response token.

    `normalise` says how tokens are weighted into the batch loss (see
    `hybridrl.algorithms.normalise`), over all ranks and micro-batches.
    """

    normalise: str

    @property
    def fields(self) -> tuple[str, ...]:
        """Names that must be in `TrainSequence.fields`."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy` must be computed with gradient."""
        ...

    def __call__(
        self,
        log_probs: torch.Tensor,
        entropy: torch.Tensor | None,
        fields: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Per-token loss [tokens] and per-token metrics [tokens], to be averaged by the engine."""
        ...
