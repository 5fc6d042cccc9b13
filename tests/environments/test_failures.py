"""Programs that hang, die or lie, in real processes: who is guilty, and what the others lose."""

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from environment_pools import Make, Pool, played, task

from hybridrl.environments import EpisodePool, EpisodeStart, EpisodeStep, ModelTurn, Openings
from hybridrl.sandbox import pool as sandboxes
from hybridrl.sandbox import process

PROGRAMS = '''
import asyncio, ctypes, os, sys, threading, time
from pathlib import Path

HERE, LEFT = Path(__file__).parent, []


def note(name, text):
    with open(HERE / name, "a") as file:
        file.write(f"{text}\\n")


async def echo(task, model, rng):
    """Says what it was told, with a number of chance; a word makes it misbehave."""
    reply, heard = task.messages, []
    note("opened", task.question)
    try:
        while len(heard) < 4:
            turn = await model.turn(reply)
            heard.append(turn.text)
            await asyncio.sleep(0.001 * (task.seed % 3))
            await misbehave(turn.text)
            reply = f"{turn.text}{rng.randint(0, 99)}"
            model.reward(len(heard))
    finally:
        note("closed", task.question)


async def misbehave(word):
    if word == "raise":
        raise ValueError("no such word")
    if word == "exit":
        sys.exit(3)
    if word == "once" and not (HERE / "once").exists():
        note("once", word)
        raise ValueError("only once")
    if word == "die":
        os._exit(3)
    if word == "die once" and not (HERE / "died").exists():
        note("died", word)
        os._exit(3)
    if word == "crash":
        ctypes.string_at(0)
    if word == "hang":
        while True:
            pass
    if word == "wait":
        await asyncio.sleep(1000)
    if word == "child":
        await asyncio.create_task(misbehave("die"))
    if word == "memory":
        bytearray(1 << 34)
    if word == "print":
        print("x" * (1 << 22), flush=True)
        os.write(2, b"x" * (1 << 20))
    if word == "thread":
        if not (HERE / "threads").exists():
            note("threads", word)
            threading.Timer(0.2, os._exit, [3]).start()
        await asyncio.sleep(0.5)
    if word == "cancel":
        raise asyncio.CancelledError
    if word == "compute":
        time.sleep(5)
    if word == "pause":
        await asyncio.sleep(1.0)
    if word == "hang once" and not (HERE / "hung").exists():
        note("hung", word)
        while True:
            pass
    if word == "later":
        LEFT.append(asyncio.create_task(later("hang")))
    if word == "later once":
        LEFT.append(asyncio.create_task(later("hang once")))


async def later(word):
    await asyncio.sleep(0.3)
    await misbehave(word)


async def leaves(task, model, rng):
    """Takes a while to clean up."""
    note("opened", task.question)
    try:
        await model.turn(task.messages)
    finally:
        await asyncio.sleep(0.7)
        note("closed", task.question)


async def blocks(task, model, rng):
    """Holds a thread while the model makes its turn, as a client that is not asynchronous."""
    loop = asyncio.get_running_loop()

    def ask():
        return asyncio.run_coroutine_threadsafe(model.turn(task.messages), loop).result()

    turn = await asyncio.to_thread(ask)
    return float(turn.text)


async def large(task, model, rng):
    await model.turn(task.messages)
    await model.turn("x" * (1 << 20))


async def fickle(task, model, rng):
    """Answers the second turn otherwise when it is run again."""
    note("runs", task.question)
    runs = (HERE / "runs").read_text().splitlines().count(task.question)
    await model.turn(task.messages)
    await model.turn("a")
    turn = await model.turn(f"b{runs}")
    if turn.text == "die":
        os._exit(3)


async def slow(task, model, rng):
    reply = task.messages
    while True:
        await model.turn(reply)
        await asyncio.sleep(0.3)
        reply = "so"


async def unlucky(task, model, rng):
    """Fails once at the start, and once at the first turn."""
    await misbehave("once")
    turn = await model.turn(task.messages)
    await misbehave("die once")
    await model.turn(turn.text)


async def queues(task, model, rng):
    """Is queued for long before its first reply, and before the second one hangs in no queue."""
    await model.turn(task.messages)
    with model.queued():
        await asyncio.sleep(4)
    await model.turn("a")
    with model.queued():
        pass
    await asyncio.sleep(1000)


async def rich(task, model, rng):
    """Earns the numbers of each turn's text."""
    reply = task.messages
    while True:
        turn = await model.turn(reply)
        for number in turn.text.split():
            model.reward(float(number))
        reply = "more"


async def broken(task, model, rng):
    await model.turn("a\\ud800b:")
    await model.turn({"role": "tool", "content": "c\\udfff\\ud83d\\ude00"})


async def stubborn(task, model, rng):
    await model.turn(task.messages)
    while True:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            pass
'''

Id = tuple[Any, ...]


def together(
    pool: EpisodePool, turns: dict[Id, list[str]]
) -> dict[Id, tuple[EpisodeStart, list[EpisodeStep]]]:
    """Episodes side by side, each with a thread that says its turns."""
    results = {}

    def play(id: Id) -> None:
        results[id] = played(pool, task(f"q{id[0]}"), turns[id], id)

    threads = [threading.Thread(target=play, args=[id]) for id in turns]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return {id: results[id] for id in turns}


def clean(number: int, word: str = "ok", at: int = 1) -> dict[Id, list[str]]:
    """Turns of so many episodes; that in the middle says `word`."""
    turns = {(n, "", 0): [f"{n}{letter}" for letter in "abcd"] for n in range(number)}
    turns[(number // 2, "", 0)][at] = word
    return turns


@pytest.mark.parametrize(
    ("word", "kind", "error"),
    [
        ("raise", "error", "ValueError: no such word"),
        pytest.param("exit", "error", "RuntimeError: SystemExit: 3", marks=pytest.mark.slow),
        pytest.param("cancel", "error", "the program has cancelled itself", marks=pytest.mark.slow),
        ("memory", "error", "MemoryError"),
        ("die", "crash", "its process ended (exit code 3)"),
        ("child", "crash", "its process ended (exit code 3)"),
        pytest.param("crash", "crash", "its process ended (SIGSEGV)", marks=pytest.mark.slow),
        ("hang", "timeout", "no answer within environment.turn_timeout_s=1"),
        pytest.param(
            "wait",
            "timeout",
            "no answer within environment.turn_timeout_s=1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_who_is_guilty_fails_and_the_others_are_as_ever(
    make: Make, pool: Pool, word: str, kind: str, error: str
) -> None:
    expected = together(pool(make(PROGRAMS, "echo")), clean(7))
    episodes = pool(make(PROGRAMS, "echo", turn_timeout_s=1.0, memory_mb=1024))
    episodes.wait_ready()
    begin = time.monotonic()
    results = together(episodes, clean(7, word))
    seconds = time.monotonic() - begin
    guilty = (3, "", 0)
    step = results[guilty][1][-1]
    assert (step.failure, step.error) == (kind, error)
    assert len(results[guilty][1]) == 2
    others = [id for id in results if id != guilty]
    assert [results[id] for id in others] == [expected[id] for id in others]
    assert episodes.counts[f"failed/{kind}"] == episodes.counts.total() - sum(
        episodes.counts[name] for name in ("episodes", "turns", "replays")
    )
    if kind == "timeout":
        assert seconds < 4.0  # one limit, a second where the process is started anew


@pytest.mark.parametrize(
    "word",
    [
        "thread",
        *(pytest.param(word, marks=pytest.mark.slow) for word in ("once", "die once", "print")),
    ],
)
def test_who_fails_once_is_as_ever(make: Make, pool: Pool, word: str) -> None:
    expected = together(pool(make(PROGRAMS, "echo")), clean(6, "abc"))
    episodes = pool(make(PROGRAMS, "echo"))
    results = together(episodes, clean(6, word))
    steps = results.pop((3, "", 0))[1]
    assert [step.failure for step in steps] == [None] * 4
    assert steps[-1].rewards == (1.0, 2.0, 3.0, 4.0)
    del expected[(3, "", 0)]
    assert results == expected
    assert (episodes.counts["replays"] > 0) == (word != "print")


@pytest.mark.long
def test_a_start_goes_to_a_process_that_takes_it(make: Make, pool: Pool) -> None:
    """Not to the one with fewest episodes, whose code runs without a pause."""
    episodes = pool(make(PROGRAMS, "echo", num_processes=2))
    episodes.wait_ready(every=True)
    for n in range(3):
        episodes.start((n,), task("q")).result(60)
    alone = next(e for e in episodes._episodes.values() if len(e.home.tasks) == 1)
    computes = episodes.turn(alone.id, ModelTurn("compute"))
    time.sleep(1.5)
    assert episodes.start((3,), task("q")).result(60).failure is None
    assert not computes.done()
    assert computes.result(60).failure is None


def test_each_turn_is_tried_twice_though_the_start_was(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "unlucky"))
    start, steps = played(episodes, task("q"), ["a"])
    assert (start.failure, [step.failure for step in steps]) == (None, [None])
    assert episodes.counts["replays"] == 2


def test_a_task_that_its_program_has_left_is_its_own(make: Make, pool: Pool) -> None:
    """It hangs while that episode waits for the model, and another one is served alone."""
    episodes, guilty, other = pool(make(PROGRAMS, "echo", turn_timeout_s=1.5)), (0, "", 0), (1,)
    for id in (guilty, other):
        assert episodes.start(id, task("q")).result(60).failure is None
    assert episodes.turn(guilty, ModelTurn("later")).result(60).failure is None
    assert episodes.turn(other, ModelTurn("pause")).result(60).failure is None
    step = episodes.turn(guilty, ModelTurn("a")).result(60)
    assert (step.failure, step.error) == (
        "timeout",
        "no answer within environment.turn_timeout_s=1.5",
    )


@pytest.mark.long
def test_a_task_that_hangs_before_a_queued_turn_fails_no_later_turn(
    make: Make, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process does not take the turn; the episode is replayed, and has its second try."""
    monkeypatch.setattr(process, "BUSY_S", 0.1)
    episodes, id = pool(make(PROGRAMS, "echo", turn_timeout_s=1.0)), (0,)
    assert episodes.start(id, task("q")).result(60).failure is None
    assert episodes.turn(id, ModelTurn("later once")).result(60).failure is None
    time.sleep(0.7)
    steps = [episodes.turn(id, ModelTurn(word)).result(60) for word in "abc"]
    assert [step.error for step in steps] == [""] * 3
    assert episodes.counts["replays"] == 1


def test_the_time_in_a_queue_does_not_count(
    make: Make, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the process that serves the episode, and for the pool that waits for the process."""
    monkeypatch.setattr(sandboxes, "GRACE_S", 1.0)
    episodes = pool(make(PROGRAMS, "queues", turn_timeout_s=1.0))
    _, steps = played(episodes, task("q"), ["a", "b"])
    assert [step.failure for step in steps] == [None, "timeout"]
    assert steps[1].error == "no answer within environment.turn_timeout_s=1"


def test_clients_that_block_do_not_wait_for_each_others_threads(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "blocks", turn_timeout_s=5.0, memory_mb=1024))
    episodes.wait_ready()
    starts = [episodes.start((n,), task("q")) for n in range(40)]
    assert {start.result(60).error for start in starts} == {""}
    steps = [episodes.turn((n,), ModelTurn(str(n))) for n in range(40)]
    assert [step.result(60).rewards for step in steps] == [(float(n),) for n in range(40)]


def test_processes_share_the_episodes_however_they_end(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "echo", num_processes=2))
    for n in range(4):
        episodes.start((n,), task("q")).result(60)
        episodes.end((n,))
    played(episodes, task("q"), list("abcd"), (4,))
    played(episodes, task("q"), ["raise"], (5,))
    episodes.start((6,), task("q")).result(60)
    assert sum(len(process.tasks) for process in episodes._processes) == 1


def test_a_reply_of_a_megabyte_is_cut_before_it_is_sent(make: Make, pool: Pool) -> None:
    _, steps = played(pool(make(PROGRAMS, "large", max_reply_tokens=10)), task("q"), ["a"])
    (message,) = steps[0].messages or ()
    assert message["content"] == "x" * 640


@pytest.mark.parametrize(
    "turns",
    [["1e39"], ["-1e39"], ["1e308 1e308"], ["2e38 2e38"], ["2e38", "2e38"], ["2e38 -2e38"]],
    ids=" then ".join,
)
def test_rewards_that_no_rank_can_keep_fail_their_episode(
    make: Make, pool: Pool, turns: list[str]
) -> None:
    """Their sum is what the rank has, in float32."""
    episodes = pool(make(PROGRAMS, "rich"))
    _, steps = played(episodes, task("q"), ["1e38", *turns])
    assert [step.failure for step in steps] == [None] * len(turns) + ["error"]
    assert steps[-1].error.startswith("ValueError: the reward is")


def test_a_replay_that_answers_otherwise_fails(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "fickle"))
    _, steps = played(episodes, task("q"), ["a", "b", "die"])
    assert steps[1].messages == ({"role": "user", "content": "b1"},)
    assert (steps[2].failure, steps[2].error) == (
        "replay",
        "turn 2 is answered otherwise than before",
    )


def test_without_replay_a_dead_process_takes_all_with_it(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "echo", replay=False))
    first, second = (0, "", 0), (1, "", 0)
    for id in (first, second):
        assert episodes.start(id, task("q")).result(60).failure is None
    died = episodes.turn(first, ModelTurn("die")).result(60)
    assert (died.failure, died.error) == ("crash", "its process ended (exit code 3)")
    lost = episodes.turn(second, ModelTurn("a")).result(60)
    assert lost.failure == "crash"
    assert "environment.replay=false" in lost.error
    assert episodes.start((2, "", 0), task("q")).result(60).failure is None


@pytest.mark.slow
def test_the_seconds_of_an_episode_are_bounded(make: Make, pool: Pool) -> None:
    """The seconds of the environment count, not the seconds of the model."""
    episodes = pool(make(PROGRAMS, "slow", turn_timeout_s=0.8, episode_timeout_s=1.0))
    id = (0, "", 0)
    episodes.start(id, task("q")).result(60)
    time.sleep(1.2)
    steps = [episodes.turn(id, ModelTurn("a")).result(60) for _ in range(4)]
    assert [step.failure for step in steps] == [None, None, None, "timeout"]
    assert steps[-1].error == "no answer within environment.episode_timeout_s=1"


def test_environments_are_closed_however_an_episode_ends(
    make: Make, pool: Pool, tmp_path: Path
) -> None:
    config = make(PROGRAMS, "echo", turn_timeout_s=0.5, max_turns=3)
    episodes = pool(config)
    ends = {"ended": "abcd", "raised": ["raise"], "late": ["wait"], "left": "a", "given up": "a"}
    for number, (name, turns) in enumerate(ends.items()):
        played(episodes, task(name), list(turns), (number, "", 0))
    episodes.end((4, "", 0))
    episodes.close()
    closed = (tmp_path / "closed").read_text().splitlines()
    opened = (tmp_path / "opened").read_text().splitlines()
    assert sorted(closed) == sorted(opened)
    assert set(closed) == set(ends)
    assert opened.count("raised") == 2  # and its replay


def test_environments_have_time_to_close_when_the_pool_does(
    make: Make, pool: Pool, tmp_path: Path
) -> None:
    """One episode is given up just before; the pool closes its environment and all others."""
    episodes = pool(make(PROGRAMS, "leaves"))
    for n in range(9):
        episodes.start((n,), task(str(n))).result(60)
    episodes.end((0,))
    episodes.close()
    assert sorted((tmp_path / "closed").read_text().split()) == list("012345678")


@pytest.mark.layouts
def test_a_program_that_cannot_be_ended_holds_nobody_up(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "stubborn", turn_timeout_s=0.3))
    _, steps = played(episodes, task("q"), ["a"])
    assert steps[0].failure == "timeout"
    begin = time.monotonic()
    episodes.close()
    assert time.monotonic() - begin < 8


def test_wrong_calls_are_told_and_harm_nobody(make: Make, pool: Pool) -> None:
    episodes = pool(make(PROGRAMS, "echo"))
    id = (0, "", 0)
    with pytest.raises(ValueError, match="no episode of sample"):
        episodes.turn(id, ModelTurn("a")).result(60)
    unsendable = task("q", call=lambda: 0)
    assert "pickle" in episodes.start((1, "", 0), unsendable).result(60).error
    assert episodes.start(id, task("q")).result(60).failure is None
    with pytest.raises(ValueError, match="is there already"):
        episodes.start(id, task("q")).result(60)
    episodes.end(id)
    episodes.end(id)
    assert episodes.start(id, task("q")).result(60).failure is None
    waits = episodes.turn(id, ModelTurn("wait"))
    episodes.close()
    assert waits.cancelled()
    with pytest.raises(ValueError, match="closed"):
        episodes.start(id, task("q")).result(60)


@pytest.mark.layouts
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
)
def test_processes_killed_at_random_change_nothing(make: Make, pool: Pool, seed: int) -> None:
    turns = {(n, "", k): [f"{n}{letter}" for letter in "abcd"] for n in range(12) for k in range(2)}
    expected = together(pool(make(PROGRAMS, "echo")), turns)
    episodes, draw, ended = pool(make(PROGRAMS, "echo", num_processes=2)), random.Random(seed), []
    episodes.wait_ready()

    def kill() -> None:
        while not ended:
            time.sleep(draw.uniform(0.05, 0.5) if kills else 0.02)  # while they start, too
            process = draw.choice(episodes._processes)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.popen.pid, signal.SIGKILL)
                kills.append(process.popen.pid)

    kills: list[int] = []
    killer = threading.Thread(target=kill)
    killer.start()
    results = {}
    for number in range(0, len(turns), 6):
        some = dict(list(turns.items())[number : number + 6])
        results |= together(episodes, some)
    ended.append(True)
    killer.join()
    assert results == expected
    assert kills


@pytest.mark.long
def test_lone_surrogates_are_replaced_and_counted(make: Make, pool: Pool) -> None:
    """A pair of surrogates that makes a character is kept."""
    config = make(PROGRAMS, "broken")
    with Openings(config) as opening:
        ((message,),) = opening([task("q")])
    assert message["content"] == "a?b:"
    episodes = pool(config)
    start, (step,) = played(episodes, task("q"), ["a"])
    assert start.messages == (message,)
    assert [m["content"] for m in step.messages or ()] == ["c?\U0001f600"]
    assert episodes.counts["replaced_surrogates"] == 2
