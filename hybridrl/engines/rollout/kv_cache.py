"""Blocks of the paged KV cache (Kwon et al., arXiv 2309.06180), with reference counts."""

from collections.abc import Iterable


class BlockAllocator:
    """Free list and reference counts of KV blocks.

    Invariant: every block is either free (count 0, in the free list once) or held (count > 0), and
    `num_free` plus the number of held blocks is `num_blocks`. Blocks are numbered from 1: block 0
    is never allocated, padding of block tables points there.

    Example: `allocate(2)` returns [1, 2]; `share([1])` raises 1's count to 2; `release([1, 2])`
    frees 2.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Last freed, first allocated: its memory is still in the processor's cache.
        self._free = list(range(num_blocks, 0, -1))
        self._count = [0] * (num_blocks + 1)

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def count(self, block: int) -> int:
        """Reference count of `block`."""
        return self._count[block]

    def allocate(self, num: int) -> list[int]:
        """`num` blocks with reference count 1; the caller has checked `num_free`."""
        assert num <= len(self._free), f"{num} blocks wanted, {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(num)]
        for block in blocks:
            self._count[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Increment the count of `blocks`, which must not be free."""
        for block in blocks:
            assert self._count[block] > 0, f"block {block} is free"
            self._count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Decrement the count of each block; a block of count 0 is free."""
        for block in blocks:
            assert self._count[block] > 0, f"block {block} is free"
            self._count[block] -= 1
            if not self._count[block]:
                self._free.append(block)
