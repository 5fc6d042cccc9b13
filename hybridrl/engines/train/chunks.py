"""A micro-batch in several passes, so that its memory is that of one (ChunkFlow, arXiv 2503.02356).

Of a row with the chunks 1, 2, 3:

    forward without graph: 1, 2    forward and backward: 3, then 2, then 1

A chunk keeps its keys and values for later ones, which leave it their gradients. The loss reads
the log-probabilities of all chunks, so a loss of whole sequences is what it is without chunks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.distributed import ProcessGroup

from hybridrl.config import Attention
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import (
    Candidates,
    PackedBatch,
    PackedModel,
    candidate_ids,
    forced_experts,
    own_share,
    scored_positions,
)
from hybridrl.engines.train.truncated import kept_rows
from hybridrl.models.chunk_keys import ChunkKeys, SequenceKeys
from hybridrl.models.packed_attention import make_chunk_packing
from hybridrl.models.router_balance import TokenSequences
from hybridrl.models.router_replay import NO_RECORD, Routing

Outputs = tuple[torch.Tensor, torch.Tensor | None]
"""Log-probabilities and entropies [scored], or values and None."""
RowLoss = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""The loss [] of a row from log-probabilities and entropies [scored], or values and None."""


def row_in_chunks(
    sequences: Sequence[TrainSequence],
    tokens: int,
    attention: Attention,
    device: torch.device,
    trained_only: bool,
    multiple: int,
    group: ProcessGroup | None,
    records_experts: bool = False,
    counts_experts: bool = False,
    candidates: Candidates | None = None,
) -> PackedBatch:
    """A row of `sequences`, with a pass for each chunk of up to `tokens` of each of them.

    The ranks of `group` share each chunk. A sequence's last chunk is filled up to a `multiple` on
    each of them, with tokens that none before them sees. With `trained_only` the passes are for an
    update, which keeps keys and values until its backward pass. Other arguments are those of
    `packed.pack`. The row has the tensors of its first pass.
    """
    ranks = 1 if group is None else group.size()
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i].ids.shape[0], i))
    totals, passes = [], []
    for index in order:
        ids = sequences[index].ids
        length = len(ids) + -len(ids) % (multiple * ranks)
        whole = SequenceKeys(length, for_backward=trained_only)
        counts: dict[tuple[int, int], torch.Tensor] = {}
        scored = scored_positions(sequences[index], trained_only)
        totals.append(len(scored))
        for start in range(0, len(ids), tokens * ranks):
            stop = min(start + tokens * ranks, len(ids))
            missing = -(stop - start) % (multiple * ranks)
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
                        routing=Routing(records=True)
                        if records_experts
                        else _replay(sequences[index], start, stop, missing),
                        token_sequences=token_sequences if counts_experts else None,
                        candidates=None
                        if candidates is None
                        else candidate_ids(sequences[index], candidates, here),
                        kept=kept_rows([sequences[index]], [here]),
                    ),
                    device,
                )
            )
    return replace(passes[0], order=tuple(order), counts=tuple(totals), passes=tuple(passes))


def _replay(sequence: TrainSequence, start: int, stop: int, missing: int) -> Routing | None:
    """The experts that a chunk's tokens take, `missing` of which are no sequence's."""
    if sequence.routed_experts is None:
        return None
    forced = forced_experts(sequence, sequence.routed_experts.shape[1:])[start:stop]
    filler = forced.new_full((missing, *forced.shape[1:]), NO_RECORD)
    return Routing(torch.cat([forced, filler]))


class LossOfPasses:
    """The loss of a row that has `passes`, as a number for each of them with the same gradient.

    All passes but the last are made without a graph first (`keep`). Then each is called for, the
    last one first, with what it has computed.
    """

    def __init__(self, row: PackedBatch, loss: RowLoss) -> None:
        self._sizes, self._loss = [sum(batch.counts) for batch in row.passes], loss
        self._outputs: list[Outputs] = []
        self._gradients: list[tuple[torch.Tensor, ...]] = []

    def keep(self, outputs: Outputs) -> None:
        """Take what the next pass without a graph has computed."""
        self._outputs.append(outputs)

    def __call__(self, outputs: Outputs) -> torch.Tensor:
        """A number [] whose gradient by `outputs` is that of the row's loss."""
        if self._outputs:
            self._gradients = self._of_row([*self._outputs, outputs])
            self._outputs = []
        gradients = self._gradients.pop()
        values = [x for x in outputs if x is not None]
        terms = [(x * grad).sum() for x, grad in zip(values, gradients, strict=True)]
        return torch.stack(terms).sum()

    def _of_row(self, outputs: Sequence[Outputs]) -> list[tuple[torch.Tensor, ...]]:
        """The gradients of the row's loss for each pass."""
        scores = torch.cat([scores for scores, _ in outputs]).detach().requires_grad_()
        entropies = [entropy for _, entropy in outputs if entropy is not None]
        entropy = torch.cat(entropies).detach().requires_grad_() if entropies else None
        self._loss(scores, entropy).backward()
        gradients = [
            torch.zeros_like(x) if x.grad is None else x.grad
            for x in (scores, entropy)
            if x is not None
        ]
        return [*zip(*(gradient.split(self._sizes) for gradient in gradients), strict=True)]


def train_in_passes(
    model: PackedModel,
    row: PackedBatch,
    loss: RowLoss,
    before_backward: Callable[[bool], None],
) -> None:
    """Forward and backward of a row that has `passes`; `before_backward` gets whether it is last.

    The last pass computes its forward once, the others twice.
    """
    of_row = LossOfPasses(row, loss)
    with torch.no_grad():
        for batch in row.passes[:-1]:
            of_row.keep(model(batch.ids, batch, True))
    for number, batch in reversed([*enumerate(row.passes)]):
        before_backward(number == 0)
        of_row(model(batch.ids, batch, True)).backward()
    free_keys(row)


def free_keys(row: PackedBatch) -> None:
    """Free the keys and values that a row has left after its backward pass.

    Of adapters they are those of the first layer, where its MLP alone has some.
    """
    for batch in row.passes:
        if batch.packing.chunk is not None:
            batch.packing.chunk.sequence.drop_all()


def score_in_passes(model: PackedModel, row: PackedBatch) -> torch.Tensor:
    """Log-probabilities, or values, [scored] of a row that has `passes`; without a graph."""
    return torch.cat([model(batch.ids, batch)[0] for batch in row.passes])
