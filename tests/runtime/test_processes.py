"""Ranks without Ray: the same run, in this process and in plain ones."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ray import cloudpickle
from safetensors.torch import load_file

from hybridrl.config import Config, ConfigError, ProcessesClusterConfig
from hybridrl.driver import train as controller_train
from hybridrl.driver.rank_failures import WorkerError
from hybridrl.runtime.launcher import CallFailed
from hybridrl.runtime.process_launcher import ProcessLauncher
from hybridrl.telemetry.records import read_lines
from hybridrl.workers.dispatch import Dispatch, dispatch

SHORT = ["cluster.ranks=1", "trainer.steps=2", "eval.sets.main.num_prompts=2"]
BREAKS = """
from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe


class Stops(losses.ClippedLoss):
    def __call__(self, log_probs, entropy, fields):
        breakpoint()
        return super().__call__(log_probs, entropy, fields)


@recipe("stops")
def stops(flow, cfg):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    flow.actor.update(samples.by_group(advantages.group_relative), loss=Stops())
"""


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """What a run has computed: its metrics but for times."""
    return [
        {
            key: value
            for key, value in line.items()
            if not key.endswith("_s") and key not in ("time", "bubble_share", "mfu")
        }
        for line in read_lines(run_dir / "metrics.jsonl")
    ]


def compare(with_ray: Path, without: Path) -> None:
    """Two runs did the same, bit for bit, and it was something."""
    assert numbers(with_ray) == numbers(without)
    steps = [line for line in numbers(without) if "loss" in line]
    assert len(steps) == 2
    assert all(line["grad_norm"] > 0 for line in steps)
    ours, theirs = (load_file(run / "final/model.safetensors") for run in (without, with_ray))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_one_rank_in_this_process_does_what_ray_does(
    train: Callable[..., Any],
    make_config: Callable[..., Config],
    tiny_run: list[str],
    tmp_path: Path,
) -> None:
    train(tmp_path / "ray", *tiny_run, *SHORT)
    controller_train.train(
        make_config(*tiny_run, "cluster=processes", *SHORT, f"run.dir={tmp_path / 'plain'}")
    )
    compare(tmp_path / "ray", tmp_path / "plain")
    record = json.loads((tmp_path / "plain/environment.json").read_text())
    assert [event["pid"] for event in read_lines(tmp_path / "plain/events.jsonl")
            if event["kind"] == "ranks"] == [os.getpid()]  # fmt: skip
    assert len(record["nodes"]) == 1


@pytest.mark.slow
def test_two_ranks_do_what_ray_does(
    train: Callable[..., Any],
    make_config: Callable[..., Config],
    tiny_run: list[str],
    tmp_path: Path,
) -> None:
    """The first in this process, or both in others."""
    two = [*tiny_run, *SHORT, "cluster.ranks=2"]
    train(tmp_path / "ray", *two)
    for name, own in (("plain", ["cluster.rank_in_driver=true"]), ("children", [])):
        settings = ["cluster=processes", *two, *own, f"run.dir={tmp_path / name}"]
        controller_train.train(make_config(*settings))
        compare(tmp_path / "ray", tmp_path / name)


@pytest.mark.slow
def test_a_breakpoint_stops_at_the_terminal(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)  # Ray sets it in this process
    (tmp_path / "mine.py").write_text(BREAKS)
    command = [sys.executable, "-m", "hybridrl.cli", "train", "cluster=processes", *tiny_run]
    command += [*SHORT, "trainer.steps=1", f"recipe={{target: '{tmp_path}/mine.py:stops'}}"]
    done = subprocess.run(
        command, cwd=tmp_path, text=True, capture_output=True, check=False, timeout=200,
        input="p 'tokens', log_probs.shape\nc\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"\(Pdb\) \('tokens', torch.Size\(\[\d+\]\)\)", done.stdout), done.stdout
    assert json.loads(done.stdout.rpartition("(Pdb) ")[2])["run"]


class Worker:
    """Adds, fails, or ends its process."""

    def __init__(self, rank: int, size: int, base: int) -> None:
        self.rank, self.size, self.base = rank, size, base

    @dispatch(Dispatch.SAME)
    def add(self, number: int) -> tuple[int, int]:
        """The sum, and where it was made."""
        return self.base + self.rank * number, os.getpid()

    @dispatch(Dispatch.PER_RANK)
    def fail(self, how: str) -> bytes:
        """What `how` says; else a large answer."""
        if how == "raise":
            raise ConfigError("x", 1, "2")
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return bytes(2**22)

    @dispatch(Dispatch.SAME)
    def die_while_answering(self, rank: int) -> bytes:
        """An answer that is too large for a pipe, and soon the end of its rank."""
        if rank == self.rank:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return bytes(2**24)


def test_a_rank_is_the_driver_where_it_is_alone() -> None:
    def is_rank(ranks: int, **settings: bool) -> bool:
        return ProcessesClusterConfig(ranks=ranks, **settings).driver_is_rank

    assert [is_rank(ranks) for ranks in (1, 2, 3)] == [True, False, False]
    assert [is_rank(ranks, rank_in_driver=True) for ranks in (1, 2)] == [True, True]
    assert [is_rank(ranks, rank_in_driver=False) for ranks in (1, 2)] == [False, False]


@pytest.mark.long
@pytest.mark.parametrize("in_driver", [True, None])
def test_calls_reach_their_ranks(in_driver: bool | None) -> None:
    """Calls arrive with many large answers under way, too, and after one call has failed."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the ranks cannot import tests
    config = ProcessesClusterConfig(ranks=3, rank_in_driver=in_driver)
    with ProcessLauncher(config) as launcher:
        group = launcher.start(Worker, Worker, 100)
        many = [call for _ in range(8) for call in group.fail(["", "", ""])]
        answers = [launcher.get(call) for call in group.add(5)]
        assert [value for value, _ in answers] == [100, 105, 110]
        pids = [pid for _, pid in answers]
        assert (pids[0] == os.getpid()) == bool(in_driver)
        assert len(set(pids)) == 3
        assert [len(launcher.get(call)) for call in many] == [2**22] * 24
        (some,) = launcher.subgroup(group, [2]).add(7)
        assert launcher.get(some)[0] == 114
        raised = group.fail(["raise", "", "raise"])
        for number in (0, 2):
            with pytest.raises(CallFailed) as failed:
                launcher.get(raised[number])
            assert isinstance(failed.value.cause, ConfigError)
            assert not failed.value.died
        dying = group.die_while_answering(1)
        time.sleep(1.0)  # nobody reads meanwhile
        with pytest.raises(CallFailed) as failed:
            launcher.get(dying[1])
        assert failed.value.died
        assert launcher.first_dead(group)[0] == 1  # type: ignore[index]
        assert len(launcher.get(dying[2])) == 2**24
        with pytest.raises(CallFailed) as failed:
            launcher.get(group.fail(["", "", "die"])[2])
        assert failed.value.died
    for pid in pids[int(bool(in_driver)) :]:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def fork_servers() -> list[int]:
    """The process ids of this process's fork servers."""
    children = psutil.Process().children()
    pids = []
    for child in children:
        with suppress(psutil.NoSuchProcess):  # one that has ended, of an earlier test
            if any("multiprocessing.forkserver" in word for word in child.cmdline()):
                pids.append(child.pid)
    return pids


def test_answers_of_others_are_seen_while_rank_0_has_work() -> None:
    """It computes in this process, and others would wait for their next calls until it is done."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = ProcessesClusterConfig(ranks=2, rank_in_driver=True)
    with ProcessLauncher(config) as launcher:
        group = launcher.start(Worker, Worker, 100)
        (other,) = launcher.subgroup(group, [1]).add(1)
        assert launcher._ranks[1].answers.poll(60)  # type: ignore[union-attr]
        own = [call for _ in range(3) for call in launcher.subgroup(group, [0]).add(1)]
        assert launcher.wait([*own, other]) == [other]
        (another,) = launcher.subgroup(group, [1]).add(1)
        assert launcher._ranks[1].answers.poll(60)  # type: ignore[union-attr]
        launcher.get(own[2])
        assert another.done


def test_a_run_that_fails_leaves_the_fork_server_to_the_next() -> None:
    """It has imported the worker, which takes seconds."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    config = ProcessesClusterConfig(ranks=2)
    with pytest.raises(CallFailed), ProcessLauncher(config) as launcher:
        launcher.get(launcher.start(Worker, Worker, 100).fail(["", "raise"])[1])
    (server,) = fork_servers()
    with ProcessLauncher(config) as launcher:
        group = launcher.start(Worker, Worker, 100)
        assert [launcher.get(call)[0] for call in group.add(1)] == [100, 101]
    assert fork_servers() == [server]


DRIVER = """
import sys
import time

import ray  # whole: a signal that cuts its import has Ray's own exit say so
from hybridrl.system import signals
from hybridrl.config import ProcessesClusterConfig
from hybridrl.runtime.process_launcher import ProcessLauncher

signals.install()
import mine

try:
    with ProcessLauncher(ProcessesClusterConfig(ranks=2)) as launcher:
        calls = launcher.start(mine.Worker, mine.Worker).sleep()
        time.sleep(100)
except KeyboardInterrupt:
    sys.exit(signals.exit_code())
"""
SLEEPS = """
import sys
import time
from pathlib import Path

from hybridrl.workers.dispatch import Dispatch, dispatch

if sys.argv[-1] != "mine":  # in the server
    Path("importing").touch()
    time.sleep({seconds})


class Worker:
    def __init__(self, rank, size):
        self.rank = rank

    @dispatch(Dispatch.SAME)
    def sleep(self):
        if self.rank:
            Path("sleeping").touch()
            time.sleep(100)
"""


QUIET = "ignore:Cython module failed to patch module:RuntimeWarning"
"""Cython says that where a signal ends the import of one of its modules."""


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("moment", "number"),
    [("sleeping", signal.SIGKILL), ("importing", signal.SIGTERM), ("importing", signal.SIGINT)],
)
def test_nothing_outlives_its_driver(tmp_path: Path, moment: str, number: signal.Signals) -> None:
    """Neither a rank in a long call, nor the server that ranks are forked by; and quietly."""
    (tmp_path / "mine.py").write_text(SLEEPS.format(seconds=100 * (moment == "importing")))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": QUIET}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "mine"], cwd=tmp_path, env=environment,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not (tmp_path / moment).exists():
        assert driver.poll() is None, driver.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)
    left = psutil.Process(driver.pid).children(recursive=True)
    assert len(left) == (4 if moment == "sleeping" else 2)  # a tracker of resources is among them
    (os.killpg if number == signal.SIGINT else os.kill)(driver.pid, number)
    _, err = driver.communicate(timeout=60)
    _, alive = psutil.wait_procs(left, timeout=60)
    for process in alive:
        process.kill()
    assert alive == []
    assert (driver.returncode, err) == (-9 if number == signal.SIGKILL else 128 + number, "")


@pytest.mark.long
def test_a_failing_rank_is_named_and_its_traceback_shown(
    make_config: Callable[..., Config],
    tiny_run: Sequence[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(BREAKS.replace("breakpoint()", "raise ZeroDivisionError('mine')"))
    options = [*tiny_run, "cluster=processes", *SHORT, f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(WorkerError) as raised:
        controller_train.train(
            make_config(*options, f"recipe={{target: '{mine}:stops'}}", "eval.sets.main.every=null")
        )
    start = r"rank 0 of 1 \(actor, .*failed: ZeroDivisionError: mine; its log is "
    assert re.match(start, str(raised.value)), raised.value
    assert f'File "{mine}", line 8, in __call__' in capsys.readouterr().err


DIES = """if dist.get_rank() == 1:
            FileSystemWriter.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)"""
IMPORTS = """import os
import signal

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
"""


@pytest.mark.parametrize("in_driver", [True, None])
def test_a_rank_that_dies_while_it_saves_is_one_line(
    in_driver: bool | None,
    make_config: Callable[..., Config],
    tiny_run: Sequence[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The log has the traceback of the rank that waited for it, where that is the driver."""
    mine = tmp_path / "mine.py"
    mine.write_text(IMPORTS + BREAKS.replace("breakpoint()", DIES))
    settings = [*SHORT, "cluster.ranks=2", "trainer.save_every=1", "eval.sets.main.every=null"]
    settings += [] if in_driver is None else ["cluster.rank_in_driver=true"]
    options = [*tiny_run, "cluster=processes", *settings, f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(WorkerError) as raised:
        controller_train.train(make_config(*options, f"recipe={{target: '{mine}:stops'}}"))
    start = r"rank 1 of 2 \(actor, .*failed: its process ended \(killed, .*; its log is "
    assert re.match(start, str(raised.value)), raised.value
    assert "Traceback" not in capfd.readouterr().err
    if in_driver is None:  # it is ended with the run
        return
    log = (tmp_path / "run/logs/driver.log").read_text().partition(": call save_state failed\n")
    assert log[0].splitlines()[-1].endswith("rank 0 INFO hybridrl.runtime.process_launcher")
    assert log[2].startswith("Traceback ")


def test_no_ray_to_join() -> None:
    with pytest.raises(ConfigError, match=r"cluster.address=auto: wanted null"):
        Config(cluster=ProcessesClusterConfig(address="auto"))
