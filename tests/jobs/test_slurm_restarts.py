"""Jobs of a real Slurm that end before their run does: it goes on, and ends as one job does."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hybridrl.runtime import slurm

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def tensors(run_dir: Path, folder: Path) -> dict[str, torch.Tensor]:
    """Parameters and moments of the actor at the end of a run."""
    dcp_to_torch_save(run_dir / "final" / "resume" / "actor", folder / "whole.pt")
    by_name: dict[str, torch.Tensor] = torch.load(folder / "whole.pt")
    return by_name


def complaints(log: str | Path) -> list[str]:
    """The lines in which the run has said why it ends."""
    return [line for line in Path(log).read_text().splitlines() if line.startswith("hybridrl: ")]


@pytest.mark.wide
def test_short_jobs_end_as_one_long_job_does(pair: Any, tmp_path: Path) -> None:
    """Slurm itself warns of the time limit, in the middle of the run; then the same tensors."""
    jobs, whole, short = pair
    for job in (whole, short):
        assert jobs.wait(job, timeout=500) == "COMPLETED", jobs.printed()
    (known,) = slurm.jobs(short)
    assert known["TimeLimit"] == "00:04:00"
    log = jobs.folder / "short/slurm" / f"{short}.out"
    cuts = []
    for number, line in enumerate(complaints(log), 1):
        said = re.match(r"hybridrl: stopped after step (\d+); trainer.resume=auto", line)
        assert said, line
        assert line.endswith(f"; the job starts again ({number} of 9)")
        cuts.append(int(said[1]))
    assert len(cuts) == int(known["Restarts"])
    assert any(0 < step < 72 for step in cuts)
    assert jobs.steps("whole") == jobs.steps("short") == list(range(1, 73))
    a, b = (tensors(jobs.folder / run, tmp_path) for run in ("whole", "short"))
    assert any(name.startswith("exp_avg/") for name in a)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    assert jobs.left() == []


def test_a_run_whose_node_was_killed_finishes(jobs: Any, exact: list[str]) -> None:
    """As the plain template: the node is named, and the job starts again at once.

    Perhaps more than once, before the node is back.
    """
    options = ["--gres=none", "--cpus-per-task=2", "--output=run.out"]
    template = str(ROOT / "scripts/slurm/train.sbatch")
    run = [*exact, "trainer.save_every=5", "run.dir=run"]
    job = jobs.slurm.call("sbatch", "--parsable", *options, template, *run).strip()
    jobs.wait_for(Path("run/checkpoints/step_000005").is_dir, job)

    jobs.slurm.kill_node("n2", steps=False)
    try:
        jobs.wait_for(lambda: "the job starts again (1 of 3)" in jobs.printed())
    finally:
        jobs.slurm.start_node("n2")

    jobs.wait_for_restart(job, 1)
    assert jobs.wait(job, timeout=300) == "COMPLETED", jobs.printed()
    line = complaints("run.out")[0]
    assert re.match(r"hybridrl: rank [01] of 2 \(.*\) on node n2 \(pid \d+\) failed", line)
    assert jobs.steps("run") == list(range(1, 25))
    assert jobs.left() == []


@pytest.mark.slow
def test_a_killed_node_is_named(jobs: Any, two: list[str]) -> None:
    """Without cluster.requeue the job ends."""
    submitted = jobs.submit(
        *two, "trainer.steps=100000", "eval.sets.main.every=null", "run.dir=run"
    )
    job = submitted["job"]
    jobs.wait_for_steps("run", job, 2)

    jobs.slurm.kill_node("n2")
    try:
        jobs.wait_for(lambda: jobs.state(job) != "RUNNING")
    finally:
        jobs.slurm.start_node("n2")

    assert jobs.wait(job) == "FAILED"
    assert jobs.record("run")["state"] == "failed"
    (line,) = complaints(submitted["logs"][0])
    assert re.match(
        r"hybridrl: rank [01] of 2 \(.*\) on node n2 \(pid \d+\) failed: its proc", line
    )
    assert jobs.left() == []


@pytest.mark.slow
def test_a_run_that_always_dies_ends(jobs: Any, exact: list[str]) -> None:
    submitted = jobs.submit(*exact, "cluster.requeue=1", "run.dir=run")
    job = submitted["job"]
    for count in (1, 2):
        jobs.wait_for_steps("run", job)
        name = "ray::ClusterWorker"
        next(p for p in jobs.slurm.processes() if p.name().startswith(name)).kill()
        if count == 1:
            jobs.wait_for_restart(job, count)
    assert jobs.wait(job) == "FAILED"
    lines = complaints(submitted["logs"][0])
    assert lines[0].endswith("; the job starts again (1 of 1)")
    assert lines[1].endswith("; all 1 restarts of cluster.requeue are used up")


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [True, False])
def test_a_preempted_run_finishes(jobs: Any, exact: list[str], signalled: bool) -> None:
    """A job of another partition takes the nodes; the run ends in the grace time, and goes on.

    Where Slurm is not told to send the signal, it ends the ranks instead.
    """
    submitted = jobs.submit(*exact, "trainer.save_every=5", "run.dir=run")
    job, log = submitted["job"], submitted["logs"][0]
    jobs.wait_for(Path("run/checkpoints/step_000005").is_dir, job)
    settings = ["SlurmctldParameters=preempt_send_user_signal"] if signalled else []
    with jobs.slurm.settings(*settings):
        sbatch = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive"]
        urgent = jobs.slurm.call(*sbatch, "--output=urgent.out", "--wrap=sleep 1").strip()
        assert jobs.wait(urgent) == "COMPLETED"
    jobs.wait_for_restart(job, 1)
    assert jobs.wait(job, timeout=300) == "COMPLETED", jobs.printed()
    how = r"stopped after step \d+" if signalled else "rank [01] of 2 .* failed: its process ended"
    assert re.match(rf"hybridrl: {how}.*; the job starts again \(1 of 3\)$", complaints(log)[0])
    assert jobs.steps("run") == list(range(1, 25))
    assert jobs.left() == []
