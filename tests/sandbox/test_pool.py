"""The pool with real processes: who is to blame fails, and all others are answered."""

import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sandboxed import LONG, Word, WordPool

from hybridrl.config import ConfigError
from hybridrl.sandbox import SandboxProcess, process
from hybridrl.sandbox import pool as sandboxes

Make = Callable[..., WordPool]


@pytest.fixture
def make() -> Iterator[Make]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **more: stack.enter_context(WordPool(*args, **more))


@pytest.fixture(autouse=True)
def grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "GRACE_S", 0.5)


DIED = ("crash", "its process ended (exit code 3)")
LATE = ("timeout", "too late")


@pytest.mark.long
def test_only_the_guilty_fail(make: Make) -> None:
    garbage = "crash", "its process ended (SIGKILL)"
    bad = {"die": DIED, "hang": LATE, "spin": LATE, "late": LATE, "garbage": garbage}
    words = [word for pair in zip(bad, "abcde", strict=True) for word in ("pause", *pair)]
    results = list(zip(words, make(2).all(*words), strict=True))
    assert {word: told for word, told in results if word in bad} == bad
    assert [told for word, told in results if word not in bad and word not in told[1]] == []


@pytest.mark.long
def test_who_is_told_from_the_others_by_being_alone(make: Make) -> None:
    """A death in a thread, of which no mark tells: the suspects are served one by one."""
    results = make(seconds=5).all("pause", "die in a thread", "pause")
    assert results[1] == DIED
    assert [told for _, told in (results[0], results[2])] == [["pause"], ["pause"]]


def test_one_that_is_queued_has_its_time_anew(make: Make) -> None:
    assert make(seconds=3.0).all("queued")[0][1] == ["queued"]  # after four waits of 1 s


@pytest.mark.long
def test_a_process_has_so_many_tasks_and_no_more(make: Make) -> None:
    pool = make(2, window=2, seconds=5.0)
    pool.wait_ready(every=True)
    results = pool.all(*["pause"] * 6)
    assert {len(told) for _, told in results} == {1, 2}
    assert len({pid for pid, _ in results}) == 2


@pytest.mark.long
def test_answers_come_many_at_a_time_or_in_pieces(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "short", "long"
    words = [f"{number}" for number in range(300)]
    pool = make(seconds=30.0)
    assert [told for _, told in pool.all(*whole)] == [["short"], ["long", LONG]]
    assert [told for _, told in pool.all(*words)] == [[word] for word in words]
    monkeypatch.setattr(process, "LARGEST_ANSWER", 1 << 20)
    assert pool.all("long") == [("crash", "its process ended (SIGKILL)")]


def test_an_answer_that_came_with_garbage_behind_it_counts(make: Make) -> None:
    pool = make(seconds=5.0)
    ((first, told),) = pool.all("noise")
    ((second, _),) = pool.all("a")
    assert told == ["noise"]
    assert first != second  # the process that wrote garbage is gone


def test_a_future_of_several_tasks_is_cancelled_once(make: Make) -> None:
    """As that of responses that are judged together, where a pool ends before they are."""
    pool = make()
    shared: Future[Any] = Future()
    tasks = [Word(word="late", future=shared), Word(word="late", future=shared), Word(word="late")]
    for task in tasks:
        pool._do(functools.partial(pool._queue.append, task), task.future)
    pool.close()
    assert all(task.future.cancelled() for task in tasks)


def test_a_process_that_died_while_idle_blames_nobody(make: Make) -> None:
    pool = make()
    ((pid, _),) = pool.all("a")
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.05)
    ((again, told),) = pool.all("a")
    assert (again != pid, told) == (True, ["a"])


def test_a_death_is_seen_without_pidfd_and_waitid(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, by the end of the connection."""
    monkeypatch.setattr(process, "_handle_of", lambda pid: None)
    monkeypatch.delattr(os, "waitid")
    assert make().all("a", "die")[1] == DIED


@pytest.mark.long
def test_a_process_that_reads_nothing_holds_nobody_up(make: Make) -> None:
    """Not even the owner, when what it sends fills the connection."""
    pool = make()
    ((pid, _),) = pool.all("a")
    while pool._processes[0].mark.read()[0]:
        time.sleep(0.01)  # it has answered, and is about to say that it has ended
    os.kill(pid, signal.SIGSTOP)
    assert pool.all("x" * (4 << 20))[0] == LATE
    assert pool.all("a")[0][1] == ["a"]


def test_what_cannot_be_sent_and_what_comes_too_late(make: Make) -> None:
    pool = make()
    kind, error = pool.say(lambda: 0).result(60)
    assert kind == "error"
    assert "pickle" in error
    cancelled, waits = pool.say("late"), pool.say("late")
    assert cancelled.cancel()
    pool.close()
    pool.close()
    assert waits.cancelled()
    with pytest.raises(ValueError, match="the word pool is closed"):
        pool.say("a").result(60)


class Unreadable:
    """It is pickled here, and raises where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_a_request_that_cannot_be_read_costs_no_other(make: Make) -> None:
    """They come in one message, and are served by one process."""
    pool = make(seconds=5.0)
    pool.wait_ready()
    words = ["pause", Unreadable(), "a", "pause", Unreadable(), "b"]
    told = [future.result(60) for future in [pool.say(word) for word in words]]
    error = "error", "ValueError: invalid literal for int() with base 10: 'no number'"
    assert [told[1], told[4]] == [error, error]
    others = [told[i] for i in (0, 2, 3, 5)]
    assert len({pid for pid, _ in others}) == 1
    assert [words[-1] for _, words in others] == ["pause", "a", "pause", "b"]
    assert pool.all("c") == [(others[0][0], ["c"])]


@pytest.mark.parametrize(
    ("word", "kind", "message"),
    [
        ("refuse", ConfigError, r"sandbox\.word=refuse: wanted another word"),
        ("raise", RuntimeError, "a word process did not start.*RuntimeError: no such word"),
        ("die", RuntimeError, r"a word process was not ready .* \(exit code 7\)"),
    ],
)
def test_a_service_that_is_not_built_says_why(
    make: Make, word: str, kind: type[Exception], message: str
) -> None:
    pool = make(word=word)
    with pytest.raises(kind, match=message):
        pool.wait_ready()
    with pytest.raises(kind, match=message):
        pool.say("a").result(60)


@pytest.mark.parametrize("word", ["", "spin"])
def test_nothing_is_left_when_the_owner_is_killed(word: str) -> None:
    script = (
        "import sys\n"
        "from sandboxed import WordPool\n"
        "pool = WordPool(seconds=100.0)\n"
        "print(pool.all('a')[0][0], flush=True)\n"
        "pool.say(sys.argv[1])\n"
        "input()\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, word],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert alive(pid)
    time.sleep(0.2)
    owner.kill()
    owner.communicate()
    deadline = time.monotonic() + 30
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which waits for a slow init, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_no_others_overtake_a_suspect() -> None:
    """It waits for a process without requests; others go to those that it does not wait for."""
    served = list[tuple[int, str]]()

    def serve(process: SandboxProcess, task: Word) -> None:
        process.requests[len(served)] = task
        process.tasks.add(task)
        served.append((processes.index(process), task.word))

    processes = [SandboxProcess.__new__(SandboxProcess) for _ in range(2)]
    for number, one in enumerate(processes):
        one.ready, one.mark = True, SimpleNamespace(read=lambda: (0, 0.0))  # type: ignore
        one.requests = {-1: Word(word="first")}
        one.tasks = {Word(word="there") for _ in range(number)}
    processes[1].requests[-2] = Word(word="another")
    pool = WordPool.__new__(WordPool)
    pool._processes, pool._serve, pool.window = processes, serve, float("inf")  # type: ignore
    pool._queue = deque(
        [Word(word="a"), Word(word="suspect", suspect=True), Word(word="b"), Word(word="c")]
    )
    pool._give()
    assert served == [(0, "a"), (1, "b"), (1, "c")]
    pool._queue.append(Word(word="d", suspect=True))
    processes[0].requests.clear()
    pool._give()
    assert served[3:] == [(0, "suspect")]
    pool._queue.append(Word(word="e"))
    pool._give()
    assert served[4:] == [(1, "e")]
    processes[0].requests.clear()
    pool._give()
    assert served[5:] == [(0, "d")]
