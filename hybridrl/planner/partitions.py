"""Partitions of roles into pools, and of ranks among pools (HybridFlow, section 6, algorithm 1)."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

_Item = TypeVar("_Item")

_SHARES = 16
"""Pools of a large cluster have sixteenths of it."""


def set_partitions(items: Sequence[_Item]) -> Iterator[list[list[_Item]]]:
    """Every way to divide items into sets that are not empty: 1, 2, 5, 15, ... (Bell numbers).

    The first item is in the first set.
    """
    if not items:
        yield []
        return
    *others, last = items
    for sets in set_partitions(others):
        for index in range(len(sets)):
            yield [*sets[:index], [*sets[index], last], *sets[index + 1 :]]
        yield [*sets, [last]]


def allocations(ranks: int, pools: int, step: int) -> Iterator[tuple[int, ...]]:
    """Every way to deal `ranks` to pools, in multiples of `step`, none of them empty."""
    if pools == 1:
        yield (ranks,)
        return
    for first in range(step, ranks - step * (pools - 1) + 1, step):
        for others in allocations(ranks - first, pools - 1, step):
            yield (first, *others)


def allocation_step(ranks: int, pools: int) -> int:
    """Ranks by which the sizes of pools differ: one on few ranks, else a sixteenth of them."""
    step = max(1, ranks // _SHARES)
    return step if pools * step <= ranks else 1
