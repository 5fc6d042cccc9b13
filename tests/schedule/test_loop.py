"""The invariants of the loop, by the names that `hybridrl/schedule/loop.py` has for them."""

import random
from typing import Any

import pytest
from schedule import test_fused, test_partial

from hybridrl.flow import SampleId
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Parked
from hybridrl.flow.ledger import Ledger, SampleStatus
from hybridrl.flow.sample import Sample
from hybridrl.schedule.instances import Instance, Instances, InstanceStatus
from hybridrl.schedule.loop import Loop
from hybridrl.schedule.tail import NoTail
from hybridrl.schedule.tail.early import StreamedUpdate
from hybridrl.schedule.tail.moving import MovingTail


def long_tail(id: SampleId) -> int:
    return random.Random(f"{id}").choice([1, 2, 3, 40])


def fused(executor: Any, **more: Any) -> Any:
    return test_fused.make(executor, test_fused.all_kinds.build({"k": 3}), prompts=6, **more)


def test_one_call_in_flight() -> None:
    instance = Instance(3)
    instance.send(1.0)
    with pytest.raises(AssertionError, match="instance 3 has a call in flight"):
        instance.send(2.0)
    assert instance.returned(4.0) == 3.0
    with pytest.raises(AssertionError, match="instance 3 has no call in flight"):
        instance.returned(5.0)


def test_one_place(virtual_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at after all events of steps with moves, early backward and a death."""
    seen: set[SampleStatus] = set()
    events = Loop._events

    def looked_at(loop: Loop) -> Any:
        touched = events(loop)
        held = [*loop.held]
        assert len(held) == len({*held}), "a sample is held twice"
        assert not {*held} & {*loop._queue}
        for task in loop.groups.tasks:
            id = task.sample.id
            status = loop.ledger.status(id)
            seen.add(status)
            places = (id in held) + (id in loop._queue) + loop.ledger.is_finished(id)
            assert places == 1, (id, status)
        return touched

    monkeypatch.setattr(Loop, "_events", looked_at)
    for seed in range(6):
        executor = virtual_executor(4, seed, long_tail, deaths={9: 1})
        schedule = fused(executor, threshold=6, max_held=4, early=EarlySettings())
        for step in range(2):
            schedule.run_step(step)
    assert seen >= {SampleStatus.QUEUED, SampleStatus.DECODING, SampleStatus.PARKED}
    instance = Instance(0)
    instance.hold(SampleId(0))
    with pytest.raises(AssertionError, match="instance 0 has sample"):
        instance.hold(SampleId(0))


def test_versions_change_between_calls() -> None:
    instances = Instances()
    instances.begin([0, 1])
    instances[1].send(1.0)
    with pytest.raises(AssertionError, match="weights change while a call is in flight"):
        instances.begin([0, 1])
    instances[1].returned(2.0)
    instances[1].hold(SampleId(0))
    with pytest.raises(AssertionError, match="instance 1 has samples of the round before"):
        instances.begin([0, 1])


def test_leaves_once() -> None:
    ledger, sample = Ledger(), Sample(id=SampleId(0))
    ledger.dispatch([sample])
    for status in (SampleStatus.DECODING, SampleStatus.FINISHED, SampleStatus.DROPPED):
        ledger.move(sample.id, status)
    with pytest.raises(AssertionError, match="cannot be used: dropped"):
        ledger.use([sample])
    with pytest.raises(AssertionError, match="dispatched twice"):
        ledger.dispatch([sample])


@pytest.mark.parametrize("partial", [False, True])
def test_order_of_ids(virtual_executor: Any, partial: bool) -> None:
    for seed in range(4):
        executor = virtual_executor(3, seed, long_tail)
        schedule = test_partial.make(executor, {}) if partial else fused(executor, threshold=4)
        for step in range(3):
            schedule.run_step(step)
        for _, trained in executor.updates:
            ids = [id for id, _ in trained]
            assert ids == sorted(ids)
        assert executor.finish_order != sorted(executor.finish_order)


def test_trains_without_samples() -> None:
    instance = Instance(0)
    instance.hold(SampleId(0))
    with pytest.raises(AssertionError, match="instance 0 cannot be training: decoding"):
        instance.become(InstanceStatus.TRAINING)
    other = Instance(1)
    other.become(InstanceStatus.TRAINING)
    with pytest.raises(AssertionError, match="instance 1 trains"):
        other.hold(SampleId(0))


def test_instances_live_as_long_as_the_run(virtual_executor: Any) -> None:
    executor = virtual_executor(3, 0, long_tail, deaths={3: 1})
    schedule = fused(executor)
    schedule.run_step(0)
    loop, first = schedule.loop, schedule.loop.instances[0]
    schedule.run_step(1)
    assert schedule.loop is loop
    assert loop.instances[0] is first
    assert loop.instances[1].status is InstanceStatus.DEAD
    assert [i.number for i in loop.instances] == [0, 2]


# -- the tail ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fused", "partial"])
def test_none_of_the_tail_s_code_runs_where_it_is_off(
    virtual_executor: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def poisoned(*_: Any, **__: Any) -> None:
        raise AssertionError("the tail is off")

    for one in (MovingTail, StreamedUpdate):
        for name, value in vars(one).items():
            if callable(value):
                monkeypatch.setattr(one, name, poisoned)
    executor = virtual_executor(3, 0, long_tail, deaths={5: 1})
    off = fused(executor, threshold=0) if kind == "fused" else test_partial.make(executor, {})
    for step in range(2):
        off.run_step(step)
    assert not [i for i in off.loop.instances if i.keeps]
    with pytest.raises(AssertionError, match="the tail is off"):
        fused(virtual_executor(3, 0, long_tail), threshold=4).run_step(0)


def test_where_there_is_no_tail_nothing_may_come_to_it() -> None:
    with pytest.raises(AssertionError, match="instance 2 gives samples away"):
        NoTail().arrive(Instance(2), Parked((), (), 0, None))
