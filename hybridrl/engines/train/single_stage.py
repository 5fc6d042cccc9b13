"""Forward and backward of a model that is not cut into pipeline chunks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.distributed.fsdp import FSDPModule

from hybridrl.engines.train.chunks import train_in_passes
from hybridrl.engines.train.packed import PackedBatch, PackedModel


def train_rows(
    root: PackedModel,
    batches: Sequence[PackedBatch],
    finish: Callable[..., Any],
    keep_unsharded: bool,
    all_reduce: bool = True,
) -> None:
    """Forward and backward of one row after another; `finish` gives a row's loss by its number.

    With `keep_unsharded` gradients are reduced after the last row alone. Without `all_reduce` FSDP
    keeps the gradients of this replica, and adds them when it next sums over replicas.
    """
    assert isinstance(root, FSDPModule)

    def prepare(last_row: bool, last_pass: bool) -> None:
        last = last_row and last_pass
        if keep_unsharded:
            root.set_requires_gradient_sync(last)
            root.set_reshard_after_backward(last)
        root.set_requires_all_reduce(all_reduce and (last or not keep_unsharded))

    for number, batch in enumerate(batches):
        last_row = number == len(batches) - 1
        if batch.passes:
            before_backward = partial(prepare, last_row)
            train_in_passes(root, batch, partial(finish, number), before_backward)
        else:
            prepare(last_row, True)
            finish(number, *root(batch.ids, batch, True)).backward()
