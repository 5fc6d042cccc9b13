"""A run whose every process is killed amid a step: its finished samples are not made again.

Its ranks stop in a step once each has saved some samples; then the test kills all processes.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from resumed_runs import check_same, lines
from whole_runs import REPLAYED, Command

from hybridrl.checkpoint.sample_records import scan
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.driver.saved_samples import FOLDER
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow import executor as flow_executor
from hybridrl.flow.executor import Advanced, Event, Submit
from hybridrl.flow.sample import SampleId
from hybridrl.flow.saved_samples import TakeSaved
from hybridrl.telemetry.records import read_lines

STOPPING = """
import os
import time

from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe
from hybridrl.workers.saved_samples import SavedSamples


def armed():
    '''In every rank that is sent the loss: it stops when it has saved so many samples of a step.'''
    if os.environ.get("STOP_IN") and not hasattr(SavedSamples, "is_armed"):
        SavedSamples.is_armed, append, num = True, SavedSamples.append, []

        def appending(self, *args):
            append(self, *args)
            if self._into is not None and self._into.folder.endswith(os.environ["STOP_IN"]):
                num.append(args)
                while len(num) >= int(os.environ["STOP_AFTER"]):
                    time.sleep(60)

        SavedSamples.append = appending
    return losses.ClippedLoss()


class ArmedLoss(losses.ClippedLoss):
    def __reduce__(self):
        return armed, ()


@recipe("stopping")
def dataflow(flow, cfg):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    samples = samples.by_group(advantages.group_relative)
    flow.actor.update(samples, loss=ArmedLoss())
"""
RANKS, EACH = 2, 3
"""Ranks of the run that is killed, and samples that each of them saves before."""
STEP = 3


@pytest.fixture
def settings(tiny_run: list[str], tmp_path: Path) -> list[str]:
    """Settings of a strict run of four steps, with checkpoints after each second one."""
    file = tmp_path / "stopping.py"
    file.write_text(STOPPING)
    changed = ("recipe", "trainer.steps=", "trainer.save_every=", "trainer.keep_last=")
    kept = [x for x in (*tiny_run, *REPLAYED) if not x.startswith(changed)]
    steps = ["trainer.steps=4", "trainer.save_every=2", "eval.sets.main.every=null"]
    saved = ["trainer.save_samples=true", "rollout.decode_steps=4"]
    saved += ["model.compute_dtype=float32", "rollout.dtype=float32"]
    return [*kept, f"recipe={{target: '{file}:dataflow'}}", *steps, *saved, "cluster.ranks=2"]


def files_of(run_dir: Path, step: int) -> list[Path]:
    return sorted((run_dir / FOLDER / f"step_{step:06d}").glob("*"))


def saved_in(run_dir: Path, step: int) -> dict[SampleId, int]:
    """Response tokens of the whole records of a step, by sample."""
    records = [record for file in files_of(run_dir, step) for record in scan(file)[0]]
    return {SampleId.read(facts["id"]): facts["response_tokens"] for _, facts in records}


@pytest.fixture
def killed(
    command: Callable[..., Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """`killed(*overrides)` is the directory of a run whose processes were all killed in a step."""

    def kill(*overrides: str, step: int = STEP, each: int = EACH) -> Path:
        monkeypatch.setenv("STOP_IN", f"step_{step:06d}")
        monkeypatch.setenv("STOP_AFTER", str(each))
        run_dir = tmp_path / "run"
        resumes = ["trainer.resume=auto", f"run.dir={run_dir}"]
        run = command("cluster=processes", *overrides, *resumes)
        monkeypatch.delenv("STOP_IN")
        run.wait_for(lambda: len(saved_in(run_dir, step)) >= each * RANKS)
        for process in run.alive():
            process.send_signal(signal.SIGKILL)
        run.popen.wait(60)
        return run_dir

    return kill


class Generated:
    """What a run asks of its engines and what they do, by step of the run."""

    def __init__(self) -> None:
        self.submitted: dict[int, list[SampleId]] = {}
        self.taken: dict[int, list[SampleId]] = {}
        self.rows: dict[int, int] = {}  # tokens that were decoded


@contextmanager
def counted() -> Iterator[Generated]:
    """Count in the driver, whose calls and events are those of all ranks."""
    seen = Generated()
    wait, call = RayExecutor.wait, WorkerGroup.call_advance

    def waiting(self: RayExecutor) -> list[Event]:
        events = wait(self)
        step = self.group.current_step()
        for event in events:
            if isinstance(event, Advanced):
                seen.rows[step] = seen.rows.get(step, 0) + event.work.rows
        return events

    def calling(self: WorkerGroup, instance: int, commands: Sequence[Any], *limits: int) -> Any:
        for command in commands:
            of = {Submit: seen.submitted, TakeSaved: seen.taken}.get(type(command))
            if of is not None:
                of.setdefault(self.current_step(), []).extend(command.ids)
        return call(self, instance, commands, *limits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RayExecutor, "wait", waiting)
        patch.setattr(WorkerGroup, "call_advance", calling)
        yield seen


@pytest.mark.layouts
@pytest.mark.parametrize("schedule", ["serial", "fused"])
def test_a_killed_run_makes_no_finished_sample_again(
    schedule: str,
    killed: Callable[..., Path],
    settings: list[str],
    train_here: Callable[..., Any],
    tmp_path: Path,
) -> None:
    how = [*settings, f"schedule={schedule}"]
    with counted() as undisturbed:
        whole = train_here(tmp_path / "whole", *how)
    run_dir = killed(*how)
    saved = saved_in(run_dir, STEP)
    assert len(saved) == EACH * RANKS
    with counted() as resumed:
        train_here(run_dir, *how, "trainer.resume=auto")
    samples = {s.id: s for step in whole.steps if step.step == STEP for s in step.samples}
    print(undisturbed.rows, resumed.rows, sum(s.response_tokens for s in samples.values()), saved)
    assert sorted(resumed.taken[STEP]) == sorted(saved)
    assert sorted(resumed.submitted[STEP]) == sorted(samples.keys() - saved.keys())
    assert resumed.taken.keys() == {STEP}
    check_same(tmp_path / "whole", run_dir, tmp_path)
