"""What the train engine takes and gives."""

from dataclasses import dataclass, field

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
