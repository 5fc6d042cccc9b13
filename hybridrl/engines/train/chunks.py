"""A micro-batch in several passes, so that its memory is that of one (ChunkFlow, arXiv 2503.02356).

Of a row with the chunks 1, 2, 3:

    forward without graph: 1, 2    forward and backward: 3, then 2, then 1

A chunk keeps its keys and values for later ones, which leave it their gradients. The loss reads
the log-probabilities of all chunks, so a loss of whole sequences is what it is without chunks.
"""

from collections.abc import Callable, Sequence

import torch

from hybridrl.config import Attention
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import (
    PackedBatch,
    PackedModel,
    forced_experts,
    own_share,
    scored_positions,
)
from hybridrl.models.chunk_keys import ChunkKeys, SequenceKeys
from hybridrl.models.packed_attention import make_chunk_packing
from hybridrl.models.router_balance import TokenSequences
from hybridrl.models.router_replay import NO_RECORD, Routing

RowLoss = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The loss [] of a row from log-probabilities and entropies [scored], or values and None."""


def chunks_of(
    sequences: Sequence[TrainSequence],
    row: PackedBatch,
    tokens: int,
    attention: Attention,
    trained_only: bool = False,
    multiple: int = 1,
) -> list[PackedBatch]:
    """A pass for each chunk of up to `tokens` of each of the row's `sequences`, in its order.

    The ranks that share the row share each chunk. A sequence's last chunk is filled up to a
    `multiple` on each of them, with tokens that none before them sees.
    """
    group, device = row.packing.group, row.ids.device
    passes = []
    for index in row.order:
        if index < 0:  # what fills the row up
            continue
        ids = sequences[index].ids
        whole = SequenceKeys(len(ids) + -len(ids) % (multiple * row.num_ranks))
        counts: dict[tuple[int, int], torch.Tensor] = {}
        scored = scored_positions(sequences[index], trained_only)
        for start in range(0, len(ids), tokens * row.num_ranks):
            stop = min(start + tokens * row.num_ranks, len(ids))
            missing = -(stop - start) % (multiple * row.num_ranks)
            here = scored[(scored > start) & (scored <= stop)]
            size = stop - start + missing
            keys = ChunkKeys(whole, start, start + size)
            of_token = (torch.arange(size) >= stop - start).long()
            token_sequences = TokenSequences(
                of_token, torch.tensor([len(ids)]), group, start, counts
            )
            passes.append(
                own_share(
                    PackedBatch(
                        ids=torch.cat([ids[start:stop], ids.new_zeros(missing)])[None],
                        position_ids=torch.arange(start, start + size).clamp(max=stop - 1)[None],
                        predicting=here - 1 - start,
                        targets=ids[here],
                        order=(index,),
                        counts=(len(here),),
                        packing=make_chunk_packing(keys, attention, device, group),
                        own=slice(None),
                        routing=_replay(sequences[index], start, stop, missing),
                        token_sequences=None if row.token_sequences is None else token_sequences,
                    ),
                    device,
                )
            )
    return passes


def _replay(sequence: TrainSequence, start: int, stop: int, missing: int) -> Routing | None:
    """The experts that a chunk's tokens take, `missing` of which are no sequence's."""
    if sequence.routed_experts is None:
        return None
    forced = forced_experts(sequence, sequence.routed_experts.shape[1:])[start:stop]
    filler = forced.new_full((missing, *forced.shape[1:]), NO_RECORD)
    return Routing(torch.cat([forced, filler]))


def train_in_passes(
    model: PackedModel,
    row: PackedBatch,
    loss: RowLoss,
    before_backward: Callable[[bool], None],
) -> None:
    """Forward and backward of a row that has `passes`; `before_backward` gets whether it is last.

    The last pass computes its forward once, the others twice.
    """
    first, last = row.passes[:-1], row.passes[-1]
    with torch.no_grad():
        outputs = [_forward_and_keep(model, batch, True) for batch in first]
    before_backward(not first)
    outputs.append(model(last.ids, last, True))

    # The loss of the whole row, and its gradient for each pass.
    scores = torch.cat([log_probs for log_probs, _ in outputs]).detach().requires_grad_()
    entropies = [entropy for _, entropy in outputs if entropy is not None]
    entropy = torch.cat(entropies).detach().requires_grad_() if entropies else None
    loss(scores, entropy).backward()
    sizes = [sum(batch.counts) for batch in row.passes]
    gradients = [
        torch.zeros_like(x) if x.grad is None else x.grad
        for x in (scores, entropy)
        if x is not None
    ]
    of_passes = [*zip(*(gradient.split(sizes) for gradient in gradients), strict=True)]

    (*_, final) = outputs
    _backward(last, final, of_passes[-1])
    for number in reversed(range(len(first))):
        before_backward(number == 0)
        batch = first[number]
        _backward(batch, model(batch.ids, batch, True), of_passes[number])


def score_in_passes(model: PackedModel, row: PackedBatch) -> torch.Tensor:
    """Log-probabilities, or values, [scored] of a row that has `passes`; without a graph."""
    scores = torch.cat([_forward_and_keep(model, batch, False)[0] for batch in row.passes])
    for batch in row.passes:
        if batch.packing.chunk is not None:
            batch.packing.chunk.free()
    return scores


def _forward_and_keep(
    model: PackedModel, batch: PackedBatch, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A pass without graph, whose keys and values stay for later chunks."""
    scores, entropy = model(batch.ids, batch, with_entropy)
    if batch.packing.chunk is not None:
        batch.packing.chunk.keep()
    return scores, entropy


def _backward(
    batch: PackedBatch,
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    gradients: Sequence[torch.Tensor],
) -> None:
    """Backward from a pass's outputs, and from the keys and values that later chunks have read."""
    chunk = batch.packing.chunk
    roots = [x for x in outputs if x is not None]
    pairs = [*zip(roots, gradients, strict=True), *(chunk.gradients() if chunk else [])]
    torch.autograd.backward([root for root, _ in pairs], [gradient for _, gradient in pairs])
    if chunk is not None:
        chunk.free()
