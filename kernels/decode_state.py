"""The sequences of a decode step as arrays on the device, which kernels read and advance."""

from dataclasses import dataclass
from typing import Self

import torch

RUNNING, STOPPED, FULL, VACANT = 0, 1, 2, 3
"""Values of `DecodeState.ended`: it goes on; a stop token; its limit; a slot without a sequence."""


@dataclass(slots=True)
class DecodeState:
    """One sequence a slot. All arrays are int32 but `streams` and `temperatures`.

    Every sequence has a pending last token, whose keys and values are not cached yet. A slot is
    VACANT until the host fills it; `advance` moves RUNNING to STOPPED or FULL, and an ended slot
    changes no more. The last slot stays VACANT: rows that only fill a batch up are in it.

    Example: a prompt of 5 tokens and 2 drawn ones has length 6 and count 2. Its next token is drawn
    by uniform 2 of its stream, and its limit of 3 ends it then.
    """

    tables: torch.Tensor
    """[slots, pages]: the blocks of each sequence, 0 behind them."""
    tokens: torch.Tensor
    """[slots]: pending tokens."""
    lengths: torch.Tensor
    """[slots]: cached tokens, which is the position of the pending one."""
    counts: torch.Tensor
    """[slots]: response tokens so far."""
    limits: torch.Tensor
    """[slots]: response tokens that end a sequence."""
    stops: torch.Tensor
    """[slots, stops]: tokens that end a sequence, -1 behind them."""
    ended: torch.Tensor
    """[slots]: see RUNNING."""
    streams: torch.Tensor
    """[slots] int64: keys of the random streams, as the bits of unsigned numbers."""
    temperatures: torch.Tensor
    """[slots] float32: 0 is greedy."""

    @classmethod
    def vacant(cls, slots: int, pages: int, stops: int, device: torch.device) -> Self:
        """A state for `slots` sequences of up to `pages` blocks and up to `stops` stop tokens."""

        def ints(*shape: int, value: int = 0) -> torch.Tensor:
            return torch.full((slots + 1, *shape), value, dtype=torch.int32, device=device)

        return cls(
            tables=ints(pages),
            tokens=ints(),
            lengths=ints(),
            counts=ints(),
            limits=ints(),
            stops=ints(max(stops, 1), value=-1),
            ended=ints(value=VACANT),
            streams=torch.zeros(slots + 1, dtype=torch.int64, device=device),
            temperatures=torch.ones(slots + 1, device=device),
        )
