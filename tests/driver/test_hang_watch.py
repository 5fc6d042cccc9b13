"""Ranks that are stuck: what each is in, and which ones the others wait for."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import pytest
import stuck_ranks
from stuck_ranks import run_rank

from hybridrl.config import ProcessesClusterConfig
from hybridrl.driver.hang_watch import Hang, HangWatch
from hybridrl.system import activity, rank_looks
from hybridrl.system.activity import Activity, ActivityRecord, file_of, last_call, read

FLOOR_S = 0.5
ENDS_S = 60.0


def config(factor: float = 10.0, start_s: float = 120.0) -> ProcessesClusterConfig:
    return ProcessesClusterConfig(hang_floor_s=FLOOR_S, hang_factor=factor, start_timeout_s=start_s)


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Sequence[BaseProcess]]:
    context = multiprocessing.get_context("forkserver")
    started = [context.Process(target=run_rank, args=(r, tmp_path, request.param)) for r in (0, 1)]
    for process in started:
        process.start()
    yield started
    for process in started:
        process.kill()
        process.join()


def first_hang(watch: HangWatch) -> Hang:
    until = time.monotonic() + ENDS_S
    while time.monotonic() < until:
        if (hang := watch.check([0, 1], [0, 1])) is not None:
            return hang
        time.sleep(0.05)
    raise AssertionError("no hang was found")


WHERE = {
    "asleep": "it is at update (tests/stuck_ranks.py",
    "held": "it is at update (tests/stuck_ranks.py",
    "stopped": "it is stopped by a signal",
}


@pytest.mark.parametrize(("ranks", "how"), [(how, how) for how in WHERE], indirect=["ranks"])
def test_the_rank_that_others_wait_for_is_named(
    ranks: Sequence[BaseProcess], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asleep, in C with the interpreter, stopped: the other one waits in a collective."""
    monkeypatch.setattr(rank_looks, "_OWN", str(Path(stuck_ranks.__file__).parent))
    hang = first_hang(HangWatch(config(3.0), tmp_path))
    assert hang.stuck == (1,)
    assert hang.reason.startswith("it is stuck in update, forward 2, for ")
    assert WHERE[how] in hang.reason
    waits, stuck = hang.lines
    assert f"rank 0, pid {ranks[0].pid}: update, forward 2; for " in waits
    assert "waits for others in all_reduce, called by update (tests/stuck_ranks.py" in waits
    assert f"rank 1, pid {ranks[1].pid}: update, forward 2; for " in stuck


@pytest.mark.parametrize("ranks", ["new"], indirect=True)
def test_a_stretch_that_is_new_is_named_and_goes_on(
    ranks: Sequence[BaseProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One rank is past its bound, since it waits for one that compiles for the first time."""
    watch = HangWatch(config(3.0, start_s=2.0), tmp_path)
    until = time.monotonic() + ENDS_S
    while not caplog.records and time.monotonic() < until:
        assert watch.check([0, 1], [0, 1]) is None
        time.sleep(0.05)
    waits = read(file_of(tmp_path, 0))
    assert waits is not None
    assert waits.seconds > watch.most(waits)
    (record,) = caplog.records
    assert "waits for others in all_reduce" in record.getMessage()
    assert "update, compile" in record.getMessage()
    time.sleep(1.1)
    assert watch.check([0, 1], [0, 1]) is None
    assert len(caplog.records) == 1  # it has been said


@pytest.mark.parametrize("ranks", ["asleep"], indirect=True)
def test_a_pause_of_the_whole_run_is_no_hang(
    ranks: Sequence[BaseProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = HangWatch(config(3.0), tmp_path)
    until = time.monotonic() + ENDS_S
    while (one := read(file_of(tmp_path, 0))) is None or not one.call or one.seconds < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    monkeypatch.setattr("hybridrl.driver.hang_watch._PAUSE_S", 1.0)
    watch._looked -= 5
    assert watch.check([0, 1], [0, 1]) is None
    monkeypatch.undo()
    assert first_hang(watch).stuck == (1,)


@pytest.mark.parametrize("call", ["add_gradient", "draw", "score_tokens"])
def test_a_call_of_a_client_is_no_bound_for_another_s(call: str, tmp_path: Path) -> None:
    """Each is as long as its request is large."""
    watch = HangWatch(config(), tmp_path)
    known = Activity(1, 1, call, "decode", 0, 0.0, times=100, longest=0.01)
    assert watch.most(known) == watch.config.timeout_s
    assert watch.most(replace(known, call="advance")) == FLOOR_S


def idle(run_dir: Path) -> None:
    activity.record_to(file_of(run_dir, 0))
    time.sleep(ENDS_S)


def test_one_that_is_stopped_before_it_takes_its_call(tmp_path: Path) -> None:
    """A rank without a call may be at user code beside them, so it is stuck if it is stopped."""
    process = multiprocessing.get_context("fork").Process(target=idle, args=(tmp_path,))
    process.start()
    watch = HangWatch(config(), tmp_path)
    try:
        while read(file_of(tmp_path, 0)) is None:
            time.sleep(0.05)
        for _ in range(3):
            assert watch.check([0], [0]) is None  # it does not run a call, that is all
            time.sleep(FLOOR_S)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        for _ in range(3):
            assert watch.check([0], []) is None  # nobody waits for it
            time.sleep(FLOOR_S)
        until = time.monotonic() + ENDS_S
        while (hang := watch.check([0], [0])) is None and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        process.kill()
        process.join()
    assert hang is not None
    assert hang.stuck == (0,)
    assert hang.reason.startswith("it is stuck before it takes its call, for ")
    assert hang.reason.endswith("it is stopped by a signal")
    assert read(file_of(tmp_path, 0)) is None  # its process has ended


def test_records_of_other_nodes_and_processes_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have processes of the same numbers: these must get no signal."""
    path = file_of(tmp_path, 0)
    with monkeypatch.context() as patched:
        patched.setattr(activity, "_node", lambda: bytes(range(16)))
        ActivityRecord(path).begin("update")
        assert read(path) is not None
    assert read(path) is None
    with monkeypatch.context() as patched:
        patched.setattr(activity, "_start_of", lambda pid: 1)
        ActivityRecord(path).begin("update")
        assert read(path) is not None
    assert read(path) is None
    assert last_call(path) == "update"  # which tells where a rank has died
    path.write_bytes(bytes(path.stat().st_size))
    assert read(path) is None
    assert last_call(path) == ""


def test_a_rank_that_cannot_record_works_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / activity.FOLDER).write_text("a file")
    before = activity._own
    activity.record_to(file_of(tmp_path, 0))
    assert activity._own is before
    assert "nobody sees what this rank is in" in caplog.text


def test_no_false_alarm_where_ranks_are_slow_at_random(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,000 steps of three stretches each, up to three times as slow; the first one ten times."""
    now = [0.0]
    monkeypatch.setattr("hybridrl.system.activity.time.monotonic", lambda: now[0])
    record, draw = ActivityRecord(file_of(tmp_path, 0)), Random(0)
    watch = HangWatch(config(5.0, 30.0), tmp_path)
    longest = {"fetch": 0.1, "forward": 0.8, "optimizer": 0.3}
    share = []
    for step in range(2_000):
        record.begin("update")
        for stretch, seconds in longest.items():
            record.mark(stretch, step)
            now[0] += seconds * draw.uniform(1, 3) * (10 if step == 0 else 1)
            one = read(file_of(tmp_path, 0))
            assert one is not None
            assert (one.call, one.stretch, one.number) == ("update", stretch, step)
            share.append(one.seconds / watch.bound(one))
        record.begin("")
    assert max(share) < 1
    assert max(share[-300:]) > 0.15  # the bound is not so long that it says nothing


def test_a_record_is_read_whole_while_it_is_written(tmp_path: Path) -> None:
    record = ActivityRecord(file_of(tmp_path, 3))
    with_numbers = {"micro-batch": 1, "forward": 2}
    record.begin("update")
    for stretch in [*with_numbers] * 500:
        record.mark(stretch, with_numbers[stretch])
        one = read(file_of(tmp_path, 3))
        assert one is not None
        assert with_numbers[one.stretch] == one.number
    assert one is not None
    assert one.times == 499
    assert read(file_of(tmp_path, 4)) is None
    assert rank_looks.recorded_ranks(tmp_path) == [3]
