"""The bookkeeping of lanes and blocks, without a model."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.engines.rollout.admission import Admission
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.requests import append_reply, end_turn

BLOCK = 4


def check(admission: Admission) -> None:
    """The invariants that the class names."""
    held: dict[int, int] = {}
    entries = [(lane, entry) for lane in admission.lanes for entry in lane.entries]
    for lane, entry in entries:
        assert entry.lane is lane
        assert entry.length <= len(entry.blocks) * BLOCK + 1
        assert admission.tables[entry.slot, : len(entry.blocks)].tolist() == entry.blocks
    users = [e.blocks for e in admission._entries.values()]
    users += [prefix.blocks or [] for prefix in admission._prefixes.values()]
    for blocks in users:
        for block in blocks:
            held[block] = held.get(block, 0) + 1
    assert all(admission.allocator.count(block) == count for block, count in held.items())
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
        assert step <= 100 or admission.num_running, "nothing runs"
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
