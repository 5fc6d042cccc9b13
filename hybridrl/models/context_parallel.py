"""Attention over a row whose tokens several ranks share.

Where the ranks divide the heads (DeepSpeed-Ulysses, arXiv 2309.14509), each has consecutive tokens
and all heads outside of attention; inside, all tokens and some heads. One all-to-all goes there and
one comes back, so what attends (windows, sinks, packing) sees the row as one rank would:

    rank 0: tokens 0-3, heads 0-3          rank 0: tokens 0-7, heads 0-1
    rank 1: tokens 4-7, heads 0-3   <->    rank 1: tokens 0-7, heads 2-3

Else (Llama 3, arXiv 2407.21783) each rank gathers the keys and values of all, and attends with the
queries of its tokens. What attends sees a sequence that has earlier tokens, as that of a chunk:

    rank 0: queries 0-3, keys 0-3
    rank 1: queries 4-7, keys 0-7
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from math import lcm

import torch
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as funcol

MessageExchange = Callable[[torch.Tensor], torch.Tensor]
"""What arrives for a rank's messages, of which each rank gets an equal share."""


def all_to_all(messages: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """The `MessageExchange` of the ranks of `group`, differentiable."""
    return funcol.all_to_all_single_autograd(messages, None, None, group)


def to_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ranks: int,
    exchange: MessageExchange,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's heads of the whole row; the three are [heads, tokens, dim], differentiable.

    All ranks have equally many tokens. They must divide the query's heads. Heads of keys and values
    are repeated where they are fewer than the ranks, or no multiple of them.
    """
    repeats = lcm(ranks, key.shape[0]) // key.shape[0]
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, 0) for x in (key, value))
    # [ranks, tokens, heads of a rank, dim]: a message's features are contiguous.
    shares = [x.unflatten(0, (ranks, -1)).transpose(1, 2) for x in (query, key, value)]
    messages = torch.cat([x.flatten(2) for x in shares], -1).flatten(0, 1)
    row = exchange(messages)
    of_kinds = row.split([x.shape[2] * x.shape[3] for x in shares], -1)
    q, k, v = (
        features.unflatten(1, x.shape[2:]).transpose(0, 1)
        for features, x in zip(of_kinds, shares, strict=True)
    )
    return q, k, v


def to_tokens(out: torch.Tensor, ranks: int, exchange: MessageExchange) -> torch.Tensor:
    """This rank's tokens with all heads, from the row with its own; [tokens, heads, dim]."""
    received = exchange(out.flatten(1).contiguous())
    shares = received.unflatten(0, (ranks, -1)).unflatten(2, out.shape[1:])
    return shares.transpose(0, 1).flatten(1, 2)


def own_heads(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """This rank's share of something that each head has, [heads]."""
    return x.chunk(group.size())[group.rank()]


class OwnTokens:
    """This rank's tokens of a row of sequences in `blocks`, of which there are (number, length).

    Its first sequence has `before` more tokens, which earlier chunks have computed. The rank's
    queries attend to `keys`, a slice of all tokens. It begins with `earlier` tokens of the first
    query's sequence. `blocks` and `starts` are what `Packing` has. The class is no dataclass, of
    which FSDP passes copies to the layers.

    Example: of sequences of 3 and 5 tokens the second of two ranks has queries 4 to 7. It attends
    to keys 3 to 7, the first of which is earlier.
    """

    def __init__(
        self,
        blocks: Sequence[tuple[int, int]],
        group: ProcessGroup,
        device: torch.device,
        before: int = 0,
    ) -> None:
        size = sum(count * length for count, length in blocks) // group.size()
        start, stop = group.rank() * size, (group.rank() + 1) * size
        lengths, end, first = [], 0, start
        for length in (length for count, length in blocks for _ in range(count)):
            begin, end = end, end + length
            if begin < stop and end > start:
                first = min(first, begin)
                lengths.append(min(end, stop) - max(begin, start))
        self.earlier = start - first + before
        self.keys = slice(first, stop + before)
        runs = groupby(lengths[1:])
        self.blocks = ((1, lengths[0]), *((len([*run]), length) for length, run in runs))
        self._ends, self._device = torch.tensor([0, *lengths]).cumsum(0), device
        self._starts: tuple[torch.Tensor, torch.Tensor] | None = None

    def starts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first query and key of each sequence, and the ends [sequences + 1], int32."""
        if self._starts is None:  # where attention asks for them: each is a copy to the GPU
            of_keys = self._ends + self.earlier
            of_keys[0] = 0
            queries, keys = (x.to(self._device, torch.int32) for x in (self._ends, of_keys))
            self._starts = queries, keys
        return self._starts


def gather_tokens(
    key: torch.Tensor, value: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all tokens [kv_heads, tokens, dim], from this rank's, differentiable."""
    shares = [x.transpose(0, 1).flatten(1) for x in (key, value)]
    row = funcol.all_gather_tensor_autograd(torch.cat(shares, -1), 0, group)
    of_kinds = row.split([x.shape[1] for x in shares], -1)
    keys, values = (x.unflatten(1, (len(key), -1)).transpose(0, 1) for x in of_kinds)
    return keys, values
