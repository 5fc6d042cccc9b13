"""Gathered keys and values stay while rows come and go, and the cache gets what they write."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.engines.rollout.kept_groups import KeptGroups
from hybridrl.models.paged_attention import KVCache

BLOCK, PAGES, SLOTS = 4, 10, 12


class Rows:
    """Rows in slots, with a number that tells every token from all others."""

    def __init__(self, draw: random.Random, overhead: int) -> None:
        self.draw, self.tokens, self.length = draw, 0.0, dict[int, int]()
        self.cache = KVCache(2, SLOTS * PAGES + 1, BLOCK, 2, 1, torch.float32, torch.device("cpu"))
        self.kept = KeptGroups(self.cache, 0, overhead, PAGES)
        self.tables = 1 + np.arange(SLOTS * PAGES, dtype=np.int64).reshape(SLOTS, PAGES)
        self.wanted: dict[tuple[int, int], float] = {}
        self.regrouped = 0

    def write(self, slot: int) -> torch.Tensor:
        """The next token's keys and values [2, kv_heads, head_dim] of the second layer."""
        self.tokens += 1
        self.wanted[slot, self.length[slot]] = self.tokens
        return self.tokens + torch.tensor([[[0.0], [0.25]], [[0.5], [0.75]]])

    def join(self, slot: int, length: int) -> None:
        """A row whose first tokens are in the cache."""
        for self.length[slot] in range(length):
            page, offset = divmod(self.length[slot], BLOCK)
            places = torch.tensor([self.tables[slot, page]]), torch.tensor([offset])
            self.cache.write(1, places, self.write(slot)[None])
        self.length[slot] = length

    def step(self) -> None:
        """A decode step, which checks all that it could attend to."""
        before = [id(workspace) for workspace, _ in self.kept._groups]
        self.kept.arrange(list(self.length.items()), self.tables)
        self.regrouped += before != [id(workspace) for workspace, _ in self.kept._groups]
        assert sorted(self.kept.slots) == sorted(self.length)
        slots, groups = self.kept.slots, self.kept.paged_groups()
        for group in groups:
            assert group.workspace is not None
            own = slots[group.start : group.start + group.rows]
            assert group.positions[:, 0].tolist() == [self.length[slot] for slot in own]
            new = torch.stack([self.write(slot) for slot in own])
            halves = torch.stack(group.workspace.fetch(1, new))
            seen = halves.unflatten(1, (len(own), self.cache.kv_heads))
            assert group.keys == max(self.length[slot] for slot in own) + 1
            for row, slot in enumerate(own):
                wanted = [self.wanted[slot, i] for i in range(self.length[slot] + 1)]
                for half, head in np.ndindex(2, 2):
                    got = seen[half, row, head, : len(wanted), 0] - half / 2 - head / 4
                    assert got.tolist() == wanted
            assert seen.isfinite().all()
        self.kept.advance()
        for slot in slots:
            self.length[slot] += 1

    def leave(self, slot: int) -> None:
        """A row goes; the cache has all its tokens then."""
        self.kept.remove([slot], self.tables, keep=True)
        kept = self.cache.read_blocks(self.tables[slot].tolist(), self.length[slot])
        wanted = [self.wanted[slot, i] for i in range(self.length.pop(slot))]
        assert kept[1, 0, 0, :, 0].tolist() == wanted


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(st.sampled_from([0, 3, 100]), st.randoms(use_true_random=False))
def test_rows_come_and_go(overhead: int, draw: random.Random) -> None:
    rows = Rows(draw, overhead)
    for _ in range(30):
        for slot in list(rows.length):
            if draw.random() < 0.15 or rows.length[slot] == BLOCK * PAGES:
                rows.leave(slot)
        free = sorted(set(range(SLOTS)) - rows.length.keys())
        for slot in draw.sample(free, draw.randint(0, min(2, len(free)))):
            rows.join(slot, draw.randint(1, 25))
        if rows.length:
            rows.step()
    for slot in list(rows.length):
        rows.leave(slot)


def test_rows_that_take_turns_seldom_regroup() -> None:
    """One row in twelve leaves at every step, and one joins: few steps group all of them anew."""
    draw = random.Random(0)
    rows = Rows(draw, overhead=40)
    for slot in range(SLOTS):
        rows.join(slot, draw.randint(1, 20))
    rows.step()
    rows.regrouped = 0
    for step in range(60):
        rows.leave(step % SLOTS)
        rows.join(step % SLOTS, draw.randint(1, 20))
        rows.step()
    assert rows.regrouped < 15
