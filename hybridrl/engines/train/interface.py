"""What the train engine takes and gives."""

from collections.abc import Mapping
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

    `normalize` says how tokens are weighted into the batch loss (see
    `hybridrl.algorithms.normalize`), over all ranks and micro-batches.

    A loss may have attributes more (`samples_per_row_of`, `reads_end`, `lr_scale_of`):
    `samples_per_row`, how many consecutive sequences it looks at together, which then share a
    micro-batch; `needs_last_token_only` True, where a model with a value head is to be read at each
    sequence's last token instead of before every response token; `lr_scale(share)`, what to
    multiply the learning rate by where responses are worth that share of their number, or None to
    leave it alone; and `on_policy` True, where it has no ratio to an old policy, so that an update
    must be one optimizer step on fresh samples.
    """

    normalize: str

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
        """Per-token loss [tokens] and per-token metrics [tokens], to be averaged by the engine.

        `fields` has what `self.fields` names, and `sequence` [tokens], int64: which of the
        micro-batch's sequences a token is of. They are numbered in the order of the update, so
        sequence i is of row i // samples_per_row; one without trained tokens has its number, too.
        """
        ...


def samples_per_row_of(loss: Loss) -> int:
    """How many consecutive sequences the loss looks at together: 1 unless it says otherwise."""
    return int(getattr(loss, "samples_per_row", 1))


def reads_end(loss: Loss) -> bool:
    """Whether the loss wants one value a sequence, that at its last token."""
    return bool(getattr(loss, "needs_last_token_only", False))


def lr_scale_of(loss: Loss, figures: Mapping[str, float]) -> float | None:
    """What the loss makes of the learning rate; None where it leaves it alone.

    It depends on the `effective_share` among an update's figures; without one nothing is stale.
    """
    scale = getattr(loss, "lr_scale", None)
    return None if scale is None else scale(figures.get("effective_share", 1.0))


def ended(sequence: TrainSequence, pad: int | None) -> TrainSequence:
    """The sequence for a loss that reads its end: the state before its one response token is that
    at the end, which is the last token that is not `pad`.

    So a token is appended, whatever it is: a causal model's states before it do not see it. Only
    scalar fields remain.
    """
    end = last_position(sequence.ids, pad)
    ids = torch.cat([sequence.ids[: end + 1], sequence.ids[end : end + 1]])
    scalars = {
        name: value
        for name, value in sequence.fields.items()
        if not isinstance(value, torch.Tensor) or value.ndim == 0
    }
    return TrainSequence(ids, 1, scalars)


def last_position(ids: torch.Tensor, pad: int | None) -> int:
    """Index of the last of `ids` [tokens] that is not `pad`; 0 where all are."""
    if pad is None:
        return len(ids) - 1
    found = (ids != pad).nonzero()
    return int(found[-1]) if len(found) else 0
