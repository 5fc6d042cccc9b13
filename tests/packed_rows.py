"""Rows as `engines.train.packed` makes them, for tests of losses that look at whole sequences."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from hybridrl.algorithms.normalize import token_weights


class Row:
    """Sequences of `lengths` behind each other by ascending length, as `engines.train.packed`.

    Tensors are made and returned padded, [sequences, width], in the order of the update.
    """

    def __init__(self, lengths: tuple[int, ...], seed: int = 0) -> None:
        self.lengths = lengths
        self.width = max(*lengths, 1)
        self.mask = torch.arange(self.width) < torch.tensor(lengths)[:, None]
        self.order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
        self.counts = [lengths[i] for i in self.order]
        self.sequence = torch.tensor(self.order).repeat_interleave(torch.tensor(self.counts))
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, *, each: bool = True) -> torch.Tensor:
        """Normal numbers, one for each token or one for all of a sequence."""
        shape = (len(self.lengths), self.width if each else 1)
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return values.expand(-1, self.width).contiguous()

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens] in the order of the row."""
        return torch.cat([x[i, : self.lengths[i]] for i in self.order])

    def batch_loss(
        self, loss: Any, log_probs: torch.Tensor, **fields: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """As the engine computes it, its gradient, and the metrics of each token."""
        leaf = log_probs.clone().requires_grad_()
        total, metrics = self._weighted(self, loss, leaf, fields)
        (grad,) = torch.autograd.grad(total, leaf)
        return total.detach(), grad, metrics

    def in_micro_batches(
        self, cuts: Sequence[int], loss: Any, log_probs: torch.Tensor, **fields: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss and gradient as of several rows: `cuts` are the first sequences of all but one."""
        leaf = log_probs.clone().requires_grad_()
        terms = []
        for first, last in pairwise((0, *cuts, len(self.lengths))):
            its = {name: x[first:last] for name, x in fields.items()}
            row = Row(self.lengths[first:last])
            terms.append(self._weighted(row, loss, leaf[first:last], its)[0])
        total = torch.stack(terms).sum()
        (grad,) = torch.autograd.grad(total, leaf)
        return total.detach(), grad

    def _weighted(
        self, row: "Row", loss: Any, leaf: torch.Tensor, fields: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The share of `row`, some of this one's sequences, in the loss; metrics of its tokens."""
        packed = {name: row.pack(fields[name]) for name in loss.fields}
        values, metrics = loss(row.pack(leaf), None, packed | {"sequence": row.sequence})
        assert values.shape == row.sequence.shape
        assert all(value.shape == values.shape for value in metrics.values())
        totals = sum(self.counts), len(self.counts), self.width
        weights = token_weights(row.counts, loss.normalize, *totals)
        return (weights.double() * values).sum(), metrics
