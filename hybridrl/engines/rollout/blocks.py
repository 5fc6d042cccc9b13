"""Free list and reference counts of KV blocks (Kwon et al., arXiv 2309.06180)."""

import numpy as np
import numpy.typing as npt

Blocks = npt.NDArray[np.int64]
"""Distinct numbers of blocks."""

NO_BLOCKS: Blocks = np.zeros(0, np.int64)


class BlockAllocator:
    """Gives blocks of the KV cache to sequences, which may share them.

    Invariant: every block is either free (count 0, in the free list once) or held (count > 0), and
    `num_free` plus the number of held blocks is `num_blocks`. Blocks are numbered from 1: block 0
    is never allocated, padding of block tables points there.

    Example: `allocate(2)` returns [1, 2]; `share([1])` raises 1's count to 2; `release([1, 2])`
    frees 2.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_free = num_blocks
        # Last freed, first allocated: its memory is still in the processor's cache.
        self._free: Blocks = np.arange(num_blocks, 0, -1)
        self._count = np.zeros(num_blocks + 1, np.int64)

    def count(self, blocks: Blocks) -> npt.NDArray[np.int64]:
        """Reference counts of `blocks`."""
        return self._count[blocks]

    def allocate(self, num: int) -> Blocks:
        """`num` blocks with reference count 1; the caller has checked `num_free`."""
        assert num <= self.num_free, f"{num} blocks wanted, {self.num_free} free"
        self.num_free -= num
        blocks = self._free[self.num_free : self.num_free + num][::-1].copy()
        self._count[blocks] = 1
        return blocks

    def share(self, blocks: Blocks) -> None:
        """Increment the count of `blocks`, which must not be free."""
        self._check_held(blocks)
        self._count[blocks] += 1

    def release(self, blocks: Blocks) -> None:
        """Decrement the count of each block; a block of count 0 is free."""
        self._check_held(blocks)
        self._count[blocks] -= 1
        freed = blocks[self._count[blocks] == 0]
        self._free[self.num_free : self.num_free + len(freed)] = freed
        self.num_free += len(freed)

    def _check_held(self, blocks: Blocks) -> None:
        free = blocks[self._count[blocks] < 1]
        assert not len(free), f"block {free[0]} is free"
