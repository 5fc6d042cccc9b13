"""Forward and backward of a model that is not cut into pipeline chunks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.distributed.fsdp import FSDPModule

from hybridrl.engines.train.chunks import score_in_passes, train_in_passes
from hybridrl.engines.train.packed import PackedBatch, PackedModel
from hybridrl.engines.train.scored_rows import ScoredRows


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
    assert isinstance(root, FSDPModule)

    def prepare(last_row: bool, last_pass: bool) -> None:
        last = last_row and last_pass
        if keep_unsharded:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)
        root.set_requires_all_reduce(all_reduce and last)

    for number, batch in enumerate(batches):
        last_row = number == len(batches) - 1
        if batch.passes:
            before_backward = partial(prepare, last_row)
            train_in_passes(root, batch, partial(finish, number), before_backward)
        else:
            prepare(last_row, True)
            loss = finish(number, *root(batch.ids, batch, True))
            loss.backward()
            del loss  # and with it the row's graph, before the next one


def score_rows(root: PackedModel, rows: ScoredRows) -> None:
    """Forward of one row after another; within `torch.no_grad`."""
    for number, row in enumerate(rows.batches):
        values = score_in_passes(root, row) if row.passes else root(row.ids, row)[0]
        rows.finish(number, values, None)
