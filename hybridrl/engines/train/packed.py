"""A micro-batch as one packed row, and the module that turns it into log-probabilities."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from hybridrl.config import Attention
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.kernels.linear_log_probs import linear_log_probs
from hybridrl.models.packed_attention import Packing, make_packing


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Sequences behind each other in one row, by ascending length.

    `ids` and `position_ids` [1, tokens]; `predicting` [scored] are the places in the row whose
    hidden state predicts a scored token, `targets` [scored] those tokens; `order` gives for each
    place in the row which of the caller's sequences lies there, `counts` its scored tokens.
    """

    ids: torch.Tensor
    position_ids: torch.Tensor
    predicting: torch.Tensor
    targets: torch.Tensor
    order: tuple[int, ...]
    counts: tuple[int, ...]
    packing: Packing


def pack(
    sequences: Sequence[TrainSequence],
    attention: Attention,
    device: torch.device,
    trained_only: bool = False,
) -> PackedBatch:
    """Pack sequences into one row; `trained_only` scores the unmasked response tokens only.

    No sequences give a row of one token with nothing to score: a rank that has run out of work
    computes it to take part in the collectives, and its gradient is exactly zero. Raises
    ValueError for a response without a token before it, or a mask of another length.
    """
    order = sorted(range(len(sequences)), key=lambda i: (len(sequences[i].ids), i))
    lengths, predicting, targets, counts, start = [], [], [], [], 0
    for index in order:
        sequence = sequences[index]
        length, scored = len(sequence.ids), scored_positions(sequence, trained_only)
        predicting.append(scored + (start - 1))
        targets.append(sequence.ids[scored])
        lengths.append(length)
        counts.append(len(scored))
        start += length
    empty = torch.zeros(0, dtype=torch.int64)
    ids = (
        torch.cat([sequences[i].ids for i in order]) if order else torch.zeros(1, dtype=torch.long)
    )
    lengths = lengths or [1]
    return PackedBatch(
        ids=ids[None].to(device),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None].to(device),
        predicting=torch.cat([empty, *predicting]).to(device),
        targets=torch.cat([empty, *targets]).to(device),
        order=tuple(order),
        counts=tuple(counts),
        packing=make_packing(lengths, attention, device),
    )


def scored_positions(sequence: TrainSequence, trained_only: bool) -> torch.Tensor:
    """Positions [scored] in `sequence.ids` of its response tokens, or of the unmasked ones."""
    length, response = len(sequence.ids), sequence.response_tokens
    if not 0 <= response < length:
        raise ValueError(
            f"response_tokens={response} of {length} tokens: wanted 0 to {length - 1}, since the "
            "first token of a sequence has nothing to be predicted from"
        )
    positions = torch.arange(length - response, length)
    if not trained_only or sequence.mask is None:
        return positions
    if len(sequence.mask) != response:
        raise ValueError(f"mask has {len(sequence.mask)} entries, response_tokens={response}")
    return positions[sequence.mask.cpu()]


def scored_fields(
    sequences: Sequence[TrainSequence], batch: PackedBatch, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """The fields of the scored tokens [scored], in the order of the row, in float32 at least.

    A scalar counts for every token of its sequence. Raises ValueError for a field that is missing
    or has another length than the response.
    """
    fields = {}
    for name in names:
        parts = [
            _field(sequences[index], name, count)
            for index, count in zip(batch.order, batch.counts, strict=True)
        ]
        whole = torch.cat([torch.zeros(0), *parts])
        fields[name] = whole.to(batch.ids.device)
    return fields


def _field(sequence: TrainSequence, name: str, count: int) -> torch.Tensor:
    if name not in sequence.fields:
        available = ", ".join(sorted(sequence.fields)) or "none"
        raise ValueError(f"the loss needs the field {name!r} of every sequence; got {available}")
    value = sequence.fields[name]
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return torch.full((count,), float(value))
    if len(value) != sequence.response_tokens:
        raise ValueError(
            f"field {name!r} has {len(value)} values, response_tokens={sequence.response_tokens}"
        )
    value = value.cpu()
    if count == len(value):
        return value
    assert sequence.mask is not None, "only a mask leaves tokens out"
    return value[sequence.mask.cpu()]


class PackedModel(nn.Module):
    """A causal language model whose forward gives log-probabilities of the scored tokens only.

    The head is applied to the scored positions alone and in chunks, so logits of the prompt are
    never computed and logits of the response never exist all at once.
    """

    def __init__(self, causal_lm: PreTrainedModel, temperature: float = 1.0) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.temperature = temperature

    def forward(
        self,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        predicting: torch.Tensor,
        targets: torch.Tensor,
        packing: Packing,
        with_entropy: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and entropies [scored] after temperature; see `PackedBatch`."""
        hidden = self.causal_lm.base_model(
            ids, position_ids=position_ids, use_cache=False, packing=packing
        ).last_hidden_state
        weight = self.causal_lm.get_output_embeddings().weight
        return linear_log_probs(
            hidden[0].index_select(0, predicting), weight, targets, self.temperature, with_entropy
        )
