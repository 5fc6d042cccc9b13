"""The bookkeeping of lanes and blocks, without a model."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.engines.rollout.admission import Admission
from hybridrl.engines.rollout.blocks import NO_BLOCKS
from hybridrl.engines.rollout.entries import Entry
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.requests import append_reply, end_turn

BLOCK = 4


def check(admission: Admission) -> None:
    """The invariants that the class names."""
    held: dict[int, int] = {}
    entries = [(lane, entry) for lane in admission.lanes for entry in lane.entries]
    for lane, entry in entries:
        assert entry.lane is lane
        num = admission.num_blocks[entry.slot]
        assert entry.length <= num * BLOCK + 1
        assert not len(entry.blocks)
        assert admission.tables[entry.slot, :num].all()
        assert not admission.tables[entry.slot, num:].any()
    users = [
        admission.tables[entry.slot, : admission.num_blocks[entry.slot]] for _, entry in entries
    ]
    users += [entry.blocks for entry in admission._entries.values()]
    users += [p.blocks for p in admission._prefixes.values() if p.blocks is not None]
    for block in np.concatenate([NO_BLOCKS, *users]).tolist():
        held[block] = held.get(block, 0) + 1
    counts = admission.allocator.count(np.array(list(held), np.int64))
    assert counts.tolist() == list(held.values())
    assert admission.allocator.num_free == admission.allocator.num_blocks - len(held)
    assert len({entry.slot for _, entry in entries}) == len(entries)
    idle = [*admission.waiting, *admission._held.values()]
    assert len(entries) + len(idle) == len(admission._entries)
    for entry in idle:
        assert entry.slot < 0
        assert entry.kept <= entry.length - 1
        assert len(entry.blocks) == -(-entry.kept // BLOCK)
    orders = [entry.order for entry in admission.waiting]
    assert orders == sorted(orders)


def room(admission: Admission, entry: Entry) -> int:
    """The tokens that a row may grow by without another block."""
    return int(admission.num_blocks[entry.slot]) * BLOCK - entry.length


@pytest.mark.long
@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(8, 30), st.randoms(use_true_random=False))
def test_lanes_drain_the_queue(
    num_lanes: int, max_running: int, num_blocks: int, draw: random.Random
) -> None:
    """Any mixture of steps, parks and turns keeps the invariants; in the end all is generated."""
    admission = Admission(
        num_lanes=num_lanes, max_running=max_running, block_size=BLOCK, num_blocks=num_blocks,
        max_sequence=30, vocab_size=9,
    )  # fmt: skip
    waiting = [
        Request(i, [i // 3] * (1 + i // 3 * 4), SamplingParams(draw.randint(1, 12)), i, i // 3)
        for i in range(12)
    ]
    wanted = {request.id: request.sampling.max_new_tokens for request in waiting}
    done: dict[object, int] = {}
    for step in range(1000):
        if draw.random() < 0.2:
            ids = draw.sample(sorted(wanted), 3)
            waiting += admission.remove(ids)
        for id_ in [id_ for id_ in admission._held if draw.random() < 0.3 or step > 100]:
            append_reply(admission.held(id_), [0], 9)
            admission.answer(id_)
        if draw.random() < 0.5 or step > 100:
            admission.submit(waiting)
            waiting = []
        for lane in admission.lanes:
            admission.admit(lane)
            admission.grow(lane)
            check(admission)
            assert all(0 <= lane.steps_left <= room(admission, entry) for entry in lane.entries)
        # One that was parked while it was held is answered in the next round.
        assert step <= 100 or admission.num_running or admission.num_held, "nothing runs"
        for lane in admission.lanes:
            for entry in list(lane.entries):
                request = entry.request
                request.response_ids.append(0)
                left = wanted[request.id] - len(request.response_ids)
                if left == 0:
                    done[request.id] = len(request.response_ids)
                    admission.remove([request.id])
                elif left > 1 and draw.random() < 0.3:
                    end_turn(request, "stop")
                    admission.hold([request.id])
                    check(admission)
        if len(done) == len(wanted):
            break
    assert done == wanted
    assert admission.allocator.num_free == num_blocks


def test_lanes_share_alike() -> None:
    """As many lanes as possible have work, in the order of submission."""
    admission = Admission(
        num_lanes=3, max_running=5, block_size=BLOCK, num_blocks=99, max_sequence=30, vocab_size=9
    )
    admission.submit([Request(i, [1], SamplingParams(4), i) for i in range(7)])
    for lane in admission.lanes:
        admission.admit(lane)
    assert [[e.request.id for e in lane.entries] for lane in admission.lanes] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    for id_ in (0, 1, 2):
        admission.remove([id_])
    for lane in admission.lanes:
        admission.admit(lane)
    assert [[e.request.id for e in lane.entries] for lane in admission.lanes] == [[5, 6], [3], [4]]
