"""Invariants of the block allocator."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.engines.rollout.blocks import BlockAllocator
from hybridrl.models.paged_attention import KVCache


@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("tsr"), st.integers(0, 11))))
def test_no_leak(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    """Whatever is taken, shared and released: counts match the holders, free ones are distinct."""
    allocator, held = BlockAllocator(num_blocks), list[int]()
    for action, number in actions:
        if action == "t" and number <= allocator.num_free:
            held += allocator.allocate(number).tolist()
        elif held:
            block = held[number % len(held)]
            if action == "s":
                allocator.share(np.array([block]))
                held.append(block)
            elif action == "r":
                allocator.release(np.array([block]))
                held.remove(block)
        assert allocator.num_free == num_blocks - len(set(held))
        blocks = np.arange(1, num_blocks + 1)
        assert allocator.count(blocks).tolist() == [held.count(block) for block in blocks]
    for block in held:
        allocator.release(np.array([block]))
    assert sorted(allocator.allocate(num_blocks)) == list(range(1, num_blocks + 1))


def test_misuse_is_caught() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 free"):
        allocator.allocate(3)
    with pytest.raises(AssertionError, match="is free"):
        allocator.release(np.array([1]))
    with pytest.raises(AssertionError, match="is free"):
        allocator.share(np.array([1]))


def test_a_stage_without_keys_keeps_nothing() -> None:
    """A pipeline's stage may have recurrent layers alone."""
    cache = KVCache(0, 6, 4, 2, 8, torch.float32, torch.device("cpu"))
    kept = cache.read_blocks([1, 2], 7)
    assert kept.shape == (0, 2, 2, 7, 8)
    cache.write_blocks([3, 4], kept)
    cache.copy(torch.tensor([1]), torch.tensor([2]))
