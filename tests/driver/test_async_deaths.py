"""Ranks that generate die within a run: it goes on with the others, and loses nothing."""

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from driver.test_async import TALKING
from safetensors.torch import load_file

from hybridrl.config.stored_run import composed_run
from hybridrl.driver.checkpoints import Checkpoints
from hybridrl.driver.evaluate import HeldOutEvaluation
from hybridrl.driver.rank_failures import WorkerError
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.schedule.asynchronous import Async
from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.long

STEPS, PROMPTS = 5, 4
APART = [
    "cluster.ranks=4", "cluster.pools.rollout=3", f"trainer.steps={STEPS}", "trainer.save_every=2",
    "deterministic=strict", "rollout.decode_steps=4", "eval.sets.main.every=1",
    "eval.sets.main.num_prompts=6",
]  # fmt: skip
WHEN_FREE = ["schedule=async", "schedule.max_staleness=2"]
IN_FLIGHT = [*WHEN_FREE, "schedule.new_weights=in_flight"]


class Killer:
    """Kills ranks of an executor: before the wait of a number, or before a checkpoint's samples."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.num_waits = self.num_checkpoints = 0
        self.at_waits: dict[int, int] = {}  # rank by number
        self.at_checkpoints: dict[int, int] = {}
        wait, save = RayExecutor.wait, Checkpoints._save_pending

        def waits(executor: RayExecutor) -> Any:
            self.num_waits += 1
            self._kill(executor, self.at_waits.pop(self.num_waits, None))
            return wait(executor)

        def saves(checkpoints: Checkpoints, *args: Any) -> Any:
            self.num_checkpoints += 1
            rank = self.at_checkpoints.pop(self.num_checkpoints, None)
            self._kill(checkpoints.executor, rank)
            return save(checkpoints, *args)

        patch.setattr(RayExecutor, "wait", waits)
        patch.setattr(Checkpoints, "_save_pending", saves)

    def _kill(self, executor: RayExecutor, rank: int | None) -> None:
        if rank is not None:
            pid = re.search(r"pid (\d+)", executor.group.failures.locations[rank][0])
            assert pid is not None
            os.kill(int(pid[1]), signal.SIGKILL)


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Killer:
    return Killer(monkeypatch)


def settings_of(long_tail: list[str], *more: str) -> list[str]:
    ours = tuple(setting.partition("=")[0] + "=" for setting in (*APART, *more))
    return [setting for setting in long_tail if not setting.startswith(ours)] + [*APART, *more]


def run_of(train: Callable[..., Any], long_tail: list[str], folder: Path, *more: str) -> Any:
    return train(folder, *settings_of(long_tail, *more))


def check_whole(run: Any, staleness: int) -> None:
    """Each step has its batch, of weights that are not too old, and nothing is left on ranks."""
    assert len(run.steps) == STEPS
    for number, step in enumerate(run.steps):
        batch = range(number * PROMPTS, (number + 1) * PROMPTS)
        assert {sample.id.prompt for sample in step.samples} == {*batch}
        assert len({sample.id for sample in step.samples}) == len(step.samples)
        ages = [number - span.version for s in step.samples for span in s.spans]
        assert 0 <= min(ages) <= max(ages) <= staleness
    lines = read_lines(run.dir / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, STEPS + 1)]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("schedule", [WHEN_FREE, IN_FLIGHT], ids=["when_free", "in_flight"])
def test_thirty_deaths_cost_no_step(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    killer: Killer,
    schedule: list[str],
) -> None:
    """Two of three instances die at random moments; where versions are fixed, weights are equal."""
    whole = run_of(train_here, long_tail, tmp_path / "whole", *schedule)
    wanted = load_file(whole.dir / "final" / "model.safetensors")
    num_waits, draw, num_killed = killer.num_waits, Random(7), 0
    for number in range(15):
        killer.num_waits = killer.num_checkpoints = 0
        ranks = draw.sample([1, 2, 3], 2)
        if draw.random() < 0.2:
            killer.at_checkpoints = {draw.randint(1, 2): ranks.pop()}
        killer.at_waits = dict(zip(draw.sample(range(1, num_waits - 4), 2), ranks, strict=False))
        run = run_of(train_here, long_tail, tmp_path / f"killed-{number}", *schedule)
        check_whole(run, 2)
        deaths = [x for x in read_lines(run.dir / "events.jsonl") if x["kind"] == "death"]
        num_killed += len(deaths)
        weights = load_file(run.dir / "final" / "model.safetensors")
        if schedule is WHEN_FREE:
            assert [name for name in wanted if not torch.equal(wanted[name], weights[name])] == []
    assert num_killed >= 25, "ranks that die behind the last call to them are not missed"


@pytest.mark.parametrize("schedule", [WHEN_FREE], ids=["when_free"])
def test_a_rank_that_dies_leaves_its_samples_to_others(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    killer: Killer,
    schedule: list[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """While it decodes, and while it is asked for a checkpoint; the last one ends the run."""
    killer.at_waits, killer.at_checkpoints = {4: 2}, {1: 3}
    run = run_of(train_here, long_tail, tmp_path / "run", *schedule)
    check_whole(run, 2)
    assert sum(line["samples/restarted"] for line in run.metrics) > 0
    notes = [x["text"] for x in read_lines(run.dir / "events.jsonl") if x["kind"] == "note"]
    died = [text for text in notes if "its samples begin again" in text]
    assert re.match(r"rank 2 of 4 \(rollout, actor\) on node .* failed: its process ended", died[0])
    assert "; its log is " in died[0]
    assert died[1].startswith("rank 3 of 4")
    killer.num_waits, killer.at_waits = 0, {4: 2, 6: 1, 8: 3}
    with pytest.raises(WorkerError, match=r"rank . of 4 .*its process ended"):
        run_of(train_here, long_tail, tmp_path / "all", *schedule)


@pytest.mark.wide
@pytest.mark.layouts
def test_one_that_dies_in_an_evaluation_leaves_it_to_others(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    killer: Killer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the next step is trained, too: metrics and parameters are those of a whole run."""
    whole = run_of(train_here, tiny_run, tmp_path / "whole", *WHEN_FREE)
    begin, under = HeldOutEvaluation.begin, list[int | None]()

    def begun(self: HeldOutEvaluation, step: int, steps_trained: int) -> dict[str, float]:
        metrics = begin(self, step, steps_trained)
        if step == 2:
            under.append(self.under_way)
            killer.at_waits[killer.num_waits + 1] = 2
        return metrics

    monkeypatch.setattr(HeldOutEvaluation, "begin", begun)
    run = run_of(train_here, tiny_run, tmp_path / "run", *WHEN_FREE)
    assert under == [2]
    deaths = [x for x in read_lines(run.dir / "events.jsonl") if x["kind"] == "death"]
    assert [death["instance"] for death in deaths] == [1]
    check_whole(run, 2)
    wanted, got = (load_file(x.dir / "final" / "model.safetensors") for x in (whole, run))
    assert [name for name in wanted if not torch.equal(wanted[name], got[name])] == []
    wanted, got = (
        {x["step"]: x["eval_accuracy"] for x in read_lines(y.dir / "metrics.jsonl")
         if "eval_accuracy" in x} for y in (whole, run)
    )  # fmt: skip
    assert got == wanted
    assert got.keys() == {*range(STEPS + 1)}


@pytest.mark.layouts
def test_a_record_with_a_death_is_followed(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    killer: Killer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Conversations of the dead begin anew, with other caches, and ranks that train too follow."""
    begin_step = Async.begin_step

    def begins(policy: Async) -> None:
        begin_step(policy)
        if policy.schedule.steps_done == 1:
            killer.at_waits[killer.num_waits + 2] = 2

    monkeypatch.setattr(Async, "begin_step", begins)
    settings = [
        *IN_FLIGHT, *TALKING, "schedule.parked_kv=keep", "+environment.params.sleep=0.02",
        "rollout.decode_steps=2", "eval.sets.main.every=null",
    ]  # fmt: skip
    first = run_of(train_here, long_tail, tmp_path / "first", *settings)
    monkeypatch.undo()
    assert sum(line["samples/restarted"] for line in first.metrics) > 0
    check_whole(first, 2)
    composed_run([*settings_of(long_tail, *settings), "cluster=processes", f"run.dir={first.dir}"])
    settings += [f"schedule.follow={first.dir}", "cluster.ranks=1", "cluster.pools.rollout=0"]
    again = run_of(train_here, long_tail, tmp_path / "again", *settings)
    records = [read_lines(run.dir / "versions.jsonl") for run in (first, again)]
    assert records[0] == records[1]
    a, b = (load_file(run.dir / "final" / "model.safetensors") for run in (first, again))
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(4))
def test_what_ray_loses_with_a_rank_is_made_again(
    train: Callable[..., Any], long_tail: list[str], tmp_path: Path, killer: Killer, number: int
) -> None:
    """Samples that it had parked, published or exported die with it; evaluations park all."""
    draw = Random(number)
    killer.at_waits = dict(
        zip(draw.sample(range(2, 40), 2), draw.sample([1, 2, 3], 2), strict=True)
    )
    kv = draw.choice(["recompute", "keep"])
    more = ["eval.sets.main.every=1", f"schedule.parked_kv={kv}"]
    run = run_of(train, long_tail, tmp_path / "run", *IN_FLIGHT, *more)
    check_whole(run, 2)
    deaths = [x for x in read_lines(run.dir / "events.jsonl") if x["kind"] == "death"]
    assert len(deaths) == 2
