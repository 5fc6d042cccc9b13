"""The model of NCCL's order on logs made by hand, and the recorder on real processes."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_order import P2P, Event, Fault, FaultKind, Log, Message, Op, Sync, Wait, check
from nccl_recorder import Recorder, fake_logs

PAIR = (0, 1)
Ranks = Any


def send(peer: int, num_bytes: int = 8, members: tuple[int, ...] = PAIR) -> Op:
    return Op("g", members, P2P, messages=(Message(True, peer, num_bytes),))


def receive(peer: int, num_bytes: int = 8, members: tuple[int, ...] = PAIR) -> Op:
    return Op("g", members, P2P, messages=(Message(False, peer, num_bytes),))


def batch(*ops: Op) -> Op:
    messages = tuple(message for op in ops for message in op.messages)
    return Op("g", ops[0].members, P2P, messages=messages, batched=True)


def gather(group: str = "g", members: tuple[int, ...] = PAIR, num_bytes: int = 8) -> Op:
    return Op(group, members, "all_gather", num_bytes)


def kinds(*logs: Log) -> list[FaultKind]:
    return [fault.kind for fault in check(logs)]


def waited(*ops: Op) -> list[Event]:
    """Each operation with its wait."""
    return [event for number, op in enumerate(ops) for event in (op, Wait(2 * number))]


# Deadlocks


def test_messages_that_cross_wait_for_each_other() -> None:
    """Each rank sends first, and neither send ends before the other end has begun."""
    faults = check([waited(send(1), receive(1)), waited(send(0), receive(0))])
    assert [fault.kind for fault in faults] == [FaultKind.deadlock]
    assert "rank 0: the compute stream waits for message: send to 1" in faults[0].text
    assert "rank 1: the compute stream waits for message: send to 0" in faults[0].text


def test_a_batch_may_send_and_receive_at_once() -> None:
    warm = gather()
    both = [[warm, batch(send(1), receive(1))], [warm, batch(send(0), receive(0))]]
    assert not kinds(*both)


def test_messages_in_one_order_end() -> None:
    assert not kinds(waited(send(1), receive(1)), waited(receive(0), send(0)))


def test_a_stream_stands_behind_its_first_message() -> None:
    """Nothing waits for the sends, yet the second rank's send is behind its receives."""
    first = [send(1), send(1), receive(1)]
    assert not kinds(first, [receive(0), receive(0), send(0)])
    needs_first = [receive(0), Wait(0), send(0), receive(0), Wait(3)]
    assert kinds(first, needs_first) == [FaultKind.deadlock]


def test_two_groups_in_two_orders() -> None:
    """Creating a communicator blocks the host; once both exist, streams of their own suffice."""
    a, b = gather("a"), gather("b")
    assert kinds([a, b], [b, a]) == [FaultKind.deadlock]
    assert not kinds([a, b, a, b], [a, b, b, a])


def test_the_compute_stream_joins_two_groups() -> None:
    a, b = gather("a"), gather("b")
    first = [a, b, a, Wait(2), b, Wait(4)]
    assert kinds(first, [a, b, b, Wait(2), a, Wait(4)]) == [FaultKind.deadlock]
    assert not kinds(first, [a, b, a, Wait(2), b, Wait(4)])


def test_a_read_blocks_the_host() -> None:
    """The second rank sends after a collective that the first issues after it has read."""
    warm = [gather("a"), gather("b"), receive(1), Wait(2), Sync(), gather("b")]
    other = [gather("a"), gather("b"), gather("b"), Wait(2), send(0)]
    assert kinds(warm, other) == [FaultKind.deadlock]


def test_what_has_ended_holds_nothing_up() -> None:
    """The read lets the first operation end, so its second wait is over at once."""
    log = [gather(), Wait(0), Sync(), Wait(0), gather(), Wait(4), Sync()]
    assert not kinds(log, log)


def test_gloo_blocks_the_host() -> None:
    objects = Op("h", PAIR, "all_gather", 8, host=True)
    early = [gather("a"), objects, Wait(1), gather("b"), gather("a")]
    late = [gather("a"), gather("b"), objects, Wait(2), gather("a")]
    assert kinds(early, late) == [FaultKind.deadlock]
    assert not kinds(early, early)


def test_gloo_keeps_no_order_between_directions() -> None:
    """Tokens that come back do not stand behind hidden states that go on."""
    tokens = Op("g", PAIR, P2P, messages=(Message(True, 0, 8),), host=True)
    back = Op("g", PAIR, P2P, messages=(Message(False, 1, 8),), host=True)
    first = [send(1), back, send(1), Wait(1)]
    assert not kinds(first, [receive(0), Wait(0), Sync(), tokens, Wait(3), receive(0)])
    late = [receive(0), receive(0), Wait(1), Sync(), tokens, Wait(4)]
    assert kinds([send(1), back, Wait(1), send(1)], late) == [FaultKind.deadlock]


def test_a_cycle_of_three() -> None:
    """Each receives from the last before it sends to the next, none begins."""
    three = (0, 1, 2)
    logs = [
        waited(receive((rank - 1) % 3, 8, three), send((rank + 1) % 3, 8, three))
        for rank in range(3)
    ]
    (fault,) = check(logs)
    assert fault.kind is FaultKind.deadlock
    assert all(f"rank {rank}: the host creates" in fault.text for rank in range(3))


def test_who_never_comes_is_named() -> None:
    (fault,) = check([[send(1)], []])
    assert fault.kind is FaultKind.deadlock
    assert fault.text.endswith("rank 1 has ended")


ROOT = Path(__file__).parents[1]


def test_streams_besides_the_compute_stream_carry_copies() -> None:
    """The model has one stream a rank: a collective on another would be a decision."""
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for room in ("hybridrl", "kernels")
        for path in (ROOT / room).rglob("*.py")
    }
    with_streams = [path for path, text in texts.items() if "cuda.Stream(" in text]
    assert sorted(with_streams) == [
        "hybridrl/engines/rollout/graph_capture.py",  # the step's kernels, before they are captured
        "hybridrl/engines/train/activation_offload.py",
        "hybridrl/engines/train/state_memory.py",
    ]
    on_streams = {
        ast.unparse(call.func)
        for text in texts.values()
        if "cuda.stream(" in text
        for block in ast.walk(ast.parse(text))
        if isinstance(block, ast.With) and "cuda.stream(" in ast.unparse(block.items[0])
        for statement in block.body
        for call in ast.walk(statement)
        if isinstance(call, ast.Call)
    }
    assert on_streams == {
        "block.copy_out", "_copy_in", "to.copy_", "self._stream.record_event", "self._step",
    }  # fmt: skip
    assert not any("dist." in texts[path] for path in with_streams)


# The other faults


@pytest.mark.parametrize(
    "other",
    [
        [gather(num_bytes=16)],
        [Op("g", PAIR, "all_reduce", 8)],
        [Op("g", PAIR, "broadcast", 8, root=1)],
        [Op("g", (0, 1, 2), "all_gather", 8)],
        [gather(), gather()],
    ],
    ids=["bytes", "kind", "root", "members", "number"],
)
def test_collectives_that_differ(other: list[Event]) -> None:
    one: list[Event] = [gather()]
    if isinstance(other[0], Op) and other[0].root is not None:
        one = [Op("g", PAIR, "broadcast", 8, root=0)]
    logs: list[Log] = [one, other, []]
    assert FaultKind.differs in kinds(*logs)
    assert FaultKind.differs not in kinds(one, one, [])


def test_messages_of_two_sizes() -> None:
    assert kinds([send(1, 8)], [receive(0, 16)]) == [FaultKind.differs]


def test_a_first_batch_of_some_ranks() -> None:
    three = (0, 1, 2)
    warm = gather(members=three)
    logs = [[batch(send(1, 8, three))], [batch(receive(0, 8, three))], []]
    assert FaultKind.partial_batch in kinds(*logs)
    assert FaultKind.partial_batch in kinds(logs[0], logs[1], [warm])
    assert not kinds(*([warm, *log] for log in logs))


def test_a_cpu_tensor_on_a_device_group() -> None:
    objects = Op("g", PAIR, "all_gather", 8, host=True)
    alone = Op("g", PAIR, "all_gather", 8, host=True, device_only=True)
    assert kinds([alone], [alone]) == [FaultKind.cpu_tensor] * 2
    assert not kinds([objects], [objects])


# The recorder


def recorded_faults(ranks: Ranks, size: int, function: Callable[[], Any]) -> list[Fault]:
    _, logs = ranks.recorded(size, function)
    return check(logs)


def everything() -> list[str]:
    """What a rank may do, in an order that NCCL allows; the log as text, without lines."""
    from torch.distributed import _functional_collectives as functional

    rank, cpu = dist.get_rank(), torch.device("cpu")
    pair = dist.new_group([0, 1])
    with Recorder() as recorder:
        x = torch.ones(2, device=cpu)
        dist.all_reduce(x)
        x[0].item()
        dist.all_gather_object([None, None], rank)
        host = torch.ones(3)
        dist.broadcast(host, 0)
        work = dist.broadcast((x * 2).cpu(), 1, group=pair, async_op=True)
        host.to(cpu)
        work.wait()
        if rank == 0:
            dist.send(x, 1)
        else:
            dist.recv(x, 0)
        functional.wait_tensor(functional.all_reduce(x, "sum", pair))
        dist.barrier()
    names = {pair.group_name: "pair", dist.group.WORLD.group_name: "world"}
    told = []
    for event in recorder.log:
        match event:
            case Op():
                where = "gloo" if event.host else "nccl"
                ends = "".join(f" {m}" for m in event.messages)
                told.append(f"{names[event.group]} {event.kind} {event.num_bytes} {where}{ends}")
                assert event.site.startswith("tests/test_nccl_order.py:")
            case Wait():
                told.append(f"wait {event.op}")
            case Sync():
                told.append("read")
    return told


def test_what_is_recorded(ranks: Ranks) -> None:
    first, second = ranks(2, everything)
    assert first == [
        "world all_reduce 8 nccl", "wait 0",
        "read",  # x[0].item()
        "world all_gather 8 gloo", "wait 3", "world all_gather 5 gloo", "wait 5",
        "world broadcast 12 gloo", "wait 7",
        "read",  # cpu()
        "pair broadcast 8 gloo",
        "read",  # to(cpu) of pageable memory
        "wait 10",
        "world p2p 0 nccl send to 1, 8 B", "wait 13",
        "pair all_reduce 8 nccl", "wait 15",
        "world barrier 0 nccl", "wait 17", "read",
    ]  # fmt: skip
    assert second == [event.replace("send to 1", "receive from 0") for event in first]


def crossed() -> None:
    """gloo buffers what NCCL does not."""
    rank, peer = dist.get_rank(), 1 - dist.get_rank()
    x = torch.zeros(4, device="cpu")
    work = dist.isend(torch.ones(4, device="cpu") * rank, peer)
    dist.recv(x, peer)
    assert work is not None
    work.wait()


def in_batches() -> None:
    peer = 1 - dist.get_rank()
    x, y = torch.zeros(4, device="cpu"), torch.ones(4, device="cpu")
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, y, peer), dist.P2POp(dist.irecv, x, peer)]
    ):
        work.wait()


def in_batches_of_two() -> None:
    if dist.get_rank() < 2:
        in_batches()


def different_sizes() -> None:
    dist.all_reduce(torch.zeros(3 + dist.get_rank(), device="cpu"))


def cpu_on_device_group() -> list[Event]:
    with Recorder(device_only=[dist.group.WORLD.group_name]) as recorder:
        dist.all_reduce(torch.ones(1))
    return recorder.log


def test_each_fault_is_found_in_a_run_that_gloo_lets_pass(ranks: Ranks) -> None:
    (deadlock,) = recorded_faults(ranks, 2, crossed)
    assert deadlock.kind is FaultKind.deadlock
    assert "crossed" in deadlock.text
    assert not recorded_faults(ranks, 2, in_batches)
    (partial, hang) = recorded_faults(ranks, 3, in_batches_of_two)
    assert partial.kind is FaultKind.partial_batch
    assert "of the ranks [0, 1, 2] only [0, 1] begin with a batch" in partial.text
    assert hang.kind is FaultKind.deadlock
    assert [fault.kind for fault in check(fake_logs(2, different_sizes))] == [
        FaultKind.differs,
        FaultKind.deadlock,
    ]
    cpu = check(ranks(2, cpu_on_device_group))
    assert [fault.kind for fault in cpu] == [FaultKind.cpu_tensor] * 2
