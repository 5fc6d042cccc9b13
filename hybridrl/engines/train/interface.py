"""Inputs of the train engine: sequences and losses."""

from dataclasses import dataclass, field

import torch

from hybridrl.models.image_files import Images


@dataclass(slots=True)
class TrainSequence:
    """One sequence to train on or to score.

    `ids` [tokens] holds prompt and response; the last `response_tokens` of them are the response.
    `fields` holds per-token tensors [response_tokens] (`old_log_probs`, `reference_log_probs`, ...)
    or scalars (`advantages`, one for all tokens). `mask` [response_tokens] is False where a token
    is not to be trained; None trains all. `routed_experts` [tokens - 1, layers, k] are the experts
    that the tokens take; None leaves them to the routers. The last token, which predicts nothing,
    has none. `kept_ids` [response_tokens + ids] has how many ids each response token was drawn
    from, 0 for the whole distribution, and then the ids of all of them. Log-probabilities and
    entropies are renormalized over these ids; None: all are of the whole distribution. `images` are
    the files of the prompt's images, whose pads are among the `ids`. `is_ended`: see `ended`.
    """

    ids: torch.Tensor
    response_tokens: int
    fields: dict[str, torch.Tensor | float] = field(default_factory=dict)
    mask: torch.Tensor | None = None
    routed_experts: torch.Tensor | None = None
    kept_ids: torch.Tensor | None = None
    images: Images = ()
    is_ended: bool = False


def ended(sequence: TrainSequence, pad: int | None) -> TrainSequence:
    """The sequence for a loss that reads its end, the last token that is not `pad`.

    A response of one token is appended; the state before it is that at the end. Its id is
    arbitrary: a causal model's earlier states do not depend on it. Only scalar fields remain.
    """
    end = last_position(sequence.ids, pad)
    ids = torch.cat([sequence.ids[: end + 1], sequence.ids[end : end + 1]])
    scalars = {
        name: value
        for name, value in sequence.fields.items()
        if not isinstance(value, torch.Tensor) or value.ndim == 0
    }
    return TrainSequence(ids, 1, scalars, images=sequence.images, is_ended=True)


def last_position(ids: torch.Tensor, pad: int | None) -> int:
    """Index of the last of `ids` [tokens] that is not `pad`; 0 if all are."""
    if pad is None:
        return len(ids) - 1
    positions = (ids != pad).nonzero()
    return int(positions[-1]) if len(positions) else 0
