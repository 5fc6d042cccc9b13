"""Rows of a model that is not cut into pipeline chunks, and where scores of rows go."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hybridrl.engines.train.chunks import score_in_passes, train_in_passes
from hybridrl.engines.train.gathering import fsdp_modules
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedBatch, PackedModel
from hybridrl.engines.train.replica import MicroBatches
from hybridrl.system.activity import mark

RowScored = Callable[[int, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Called with a row's number, its scores and entropies [scored]; gives a loss []."""


@dataclass(kw_only=True, slots=True)
class ScoredRows:
    """Rows of a replica, each to be computed once in any order: `TrainEngine.prepare_scores`.

    `finish` takes the scores of a row. On the last pipeline stage `scores` has those of all
    sequences at the end, [response_tokens] each, on CPU.
    """

    sequences: Sequence[TrainSequence]
    """The sequences of this rank."""
    pooled: Sequence[TrainSequence]
    """The sequences of all ranks of the replica, of which `own` are this rank's."""
    own: slice
    micros: MicroBatches
    batches: Sequence[PackedBatch]
    """A row for each micro-batch."""
    records_experts: bool = False
    scores: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.scores = [torch.zeros(0)] * len(self.micros.sequences)

    def finish(
        self, number: int, values: torch.Tensor, entropy: torch.Tensor | None
    ) -> torch.Tensor:
        """Take the scores [scored] of a row by its number; gives the loss [] of none, 0."""
        indices, batch = self.micros.parts[number], self.batches[number]
        for position, value in zip(batch.order, values.cpu().split(batch.counts), strict=True):
            if position >= 0:
                self.scores[indices[position]] = value.clone()
        return torch.zeros(())

    def keeping(self, loss: RowScored) -> RowScored:
        """The `loss` [] of a row by its number, which also has the row's scores taken."""

        def finish(number: int, values: torch.Tensor, entropy: torch.Tensor | None) -> torch.Tensor:
            self.finish(number, values.detach(), entropy)
            return loss(number, values, entropy)

        return finish


def train_rows(
    root: PackedModel,
    batches: Sequence[PackedBatch],
    finish: Callable[..., Any],
    keep_unsharded: bool,
    all_reduce: bool = True,
) -> None:
    """Forward and backward of one row after another; `finish` gives a row's loss by its number.

    Gradients are summed over replicas after the last row alone. Before it FSDP keeps this replica's
    sharded sums, in the memory of the gradients that they become. Without `all_reduce` it keeps
    them after the last row, too, until it next sums over replicas. With `keep_unsharded` gradients
    are not even sharded before the last row.
    """
    modules = fsdp_modules([root])
    assert root in modules

    def prepare(last_row: bool, last_pass: bool) -> None:
        last = last_row and last_pass
        for module in modules:
            if keep_unsharded:
                module.set_requires_gradient_sync(last, recurse=False)
                module.set_reshard_after_backward(last, recurse=False)
            module.set_requires_all_reduce(all_reduce and last, recurse=False)

    for number, batch in enumerate(batches):
        last_row = number == len(batches) - 1
        mark("micro-batch", number)
        if batch.passes:
            before_backward = partial(prepare, last_row)
            train_in_passes(root, batch, partial(finish, number), before_backward)
        else:
            prepare(last_row, True)
            loss = finish(number, *root(batch.ids, batch, True))
            loss.backward()
            del loss  # and with it the row's graph, before the next one


def score_rows(
    root: PackedModel, batches: Sequence[PackedBatch], finish: Callable[..., Any]
) -> None:
    """Forward of one row after another; within `torch.no_grad`. `finish` takes a row's scores."""
    for number, row in enumerate(batches):
        mark("forward", number)
        values = score_in_passes(root, row) if row.passes else root(row.ids, row)[0]
        finish(number, values, None)
