"""Programs that fork: the children answer nobody, hide no crash, and die with their process."""

import time
from pathlib import Path

import pytest
from environment_pools import Make, Pool, played, task

PROGRAMS = '''
import asyncio, os, subprocess, sys, time
from pathlib import Path

HERE = Path(__file__).parent


def note(name, pid=None):
    with open(HERE / name, "a") as file:
        file.write(f"{pid or os.getpid()}\\n")


def fork(how):
    """Leaves a child that sleeps."""
    if how == "system":  # which closes no descriptors
        os.system(f"sleep 60 & echo $! >> {HERE}/children")
    elif how == "subprocess":
        note("children", subprocess.Popen(["sleep", "60"], close_fds=False).pid)
    elif child := os.fork():
        note("children", child)  # it may be killed before it could
    else:
        time.sleep(60)
        os._exit(0)


async def forks(task, model, rng):
    """Forks, then does as it is told."""
    turn = await model.turn(task.messages)
    fork(turn.text)
    turn = await model.turn("forked")
    if turn.text == "die":
        os._exit(9)
    await model.turn("more")


async def leaves(task, model, rng):
    """Both sides of the fork go on with the program."""
    turn = await model.turn(task.messages)
    child = os.fork()
    note("forked")
    if child == 0:
        if turn.text == "raise":
            raise ValueError("in the child")
        if turn.text == "exit":
            sys.exit(7)
        if turn.text == "wait":
            await asyncio.sleep(0)
        return 5.0
    _, status = await asyncio.to_thread(os.waitpid, child, 0)
    model.note("code", os.waitstatus_to_exitcode(status))
    return 1.0


async def called(task, model, rng):
    """A callback of the event loop forks, which is no part of the program's coroutine."""
    turn = await model.turn(task.messages)

    def fork():
        if os.fork() == 0:
            note("forked")

    asyncio.get_running_loop().call_soon(fork)
    await asyncio.sleep(0.2)
    await model.turn("more")
    return 1.0
'''


def alive(file: Path) -> list[int]:
    """The processes named in a file that run, after at most two seconds."""
    pids = [int(line) for line in file.read_text().split()]
    assert pids
    for _ in range(20):
        if not (left := [pid for pid in pids if _runs(pid)]):
            break
        time.sleep(0.1)
    return left


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


@pytest.mark.long
@pytest.mark.parametrize("how", ["fork", "system", "subprocess"])
def test_a_crash_is_seen_at_once_though_a_child_lives(
    make: Make, pool: Pool, tmp_path: Path, how: str
) -> None:
    episodes = pool(make(PROGRAMS, "forks", turn_timeout_s=30.0))
    episodes.wait_ready()
    begin = time.monotonic()
    _, steps = played(episodes, task("q"), [how, "die"])
    assert [(step.failure, step.error) for step in steps] == [
        (None, ""), ("crash", "its process ended (exit code 9)")
    ]  # fmt: skip
    assert episodes.counts["replays"] == 1
    assert time.monotonic() - begin < 20.0
    assert alive(tmp_path / "children") == []


@pytest.mark.parametrize("how", ["fork", "system", "subprocess"])
def test_children_do_not_outlive_the_pool(make: Make, pool: Pool, tmp_path: Path, how: str) -> None:
    episodes = pool(make(PROGRAMS, "forks"))
    _, steps = played(episodes, task("q"), [how])
    assert steps[0].failure is None
    episodes.close()
    assert alive(tmp_path / "children") == []


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("raise", 1), ("exit", 7), ("wait", 0)])
def test_a_child_that_leaves_the_program_ends(
    make: Make, pool: Pool, tmp_path: Path, how: str, code: int
) -> None:
    """It answers nobody, and runs none of the process's code."""
    episodes = pool(make(PROGRAMS, "leaves", turn_timeout_s=10.0))
    _, steps = played(episodes, task("q"), [how])
    (step,) = steps
    assert (step.failure, step.rewards, step.scalars) == (None, (1.0,), {"code": code})
    assert len((tmp_path / "forked").read_text().split()) == 2
    assert played(episodes, task("r"), ["exit"], (1,))[1][-1].failure is None


def test_a_child_of_a_callback_ends(make: Make, pool: Pool, tmp_path: Path) -> None:
    episodes = pool(make(PROGRAMS, "called"))
    _, steps = played(episodes, task("q"), ["a", "b"])
    assert [step.failure for step in steps] == [None, None]
    assert steps[-1].rewards == (0.0, 1.0)
    assert alive(tmp_path / "forked") == []
