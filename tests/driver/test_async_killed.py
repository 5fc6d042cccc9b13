"""Asynchronous runs whose processes are killed at chosen moments, and resumed: the same weights."""

import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from whole_runs import REPLAYED, goes_on

from hybridrl.telemetry.records import read_lines

STEPS, MINI_BATCHES = 10, 2
MOMENTS = {
    "push": "the arrays are in the data plane, and no answer has come",
    "load": "an instance has the weights, and no sample of theirs",
    "update": "half of a step's mini-batches have been trained on",
    "checkpoint": "a rank has written its part",
}
DEADLY = """
import functools
import os
import signal
import time

import psutil

from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe
from hybridrl.workers.base_worker import BaseWorker
from hybridrl.workers.generator import Generator
from hybridrl.workers.trainer import ActorTrainer
from hybridrl.workers.trainer_worker import TrainerWorker


def deadly(kind, method, moment, version_of):
    call = getattr(kind, method)

    @functools.wraps(call)
    def calling(self, *args, **settings):
        result = call(self, *args, **settings)
        if os.environ["KILL"] == f"{moment} {version_of(self, *args)}":
            victim = psutil.Process()
            if os.environ["VICTIM"] == "driver":
                victim = next(p for p in victim.parents() if "hybridrl.cli" in p.cmdline())
            victim.send_signal(signal.SIGKILL)
            if os.environ["VICTIM"] == "driver":
                signal.pause()
        return result

    setattr(kind, method, calling)


def slow(kind, method, seconds):
    call = getattr(kind, method)

    @functools.wraps(call)
    def calling(self, *args, **settings):
        time.sleep(seconds)
        return call(self, *args, **settings)

    setattr(kind, method, calling)


def trained(worker, *_):
    return worker.trained["actor"].train_engine.version if "actor" in worker.trained else None


def arm():
    '''In every rank that is sent one of the objects below: the file itself is not imported.'''
    if not hasattr(TrainerWorker, "is_armed"):
        TrainerWorker.is_armed = True
        slow(Generator, "advance", float(os.environ.get("ADVANCE_S", 0)))
        slow(ActorTrainer, "_stepped", float(os.environ.get("UPDATE_S", 0)))
        deadly(TrainerWorker, "push", "push", trained)
        deadly(BaseWorker, "save_state", "checkpoint", trained)
        deadly(Generator, "load", "load", lambda generator, fill, version, *_: version)
        deadly(ActorTrainer, "_stepped", "update", lambda trainer: trainer.train_engine.version)


def armed(kind):
    arm()
    return kind()


class ArmedLoss(losses.ClippedLoss):
    def __reduce__(self):
        return armed, (ArmedLoss,)


class ArmedLength:
    __name__ = "length"

    def __call__(self, log_probs):
        return len(log_probs)

    def __reduce__(self):
        return armed, (ArmedLength,)


@recipe("deadly")
def dataflow(flow, cfg):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    samples = samples.map(ArmedLength(), ("log_probs",), scalars=("length",))
    flow.actor.update(samples.by_group(advantages.group_relative), loss=ArmedLoss())
"""


def kills(seed: int) -> list[tuple[str, str]]:
    """Each moment once, in the weights of one step or the next, past the last checkpoint."""
    draw = Random(seed)
    moments = draw.sample([*MOMENTS], len(MOMENTS))
    chosen = []
    for number, moment in enumerate(moments):
        steps = 2 * number + 1 + draw.randrange(2)
        if moment == "checkpoint":
            steps = 2 * number + 2
        elif moment == "load":
            steps = 2 * number + 1  # the weights of the last steps make no batch
        version = MINI_BATCHES * steps - (moment == "update")
        chosen.append((f"{moment} {version}", draw.choice(["driver", "rank"])))
    return chosen


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("schedule", "seed"),
    [
        (["schedule=one_step", "cluster.ranks=2", "cluster.pools.rollout=1"], 0),
        (
            ["schedule=async", "schedule.max_staleness=2", "cluster.ranks=3",
             "cluster.pools.rollout=2"],
            4,
        ),
    ],
    ids=["one_step, 1 + 1", "two steps, 1 + 2"],
)  # fmt: skip
def test_whatever_is_killed_when_the_resumed_run_has_the_same_weights(
    command: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    schedule: list[str],
    seed: int,
) -> None:
    file = tmp_path / "deadly.py"
    file.write_text(DEADLY)
    changed = ("recipe", "trainer.steps=")
    settings = [
        *(x for x in (*tiny_run, *REPLAYED) if not x.startswith(changed)),
        f"recipe={{target: '{file}:dataflow'}}", f"trainer.steps={STEPS}", "cluster=processes",
        "trainer.resume=auto", *schedule,
    ]  # fmt: skip
    monkeypatch.setenv("KILL", "never")
    monkeypatch.setenv("VICTIM", "rank")
    whole = command(*settings, "run.dir=whole")
    code, _, err = whole.end(timeout=300)
    assert code == 0, err
    done = []
    for moment, victim in kills(seed):
        monkeypatch.setenv("KILL", moment)
        monkeypatch.setenv("VICTIM", victim)
        run = command(*settings, "run.dir=killed")
        code, _, err = run.end(timeout=300)
        assert code == (-signal.SIGKILL if victim == "driver" else 1), (moment, victim, err)
        lines = read_lines(tmp_path / "killed" / "metrics.jsonl")
        done.append(max([0, *(line["step"] for line in lines if "loss" in line)]))
    assert done == sorted(done)
    assert 0 < done[0] < 5 < done[-1] < STEPS
    monkeypatch.setenv("KILL", "never")
    code, _, err = command(*settings, "run.dir=killed").end(timeout=300)
    assert code == 0, err
    a, b = (load_file(tmp_path / x / "final" / "model.safetensors") for x in ("whole", "killed"))
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    moved = load_file(tmp_path / "whole" / "start" / "model.safetensors")
    assert all(not torch.equal(a[name], moved[name]) for name in a)
    records = [read_lines(tmp_path / x / "metrics.jsonl") for x in ("whole", "killed")]
    losses = [{x["step"]: x["loss"] for x in of_run if "loss" in x} for of_run in records]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS


@pytest.mark.wide
@pytest.mark.layouts
def test_a_run_that_follows_is_killed_and_resumed(
    command: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its driver dies amid a step, with samples that rest: parameters are those of the record."""
    file = tmp_path / "deadly.py"
    file.write_text(DEADLY)
    changed = ("recipe", "trainer.steps=", "rollout.max_new_tokens")
    settings = [
        *(x for x in (*tiny_run, *REPLAYED) if not x.startswith(changed)),
        f"recipe={{target: '{file}:dataflow'}}", "trainer.steps=6", "cluster=processes",
        "schedule=async", "schedule.max_staleness=2", "schedule.new_weights=in_flight",
        "rollout.max_new_tokens=48", "rollout.decode_steps=2", "cluster.pools.rollout=1",
    ]  # fmt: skip
    monkeypatch.setenv("KILL", "never")
    monkeypatch.setenv("VICTIM", "driver")
    monkeypatch.setenv("ADVANCE_S", "0.05")  # so weights come within responses
    code, _, err = command(*settings, "cluster.ranks=2", "run.dir=whole").end(timeout=300)
    assert code == 0, err
    record = read_lines(tmp_path / "whole" / "versions.jsonl")
    of_several = [x for line in record for _, x in line["samples"] if len(x) > 1]
    version = of_several[0][1][0]  # some sample rests until an instance has these weights
    monkeypatch.setenv("ADVANCE_S", "0")
    settings += ["schedule.follow=whole", "cluster.ranks=3", "cluster.pools.rollout=2"]
    settings += ["run.dir=followed", "trainer.resume=auto", "trainer.save_every=1"]
    monkeypatch.setenv("UPDATE_S", "1")  # so instances come to where samples rest
    monkeypatch.setenv("KILL", f"update {version * MINI_BATCHES + 1}")
    code, _, err = command(*settings).end(timeout=300)
    assert code == -signal.SIGKILL, err
    assert goes_on(tmp_path / "followed" / "checkpoints" / f"step_{version:06d}"), "no sample rests"
    monkeypatch.setenv("UPDATE_S", "0")
    monkeypatch.setenv("KILL", "never")
    code, _, err = command(*settings).end(timeout=300)
    assert code == 0, err
    a, b = (load_file(tmp_path / x / "final" / "model.safetensors") for x in ("whole", "followed"))
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert read_lines(tmp_path / "followed" / "versions.jsonl") == record
