"""Attention over a row whose tokens several ranks share (DeepSpeed-Ulysses, arXiv 2309.14509).

Outside of attention each rank has consecutive tokens and all heads; inside, all tokens and some
heads. One all-to-all goes there and one comes back, so what attends (windows, sinks, packing) sees
the row as one rank would:

    rank 0: tokens 0-3, heads 0-3          rank 0: tokens 0-7, heads 0-1
    rank 1: tokens 4-7, heads 0-3   <->    rank 1: tokens 0-7, heads 2-3
"""

from collections.abc import Callable
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
