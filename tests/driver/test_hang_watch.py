"""Ranks that are stuck: what each is in, and which ones the others wait for."""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import pytest
import stuck_ranks
from stuck_ranks import run_rank

from hybridrl.config import ProcessesClusterConfig
from hybridrl.driver.hang_watch import Hang, HangWatch
from hybridrl.system import activity, rank_looks
from hybridrl.system.activity import ActivityRecord, file_of, read

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


@pytest.mark.parametrize("ranks", ["asleep"], indirect=True)
def test_a_stretch_that_is_new_is_named_and_goes_on(
    ranks: Sequence[BaseProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("hybridrl.driver.hang_watch.LEARNED", 9)
    watch = HangWatch(config(start_s=1.0), tmp_path)
    until = time.monotonic() + ENDS_S
    while not caplog.records and time.monotonic() < until:
        assert watch.check([0, 1], []) is None
        time.sleep(0.05)
    (record,) = caplog.records
    assert "rank 0" in record.getMessage()
    assert "rank 1" in record.getMessage()
    time.sleep(1.1)
    assert watch.check([0, 1], []) is None  # it has been said
    assert len(caplog.records) == 1


def test_a_call_that_is_not_taken_is_a_hang(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=activity.record_to, args=(file_of(tmp_path, 0),))
    process.start()
    process.join()  # its record says that it waits for a call
    watch = HangWatch(config(), tmp_path)
    until = time.monotonic() + 2 * FLOOR_S + 1
    while time.monotonic() < until:
        assert watch.check([0], []) is None  # nobody waits for it
        time.sleep(0.2)
    hang = first_hang(watch)
    assert hang.stuck == (0,)
    assert hang.reason.startswith("it is stuck before it takes its call, for ")
    assert hang.reason.endswith("it has ended")


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
