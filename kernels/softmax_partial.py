"""Softmax statistics over a shard of a vocabulary, and their join.

The parts are blocks of columns on one device or the shards of several ranks. The rule is one: take
the larger maximum, rescale the sums to it, add. It is the online softmax of Milakov and Gimelshein
(arXiv 1805.02867), with a third sum for the entropy.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist


class SoftmaxPartial(NamedTuple):
    """Statistics of the logits z of some columns, each [tokens], or [parts, tokens] before a join.

    `maximum` max z; `total` sum exp(z - maximum); `weighted` sum exp(z - maximum) (z - maximum),
    undefined if the entropy is not requested. `target` is z of the target, -inf if the target is
    not among the columns.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor
    target: torch.Tensor

    @classmethod
    def empty(cls, tokens: int, dtype: torch.dtype, device: torch.device) -> "SoftmaxPartial":
        """Statistics of no columns. The finite maximum keeps infinities out of rescaling."""
        zeros = torch.zeros(tokens, dtype=dtype, device=device)
        lowest = torch.full_like(zeros, torch.finfo(dtype).min)
        return cls(lowest, zeros, zeros, torch.full_like(zeros, -torch.inf))

    def join(self, other: "SoftmaxPartial") -> "SoftmaxPartial":
        """The statistics of both sets of columns, which must not overlap."""
        pairs = zip(self, other, strict=True)
        return SoftmaxPartial(*(torch.stack(pair) for pair in pairs)).join_parts()

    def join_parts(self) -> "SoftmaxPartial":
        """[parts, tokens] to [tokens]."""
        maximum = self.maximum.amax(0)
        total, weighted = self._sums_at(maximum)
        return SoftmaxPartial(maximum, total.sum(0), weighted.sum(0), self.target.amax(0))

    def all_reduce(self, group: dist.ProcessGroup) -> "SoftmaxPartial":
        """Join the parts of a group's ranks: two all-reduces of [2, tokens], equal on all ranks."""
        largest = torch.stack([self.maximum, self.target])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        sums = torch.stack(self._sums_at(largest[0]))
        dist.all_reduce(sums, dist.ReduceOp.SUM, group)
        return SoftmaxPartial(largest[0], sums[0], sums[1], largest[1])

    def log_sum_exp(self) -> torch.Tensor:
        """[tokens]"""
        return self.maximum + self.total.log()

    def entropy(self) -> torch.Tensor:
        """Entropy in nats [tokens]: log sum exp(z) minus the mean of z, both from the maximum."""
        return self.total.log() - self.weighted / self.total

    def _sums_at(self, maximum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shift = self.maximum - maximum
        scale = shift.exp()
        return scale * self.total, scale * (self.weighted + shift * self.total)
