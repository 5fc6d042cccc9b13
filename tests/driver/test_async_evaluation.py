"""Evaluation of a run whose instances are ahead of training: it is that of the checkpoint."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file

from hybridrl.config.compose import composed, register
from hybridrl.driver.evaluate import HeldOutEvaluation
from hybridrl.driver.ray_executor import Abandoned, RayExecutor
from hybridrl.driver.run import Interrupted
from hybridrl.telemetry.records import read_lines


def texts(file: Path, name: str) -> dict[int, dict[str, str]]:
    """What a set's samples say, by step and sample."""
    by_step: dict[int, dict[str, str]] = {}
    for line in read_lines(file):
        if line["phase"] == "evaluation" and line["set"] == name:
            by_step.setdefault(line["step"], {})[line["id"]] = line["response"]
    return by_step


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("schedule", "ahead"),
    [
        (["schedule=one_step", "cluster.ranks=2", "cluster.pools.rollout=1"], 1),
        pytest.param(
            ["schedule=async", "schedule.max_staleness=2", "cluster.ranks=4",
             "cluster.pools.rollout=2", "trainer.layout.tp=2"], 2, marks=pytest.mark.wide,
        ),
        pytest.param(
            ["schedule=async", "schedule.max_staleness=2", "schedule.batches=as_complete",
             "cluster.ranks=3", "cluster.pools.rollout=2"], None, marks=pytest.mark.wide,
        ),
    ],
    ids=["one_step, 1 + 1", "two steps, 2 + 2", "as complete, 1 + 2"],
)  # fmt: skip
def test_it_is_that_of_the_checkpoint(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    schedule: list[str],
    ahead: int | None,
) -> None:
    """`hybridrl eval` finds the accuracy and the greedy texts that the run has recorded."""
    settings = [
        *tiny_run, *schedule, "trainer.steps=4", "trainer.save_every=1", "trainer.keep_last=9",
        "trainer.optim.lr=0.05", "eval.sets.main.every=1", "cluster=processes",
    ]  # fmt: skip
    run = train_here(tmp_path / "run", *settings).dir
    register()
    values: Any = OmegaConf.to_container(composed([*settings, f"run.dir={run}"]), enum_to_str=True)
    (run / ".hydra").mkdir()
    OmegaConf.save(values, run / ".hydra" / "config.yaml")
    own = texts(run / "samples.jsonl", "main")
    accuracy = {x["step"]: x["eval_accuracy"] for x in read_lines(run / "metrics.jsonl")
                if "eval_accuracy" in x}  # fmt: skip
    stale = [x["samples/staleness"] for x in read_lines(run / "metrics.jsonl") if "loss" in x]
    if ahead is not None:
        assert stale == [min(number, ahead) for number in range(4)]
    loads: dict[int, list[int]] = {}
    for event in read_lines(run / "events.jsonl"):
        for instance in event["instances"] if event["kind"] == "load" else ():
            loads.setdefault(instance, []).append(event["version"])
    assert all(one != other for versions in loads.values() for one, other in pairwise(versions))
    alone = ["cluster=processes", "cluster.ranks=1", "cluster.pools.rollout=0", "schedule=serial"]
    alone += ["trainer.layout.tp=1", "+eval.sets={late: {every: null}}"]
    done = subprocess.run(
        [sys.executable, "-m", "hybridrl.cli", "eval", str(run), "--checkpoints", "all", *alone],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    steps = json.loads(done.stdout.splitlines()[-1])["steps"]
    assert steps == [1, 2, 3, 4]
    (records,) = (run / "evaluations").iterdir()
    late = texts(records / "samples.jsonl", "late")
    later = {x["step"]: x["eval/late/avg@1"] for x in read_lines(run / "metrics.jsonl")
             if "eval/late/avg@1" in x}  # fmt: skip
    for step in steps:
        assert [*own[step].values()] == [*late[step].values()], step
        assert accuracy[step] == later[step]
    assert len({tuple(of_step.values()) for of_step in own.values()}) > 3


STRICT = [
    "deterministic=strict", "schedule=async", "schedule.max_staleness=2", "cluster.ranks=2",
    "cluster.pools.rollout=1", "trainer.steps=5", "trainer.optim.lr=0.05", "trainer.keep_last=9",
]  # fmt: skip
EVALUATED = ["eval.sets.main.every=1", "+eval.sets={late: {every: 2}}"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def evaluated(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of evaluations, by step."""
    by_step: dict[int, dict[str, float]] = {}
    for line in read_lines(run / "metrics.jsonl"):
        metrics = {name: x for name, x in line.items() if name.startswith("eval/")}
        by_step.setdefault(line["step"], {}).update(metrics)
    return {step: metrics for step, metrics in by_step.items() if metrics}


@pytest.mark.layouts
def test_training_goes_on_under_it(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parameters are those of a run without, also from a checkpoint written under an evaluation."""
    without = ["eval.sets.main.every=null", *STRICT]
    alone = train_here(tmp_path / "alone", *tiny_run, *without).dir
    begin, update = HeldOutEvaluation.begin, RayExecutor.update
    evaluations, under = list[HeldOutEvaluation](), list[tuple[int, int | None]]()

    def begun(self: HeldOutEvaluation, step: int, steps_trained: int) -> dict[str, float]:
        """The next batch is there, so that its step has nothing to wait for."""
        schedule: Any = self.schedule
        if schedule.takes_guests:
            batch = schedule.policy._batches.get(schedule.steps_done, ())
            schedule.loop.run_on(lambda: all(map(schedule.groups.is_complete, batch)), batch)
        evaluations[:] = [self]
        return begin(self, step, steps_trained)

    def updated(self: RayExecutor, updates: Any) -> None:
        if evaluations:
            under.append((self.group.current_step(), evaluations[0].under_way))
        update(self, updates)

    monkeypatch.setattr(HeldOutEvaluation, "begin", begun)
    monkeypatch.setattr(RayExecutor, "update", updated)
    saved = [*tiny_run, *STRICT, *EVALUATED, "trainer.save_every=1"]
    run = train_here(tmp_path / "run", *saved).dir
    assert under == [(2, 1), (3, 2), (4, 3), (5, 4)]
    assert [x["step"] for x in read_lines(run / "metrics.jsonl") if "step_s" in x] == [*range(1, 6)]
    wanted, got = weights(alone), weights(run)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    metrics = evaluated(run)
    assert {step for step, of_step in metrics.items() if "eval/late/avg@1" in of_step} == {
        0, 2, 4, 5,
    }  # fmt: skip
    events = read_lines(run / "events.jsonl")
    ends = [i for i, event in enumerate(events) if event["kind"] == "evaluation"]
    saves = {x["step"]: i for i, x in enumerate(events) if x["kind"] == "checkpoint"}
    assert saves[1] < next(i for i in ends if events[i]["step"] == 1)
    state = json.loads((run / "checkpoints" / "step_000004" / "resume" / "state.json").read_text())
    accuracy = {x["step"]: x["eval_accuracy"] for x in read_lines(run / "metrics.jsonl")
                if "eval_accuracy" in x}  # fmt: skip
    assert state["scores"] == {**{str(step): accuracy[step] for step in (1, 2, 3)}, "4": None}
    checkpoint = run / "checkpoints" / "step_000002"
    again = train_here(tmp_path / "again", *saved, f"trainer.resume={checkpoint}").dir
    got = weights(again)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    assert evaluated(again) == {step: metrics[step] for step in (2, 3, 4, 5)}
    assert texts(again / "samples.jsonl", "main")[3] == texts(run / "samples.jsonl", "main")[3]


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("ends", [False, True], ids=["under way", "ended"])
def test_a_step_is_given_up_under_it(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ends: bool,
) -> None:
    """A run resumes from the checkpoint of the step before, and its evaluation is there once."""
    settings = [*tiny_run, *STRICT, *EVALUATED]
    whole = train_here(tmp_path / "whole", *settings).dir
    begin, update = HeldOutEvaluation.begin, RayExecutor.update
    evaluations = list[HeldOutEvaluation]()

    def begun(self: HeldOutEvaluation, step: int, steps_trained: int) -> dict[str, float]:
        evaluations[:] = [self]
        return begin(self, step, steps_trained)

    def updated(self: RayExecutor, updates: Any) -> None:
        if self.group.current_step() == 3 and self.may_abandon:
            if ends:
                evaluations[0].wait()
            raise Abandoned
        update(self, updates)

    with monkeypatch.context() as patched:
        patched.setattr(HeldOutEvaluation, "begin", begun)
        patched.setattr(RayExecutor, "update", updated)
        with pytest.raises(Interrupted, match="stopped after step 2"):
            train_here(tmp_path / "run", *settings, "trainer.resume=auto")
    metrics = evaluated(tmp_path / "run")
    run = train_here(tmp_path / "run", *settings, "trainer.resume=auto").dir
    assert (2 in metrics) is ends
    assert evaluated(run) == evaluated(whole)
    lines = [(x["step"], name) for x in read_lines(run / "metrics.jsonl") for name in x]
    assert Counter(lines)[2, "eval_accuracy"] == Counter(lines)[2, "eval/late/avg@1"] == 1
    wanted, got = weights(whole), weights(run)
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
