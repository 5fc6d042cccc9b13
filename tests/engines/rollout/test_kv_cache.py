"""Invariants of the block allocator."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.engines.rollout.entries import BlockAllocator


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("tsr"), st.integers(0, 11))))
def test_no_leak(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    """Whatever is taken, shared and released: counts match the holders, free ones are distinct."""
    allocator, held = BlockAllocator(num_blocks), []
    for action, number in actions:
        if action == "t" and number <= allocator.num_free:
            held += allocator.allocate(number)
        elif held:
            block = held[number % len(held)]
            if action == "s":
                allocator.share([block])
                held.append(block)
            elif action == "r":
                allocator.release([block])
                held.remove(block)
        assert allocator.num_free == num_blocks - len(set(held))
        for block in range(1, num_blocks + 1):
            assert allocator.count(block) == held.count(block)
    allocator.release(held)
    assert sorted(allocator.allocate(num_blocks)) == list(range(1, num_blocks + 1))


def test_misuse_is_caught() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        allocator.allocate(3)
    with pytest.raises(AssertionError, match="is free"):
        allocator.release([1])
    with pytest.raises(AssertionError, match="is free"):
        allocator.share([1])
