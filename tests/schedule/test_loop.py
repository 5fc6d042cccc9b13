"""The invariants of the loop, by the names that `hybridrl/schedule/loop.py` has for them."""

import random
from collections import Counter
from collections.abc import Callable
from itertools import chain, count
from typing import Any

import pytest
from schedule import test_fused, test_partial
from virtual_executor import VirtualExecutor

from hybridrl.flow import SampleId
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Parked, WorkerDied
from hybridrl.flow.ledger import DropReason, Ledger, SampleStatus
from hybridrl.schedule.instances import Instance, InstanceStatus
from hybridrl.schedule.loop import Loop
from hybridrl.schedule.tail import NoTail
from hybridrl.schedule.tail.early import StreamedUpdate
from hybridrl.schedule.tail.moving import MovingTail


def long_tail(id: SampleId) -> int:
    return random.Random(f"{id}").choice([1, 2, 3, 40])


def fused(executor: Any, **more: Any) -> Any:
    return test_fused.make(executor, test_fused.all_kinds.build({"k": 3}), prompts=6, **more)


def run(executor: Any, num_steps: int = 2, **more: Any) -> Any:
    """Steps with moves, forward passes and early backward while others decode."""
    settings = {"threshold": 6, "max_held": 4, "early": EarlySettings(), **more}
    schedule = fused(executor, **settings)
    results = [schedule.run_step(step) for step in range(num_steps)]
    return schedule, results


def after_events(monkeypatch: pytest.MonkeyPatch, look: Callable[[Loop], None]) -> None:
    """Have the loop looked at after all events of a wait."""
    events = Loop._events

    def looked_at(loop: Loop) -> Any:
        touched = events(loop)
        look(loop)
        return touched

    monkeypatch.setattr(Loop, "_events", looked_at)


class Watched(VirtualExecutor):
    """It notes the calls of instances that are in flight, by the instances that they keep busy."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.flying: dict[int, tuple[int, ...]] = {}
        self.kinds: set[str] = set()
        self.most_busy = 0

    def begin(self, kind: str, number: int) -> None:
        self.kinds.add(kind)
        members = self.wide.get(number, (number,))
        assert not {*members} & {*chain(*self.flying.values())}, (kind, number, self.flying)
        self.flying[number] = members
        self.most_busy = max(self.most_busy, sum(map(len, self.flying.values())))

    def advance(self, instance: int, *args: Any) -> None:
        self.begin("advance", instance)
        super().advance(instance, *args)

    def infer(self, stage: Any, instance: int, samples: Any) -> None:
        self.begin("infer", instance)
        super().infer(stage, instance, samples)

    def train_early(self, stage: Any, instance: int, samples: Any) -> None:
        self.begin("train_early", instance)
        super().train_early(stage, instance, samples)

    def wait(self) -> list[Any]:
        events = super().wait()
        for event in events:
            if isinstance(event, WorkerDied):
                dead = event.instance
                self.flying = {n: all_ for n, all_ in self.flying.items() if dead not in all_}
            elif getattr(event, "instance", None) is not None:
                del self.flying[event.instance]
        return events


def test_one_call_in_flight() -> None:
    """The call of a wide instance is one of all its members."""
    kinds: set[str] = set()
    for seed in range(6):
        executor = Watched(4, seed, long_tail, deaths={40: 1}, widths=(2,))
        run(executor, must_widen=seed % 2)
        kinds |= executor.kinds
        assert executor.most_busy == 4, "all instances were at work at once"
    assert kinds == {"advance", "infer", "train_early"}


def test_one_place(virtual_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at after all events of steps with moves, early backward and a death."""
    seen: set[SampleStatus] = set()

    def look(loop: Loop) -> None:
        held = [*loop.held]
        assert len(held) == len({*held}), "a sample is held twice"
        assert not {*held} & {*loop._queue}
        for task in loop.groups.tasks:
            id = task.sample.id
            status = loop.ledger.status(id)
            seen.add(status)
            places = (id in held) + (id in loop._queue) + loop.ledger.is_finished(id)
            assert places == 1, (id, status)

    after_events(monkeypatch, look)
    for seed in range(6):
        run(virtual_executor(4, seed, long_tail, deaths={9: 1}))
    assert seen >= {SampleStatus.QUEUED, SampleStatus.DECODING, SampleStatus.PARKED}


@pytest.mark.parametrize("partial", [False, True])
def test_versions_change_between_calls(virtual_executor: Any, partial: bool) -> None:
    """The weights change while no instance has a sample or a call; a call's tokens have one
    version, and only what `partial` carries over has several.
    """
    versions = 0
    for seed in range(4):
        executor = virtual_executor(3, seed, long_tail)
        schedule = test_partial.make(executor, {}) if partial else fused(executor, threshold=4)
        instances, sync = schedule.loop.instances, executor.sync_weights

        def synced(instances: Any = instances, sync: Any = sync, schedule: Any = schedule) -> None:
            assert not instances.in_flight
            assert not [*schedule.loop.held]
            assert not schedule.loop._queue
            sync()

        executor.sync_weights = synced
        for step in range(4):
            result = schedule.run_step(step)
            for sample in result.samples:
                of_sample = [span.version for span in sample.spans]
                assert of_sample == sorted({*of_sample})
                assert of_sample[-1:] in ([], [step]) or partial
                versions = max(versions, len(of_sample))
    assert versions > 1 if partial else versions == 1


@pytest.mark.parametrize("partial", [False, True])
def test_leaves_once(virtual_executor: Any, partial: bool) -> None:
    """Through a filter, aborts and a death, to the end of the run."""
    reasons: set[DropReason] = set()
    for seed in range(4):
        ends = lambda id: "abort" if random.Random(f"{id} end").random() < 0.1 else "stop"  # noqa: E731
        executor = virtual_executor(3, seed, long_tail, finish_of=ends, deaths={30: 1})
        how = {"k": 3, "filter": True}
        schedule = test_partial.make(executor, how) if partial else fused(executor, threshold=4)
        left: Counter[SampleId] = Counter()
        for step in range(4):
            result = schedule.run_step(step)
            left.update(sample.id for sample in result.samples)
            left.update([*result.dropped])
            reasons |= {drop.reason for drop in result.dropped.values()}
        ended = schedule.close()
        left.update([*ended])
        assert bool(ended) <= partial
        assert set(left.values()) == {1}
        assert sorted(executor.released) == sorted(left)
        assert not schedule.samples
        assert {id for _, command in executor.submits for id in command.ids} <= left.keys()
    assert reasons >= {DropReason.FILTER, DropReason.ABORTED}


@pytest.mark.parametrize("partial", [False, True])
def test_order_of_ids(virtual_executor: Any, partial: bool) -> None:
    """By prompt, and of one prompt by number, in whatever order they were finished."""
    for seed in range(4):
        executor = virtual_executor(3, seed, long_tail)
        how = {"k": 3}
        schedule = test_partial.make(executor, how) if partial else fused(executor, threshold=4)
        for step in range(3):
            schedule.run_step(step)
        finished = executor.finish_order
        for _, trained in executor.updates:
            ids = [id for id, _ in trained]
            assert len({id.prompt for id in ids}) > 1
            assert len(ids) > len({id.prompt for id in ids}), "groups of several samples"
            assert ids == sorted(ids)
            assert ids != sorted(ids, key=finished.index)


def test_trains_without_samples(virtual_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the first gradient to the next weights, while others decode."""
    num_overlaps = 0

    def look(loop: Loop) -> None:
        nonlocal num_overlaps
        training = [i for i in loop.instances if i.status is InstanceStatus.TRAINING]
        assert not [i.number for i in training if i.held or i.inbox]
        assert {i.number for i in training} == loop.executor.gone_training & loop.executor.alive
        num_overlaps += bool(training) and loop.instances.hold_some

    after_events(monkeypatch, look)
    restarted = 0.0
    for seed in range(4):  # the one that decodes dies while another trains
        executor = virtual_executor(4, seed, long_tail, deaths={92 + seed: 0})
        _, results = run(executor)
        assert executor.num_early
        restarted += results[0].metrics["samples/restarted"]
    assert num_overlaps
    assert restarted


# -- a step that fails -----------------------------------------------------------------------------


def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[SampleId]:
    """The samples that are dispatched from now on."""
    ids: list[SampleId] = []
    dispatch = Ledger.dispatch

    def noted(ledger: Ledger, samples: Any) -> None:
        samples = [*samples]
        ids.extend(sample.id for sample in samples)
        dispatch(ledger, samples)

    monkeypatch.setattr(Ledger, "dispatch", noted)
    return ids


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("call", ["advance", "compute", "infer", "train_early", "wait"])
def test_a_step_that_fails_while_samples_are_made(
    virtual_executor: Any, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    """Its error is the run's, what it has dispatched is dropped, and no other step begins."""
    all_ids = dispatched(monkeypatch)
    executor = virtual_executor(4, 0, long_tail)
    schedule, _ = run(executor, 1)
    before, works, calls = len(all_ids), getattr(executor, call), count(1)

    def fail(*args: Any) -> Any:
        if next(calls) == number:
            raise RuntimeError("no memory")
        return works(*args)

    sync = executor.sync_weights

    def synced() -> None:  # which is waited for before the round
        sync()
        enter = executor.wait

        def entered() -> Any:
            events = enter()
            executor.wait = enter
            setattr(executor, call, fail)
            return events

        executor.wait = entered

    executor.sync_weights = synced
    with pytest.raises(RuntimeError, match=r"^no memory$"):
        schedule.run_step(1)
    check_statuses(schedule)
    failed = all_ids[before:]
    assert len(failed) == len(schedule.samples) == 24
    with pytest.raises(RuntimeError, match=r"^step 1 failed while its samples were made: [^\n]*$"):
        schedule.run_step(2)
    check_left(schedule, executor, all_ids, 24)


def test_a_step_in_which_all_instances_die(
    virtual_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_ids = dispatched(monkeypatch)
    executor = virtual_executor(2, 0, long_tail, deaths={40: 1, 44: 0})
    schedule = fused(executor, threshold=6)
    with pytest.raises(RuntimeError, match=r"^every generation instance has died$"):
        schedule.run_step(0)
    assert [i.status for i in schedule.loop.instances._of.values()] == [InstanceStatus.DEAD] * 2
    assert not [*schedule.loop.held]
    failed = len(schedule.samples)
    with pytest.raises(RuntimeError, match="failed while its samples were made"):
        schedule.run_step(1)
    check_left(schedule, executor, all_ids, failed)


@pytest.mark.parametrize("call", ["sync_weights", "prepare", "update"])
def test_the_step_after_one_that_failed_before_or_after_its_samples_were_made(
    virtual_executor: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """It trains on what it would have trained on."""
    _, (_, _, wanted) = run(virtual_executor(4, 0, long_tail), 3)
    all_ids = dispatched(monkeypatch)
    executor = virtual_executor(4, 0, long_tail)
    schedule, _ = run(executor, 1)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    works = getattr(executor, call)
    setattr(executor, call, fail)
    with pytest.raises(RuntimeError, match=r"^no memory$"):
        schedule.run_step(1)
    setattr(executor, call, works)
    result = schedule.run_step(2)
    assert [s.id for s in result.samples] == [s.id for s in wanted.samples]
    assert [s.scalars for s in result.samples] == [s.scalars for s in wanted.samples]
    assert result.dropped == wanted.dropped
    schedule.close()
    check_left(schedule, executor, all_ids, result.metrics["samples/step_failed"])


def check_statuses(schedule: Any) -> None:
    """An instance that holds samples has the status for it, and each sample one place."""
    loop, ledger = schedule.loop, schedule._ledger
    for instance in loop.instances:
        holds = instance.status in (InstanceStatus.DECODING, InstanceStatus.LEAVING)
        assert bool(instance.held) == holds or instance.status is InstanceStatus.SCORING
    for sample in schedule.samples:
        held = sum(sample.id in instance.held for instance in loop.instances)
        assert held + (sample.id in loop._queue) + ledger.is_finished(sample.id) == 1, sample.id


def check_left(schedule: Any, executor: Any, ids: list[SampleId], num_failed: float) -> None:
    """Every sample that was dispatched has left, so many of them with a step that failed."""
    assert schedule._ledger.num_step_failed == num_failed
    assert not schedule.samples
    assert sorted(executor.released) == sorted(ids)


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
