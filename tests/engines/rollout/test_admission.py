"""The bookkeeping of lanes and blocks, without a model."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.engines.rollout.admission import Admission
from hybridrl.engines.rollout.interface import Request, SamplingParams

BLOCK = 4


def check(admission: Admission) -> None:
    """The invariants that the class names."""
    held: dict[int, int] = {}
    entries = [(lane, entry) for lane in admission.lanes for entry in lane.entries]
    for lane, entry in entries:
        assert entry.lane is lane
        assert entry.length <= len(entry.blocks) * BLOCK + 1
        assert admission.tables[entry.slot, : len(entry.blocks)].tolist() == entry.blocks
    users = [e.blocks for _, e in entries]
    users += [prefix.blocks or [] for prefix in admission._prefixes.values()]
    for blocks in users:
        for block in blocks:
            held[block] = held.get(block, 0) + 1
    assert all(admission.allocator.count(block) == count for block, count in held.items())
    assert admission.allocator.num_free == admission.allocator.num_blocks - len(held)
    assert len({entry.slot for _, entry in entries}) == len(entries)
    assert all(entry.slot < 0 and not entry.blocks for entry in admission._waiting)


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(8, 30), st.randoms(use_true_random=False))
def test_lanes_drain_the_queue(
    num_lanes: int, max_running: int, num_blocks: int, draw: random.Random
) -> None:
    """Any mixture of steps and parks keeps the invariants; in the end everything is generated."""
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
            waiting += [r for id_ in ids if (r := admission.remove(id_)) is not None]
        if draw.random() < 0.5 or step > 100:
            admission.submit(waiting)
            waiting = []
        for lane in admission.lanes:
            admission.admit(lane)
            admission.grow(lane)
            check(admission)
        assert step <= 100 or admission.num_running, "nothing runs"
        for lane in admission.lanes:
            for entry in list(lane.entries):
                entry.request.response_ids.append(0)
                if len(entry.request.response_ids) == wanted[entry.request.id]:
                    done[entry.request.id] = len(entry.request.response_ids)
                    admission.remove(entry.request.id)
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
        admission.remove(id_)
    for lane in admission.lanes:
        admission.admit(lane)
    assert [[e.request.id for e in lane.entries] for lane in admission.lanes] == [[5, 6], [3], [4]]
