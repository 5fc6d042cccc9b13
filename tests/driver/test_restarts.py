"""Ranks that are killed or stopped, and start anew within the run: the same bits as without that.

The faults are in the ranks themselves, at calls that are counted, so that none comes too late.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import psutil
import pytest
from resumed_runs import WHEN_MADE, check_same
from whole_runs import REPLAYED

from hybridrl.config import Config, ConfigError
from hybridrl.driver import restarts as driver_restarts
from hybridrl.driver import train as controller_train
from hybridrl.driver.origin import Origin
from hybridrl.driver.rank_failures import InstanceEnded, RankFailures, WorkerError
from hybridrl.driver.rank_pool import Pool
from hybridrl.driver.restarts import SAME_PLACE, Restarts
from hybridrl.runtime.launcher import CallFailed
from hybridrl.schedule.lost_samples import InstanceDied
from hybridrl.telemetry.records import parse, read_lines
from hybridrl.telemetry.trace import read_timeline

FAULTY = """
import functools
import os
import signal
from pathlib import Path

import torch.distributed as dist

from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe
from hybridrl.workers.base_worker import BaseWorker
from hybridrl.workers.generator import Generator
from hybridrl.workers.trainer import ActorTrainer

METHODS = {"generate": (Generator, "advance"), "update": (ActorTrainer, "_stepped"),
           "save": (BaseWorker, "save_state"), "stop": (ActorTrainer, "_stepped")}


def arm(fault, at, file):
    kind, method = METHODS[fault]
    call, calls = getattr(kind, method), []

    @functools.wraps(call)
    def calling(self, *args, **settings):
        calls.append(method)
        if len(calls) == at:
            file.touch()
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
        return call(self, *args, **settings)

    setattr(kind, method, calling)


def armed():
    '''In every rank that is sent the loss: rank 1 is to have the first fault that has not been.'''
    if dist.get_rank() == 1 and not hasattr(ActorTrainer, "is_armed"):
        ActorTrainer.is_armed = True
        for number, fault in enumerate(os.environ["FAULTS"].split()):
            file = Path(os.environ["FAULTS_HAD"], str(number))
            if not file.exists():
                kind, at = fault.split(":")
                arm(kind, int(at), file)
                break
    return losses.ClippedLoss()


class ArmedLoss(losses.ClippedLoss):
    def __reduce__(self):
        return armed, ()


class ArmedLength:
    __name__ = "length"

    def __call__(self, log_probs):
        return len(log_probs)

    def __reduce__(self):  # a rank that generates alone is sent no loss
        return armed_length, ()


def armed_length():
    armed()
    return ArmedLength()


@recipe("faulty")
def dataflow(flow, cfg):
    steps = flow.state("steps", 0.0)

    def spread(rewards):
        '''By the number of the step, which the driver counts.'''
        steps.set(steps.get() + 1)
        return [reward + steps.get() * (place % 3) for place, reward in enumerate(rewards)]

    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    samples = samples.by_batch(spread, ("reward",), ("spread",))
    samples = samples.by_group(advantages.group_relative, ("spread",))
    samples = samples.map(ArmedLength(), ("log_probs",), scalars=("length",))
    flow.actor.update(samples, loss=ArmedLoss())
"""
EVERY = ["update:3", "save:2", "generate:2", "stop:3"]
"""In step 2, before there is a checkpoint; in the checkpoint of step 4; from step 2 on, twice."""


@pytest.fixture
def settings(
    tiny_run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[str]]:
    """`settings("update:3", ...)` are those of a run whose rank 1 has these faults in turn."""
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    (tmp_path / "had").mkdir()
    monkeypatch.setenv("FAULTS_HAD", str(tmp_path / "had"))
    changed = ("recipe", "trainer.steps=", "trainer.save_every=")
    kept = [x for x in (*tiny_run, *REPLAYED) if not x.startswith(changed)]

    def with_faults(*faults: str) -> list[str]:
        monkeypatch.setenv("FAULTS", " ".join(faults))
        target = f"recipe={{target: '{file}:dataflow'}}"
        steps = ["trainer.steps=6", "trainer.save_every=2"]
        return [*kept, target, *steps, "cluster.ranks=2", "schedule=serial"]

    return with_faults


@pytest.fixture
def run_here(make_config: Callable[..., Config], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A run whose driver is this process, and its ranks are children."""

    def run(*overrides: str) -> dict[str, Any]:
        config = make_config("cluster=processes", f"run.dir={tmp_path / 'run'}", *overrides)
        return controller_train.train(config)

    return run


def ranks_here() -> set[psutil.Process]:
    """Ranks of a run of this process, or of another test's, which a server of it has forked."""
    driver = psutil.Process()
    return {*driver.children(recursive=True)} - {*driver.children()}


def restarts_of(run_dir: Path) -> list[tuple[int, int, str, int]]:
    """Number, rank, call and step of each."""
    events = [x for x in read_lines(run_dir / "events.jsonl") if x["kind"] == "restart"]
    assert all(event["seconds"] > 0 for event in events)
    return [(x["number"], x["rank"], x["call"], x["step"]) for x in events]


@pytest.mark.layouts
def test_whatever_dies_when_the_run_has_the_bits_of_one_without_a_death(
    run_here: Callable[..., Any],
    train_here: Callable[..., Any],
    settings: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_here(tmp_path / "whole", *settings())
    before = ranks_here()
    result = run_here(*settings(*EVERY), "cluster.restarts=4", "cluster.hang_floor_s=3")
    assert result["restarts"] == len([*(tmp_path / "had").iterdir()]) == 4
    assert ranks_here() <= before
    err = capsys.readouterr().err
    assert restarts_of(tmp_path / "run") == [
        (1, 1, "update", 0), (2, 1, "save_state", 2), (3, 1, "advance", 2), (4, 1, "update", 2),
    ]  # fmt: skip
    assert "; restart 1 of 4, from the beginning" in err
    assert "; restart 4 of 4, from step 2" in err
    assert "it is stuck in update" in err
    check_same(tmp_path / "whole", tmp_path / "run", tmp_path)


@pytest.mark.wide
@pytest.mark.layouts
def test_an_instance_that_has_ended_comes_back_after_a_checkpoint(
    run_here: Callable[..., Any],
    train_here: Callable[..., Any],
    settings: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    """The run goes on without it until then; no step is made again."""
    apart = ["cluster.ranks=3", "cluster.pools.rollout=2", "schedule=one_step"]
    train_here(tmp_path / "whole", *settings(), *apart)
    assert run_here(*settings("generate:3"), *apart, "cluster.restarts=1")["restarts"] == 1
    assert restarts_of(tmp_path / "run") == [(1, 2, "advance", 2)]
    events = read_lines(tmp_path / "run" / "events.jsonl")
    kinds = [x["kind"] for x in events if x["kind"] in ("ranks", "death", "restart", "checkpoint")]
    assert kinds == ["ranks", "death", *["ranks", "restart"], *["checkpoint"] * 2]
    spans, _ = read_timeline(tmp_path / "run" / "trace.json")
    assert {span.lane for span in spans if span.step > 3} >= {"rank 0", "rank 1", "rank 2"}
    without = (*WHEN_MADE, "samples/restarted")
    check_same(tmp_path / "whole", tmp_path / "run", tmp_path, without)


@pytest.mark.layouts
def test_an_instance_without_which_a_step_cannot_go_on_starts_anew(
    run_here: Callable[..., Any], settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """None of `serial` can: the error is that of the dead rank."""
    apart = ["cluster.ranks=3", "cluster.pools.rollout=2", "trainer.steps=2"]
    assert run_here(*settings("generate:3"), *apart, "cluster.restarts=1")["restarts"] == 1
    assert restarts_of(tmp_path / "run") == [(1, 2, "advance", 0)]


@pytest.mark.ray
def test_on_ray_too(
    command: Callable[..., Any],
    train_here: Callable[..., Any],
    settings: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    train_here(tmp_path / "whole", *settings())
    run = command(*settings("update:3"), "cluster.restarts=1", "run.dir=run")
    code, _, err = run.end(timeout=300)
    assert code == 0, err
    assert run.left == []
    assert restarts_of(tmp_path / "run") == [(1, 1, "update", 0)]
    check_same(tmp_path / "whole", tmp_path / "run", tmp_path)


@pytest.mark.layouts
def test_a_rank_that_dies_at_one_place_again_and_again_ends_the_run(
    run_here: Callable[..., Any], settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Though restarts are left; all of them are in the records, which went back each time."""
    with pytest.raises(WorkerError, match=r"died 3 times in update without a new step") as raised:
        run_here(*settings(*["update:3"] * SAME_PLACE), "cluster.restarts=9")
    assert str(raised.value).startswith("rank 1 of 2 (actor, reward) on node ")
    assert restarts_of(tmp_path / "run") == [(1, 1, "update", 0), (2, 1, "update", 0)]
    status = parse((tmp_path / "run" / "run.json").read_text())
    assert (status["state"], "died 3 times" in status["reason"]) == ("failed", True)


@pytest.mark.layouts
def test_a_signal_amid_a_restart_ends_the_run(
    run_here: Callable[..., Any],
    settings: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command_line_signals: None,
) -> None:
    begin, states = Restarts.begin, []

    def interrupted(self: Restarts, error: WorkerError) -> None:
        begin(self, error)
        states.append(parse((tmp_path / "run" / "run.json").read_text())["state"])
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Restarts, "begin", interrupted)
    before = ranks_here()
    with pytest.raises(KeyboardInterrupt):
        run_here(*settings("update:3"), "cluster.restarts=1")
    assert states == ["running"]
    assert parse((tmp_path / "run" / "run.json").read_text())["state"] == "interrupted"
    assert ranks_here() <= before


def death(rank: int = 1, call: str = "update", died: bool = True, step: int = 1) -> WorkerError:
    return WorkerError(f"rank {rank} failed", died, rank, call, step)


@pytest.fixture
def restarts(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> Restarts:
    """Five of a run that has no checkpoint."""
    monkeypatch.setattr(driver_restarts, "origin_again", lambda config, origin: origin)
    config = make_config("cluster=processes", "cluster.ranks=2", "cluster.restarts=5")
    return Restarts(config, Origin(), MagicMock(newest_step=0))


@pytest.fixture
def failures(tmp_path: Path) -> RankFailures:
    """The failures of four ranks, of which the last three are instances of one rank each."""
    actor = Pool(range(1), MagicMock(), ["actor"])
    rollout = Pool(range(1, 4), MagicMock(), ["rollout"])
    group = MagicMock(size=4, instances=[[1], [2], [3]], logs=tmp_path, current_step=lambda: 7)
    group.configure_mock(home=rollout, actor_pool=actor, pools={"a": actor, "r": rollout})
    group.launcher.first_dead.return_value = None
    failures = group.failures = RankFailures(group)
    group.living = lambda ranks: [rank for rank in ranks if rank not in failures.dead]
    return failures


def test_the_end_of_a_needed_instance_is_the_error_of_its_rank(
    failures: RankFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one's, whatever ended others before; nothing is said of instances that go on."""
    run, parts, lines = MagicMock(), cast("Any", [None] * 5), list[str]()
    run.group.failures = failures
    failures.on_death = lambda instance, line: lines.append(line)
    monkeypatch.setattr(controller_train, "Run", lambda *parts: run)

    def raised_for(error: BaseException) -> WorkerError:
        with pytest.raises(WorkerError) as raised, controller_train._with_ranks(*parts):
            raise error
        assert raised.value.__cause__ is error
        run.group.kill.assert_called()
        return raised.value

    ended = failures.of(1, CallFailed("", ValueError("no number")))
    assert isinstance(ended, InstanceEnded)
    error = raised_for(ended)
    assert str(error).startswith("rank 1 of 4 (rollout) on node ? failed: ValueError: no number;")
    assert not error.died
    failures.of(2, CallFailed("gone", died=True))
    error = raised_for(InstanceDied("generation instance 1 died"))
    assert str(error).startswith("rank 2 of 4 (rollout) on node ? failed: its process ended")
    assert (error.died, error.rank, error.step) == (True, 2, 7)
    assert lines[1] == f"{error}; its samples begin again; instances that go on: 1"
    failures.of(1, CallFailed("", ValueError("no number")))
    assert raised_for(InstanceDied("generation instance 0 died")) is error
    failures.errors.append(WorkerError("rank 3 raised"))
    assert raised_for(InstanceDied("generation instance 2 died")) is failures.errors[-1]
    assert failures.lost is error


def test_restarts_without_checkpoints_are_told(restarts: Restarts) -> None:
    restarts.config.trainer.save_every = 10
    restarts.warn_unsaved()
    note = cast("MagicMock", restarts.telemetry.note)
    note.assert_not_called()
    restarts.config.trainer.save_every = 0
    restarts.warn_unsaved()
    note.assert_called_once_with(
        "cluster.restarts=5: trainer.save_every=0 leaves no checkpoint to go back to, so a restart"
        " makes all steps again"
    )


def test_what_is_no_death_ends_the_run(restarts: Restarts, monkeypatch: pytest.MonkeyPatch) -> None:
    error = death(died=False)
    with pytest.raises(WorkerError) as raised:
        restarts.begin(error)
    assert raised.value is error
    monkeypatch.setattr(driver_restarts.signals, "stop_requested", lambda: True)
    error = death()
    with pytest.raises(WorkerError) as raised:
        restarts.begin(error)
    assert raised.value is error


def test_an_instance_comes_back_only_where_a_restart_is_left(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = MagicMock()
    run.group.failures.lost = None
    restarts.bring_back(run)
    run.group.failures.lost = death()
    with pytest.raises(WorkerError, match=r"^rank 1 failed$"):
        restarts.bring_back(run)
    run.checkpoints.finish.assert_called_once()  # before the ranks that write it end
    with monkeypatch.context() as patch:
        patch.setattr(driver_restarts.signals, "stop_requested", lambda: True)
        restarts.bring_back(run)
    restarts.events = [{}] * 5
    restarts.bring_back(run)


def test_steps_that_are_made_again_are_places_of_their_own(restarts: Restarts) -> None:
    """A run that has gone back from step 5 dies thrice on its way there."""
    restarts.telemetry.newest_step = 5
    for step in (3, 4, 2, 3):
        restarts.begin(death(step=step))
    with pytest.raises(WorkerError, match="it has died 3 times in update without a new step"):
        restarts.begin(death(step=3))


def test_a_run_ends_where_what_it_would_go_back_to_is_damaged(
    restarts: Restarts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For good: the same command would end too."""
    damage = ConfigError("trainer.resume", "auto", "a checkpoint that is whole; damaged: x")
    monkeypatch.setattr(driver_restarts, "origin_again", MagicMock(side_effect=damage))
    with pytest.raises(WorkerError) as raised:
        restarts.begin(death())
    assert str(raised.value) == f"rank 1 failed; {damage}"
    assert not raised.value.died


def test_a_run_ends_where_its_code_has_changed_meanwhile(
    make_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New ranks would read it: another process refuses that, unless a key says otherwise."""
    monkeypatch.setattr(driver_restarts, "origin_again", lambda config, origin: origin)
    file = tmp_path / "judge.py"
    file.write_text("def score(text): return 1.0\n")
    settings = ["cluster=processes", "cluster.ranks=2", "cluster.restarts=5"]
    config = make_config(*settings, "reward=function", f"reward.function={file}:score")
    restarts = Restarts(config, Origin(), MagicMock(newest_step=0))
    restarts.begin(death())
    file.write_text("def score(text): return 2.0\n")
    with pytest.raises(WorkerError, match=rf"changed since: reward {file}:score \(") as raised:
        restarts.begin(death(step=2))
    assert not raised.value.died
    restarts.config.trainer.resume_changed = True
    restarts.begin(death(step=2))


def test_a_place_is_a_rank_a_call_and_the_newest_step(restarts: Restarts) -> None:
    for one in (death(), death(), death(rank=0), death(call="advance")):
        restarts.begin(one)
    restarts.telemetry.newest_step = 1
    restarts.begin(death())
    with pytest.raises(
        WorkerError, match=r"^rank 1 failed; all 5 restarts of cluster.restarts are"
    ):
        restarts.begin(death())
    with pytest.raises(WorkerError, match=r"^rank 1 failed; it has died 3 times in update without"):
        restarts.begin(death())


def test_ranks_that_die_before_they_are_up_are_in_the_records(restarts: Restarts) -> None:
    restarts.ranks_are_up()
    restarts.begin(death())
    restarts.begin(death(call="setup"))
    restarts.ranks_are_up()
    restarts.ranks_are_up()
    written = [call.kwargs for call in restarts.telemetry.event.call_args_list]
    assert [(x["number"], x["seconds"] is None) for x in written] == [(1, True), (2, False)]
