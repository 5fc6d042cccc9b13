"""Whole runs with a rank that is stopped amid its work."""

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.jobs.commands import status
from hybridrl.system.activity import Activity, file_of, read
from hybridrl.system.rank_looks import process_state
from hybridrl.telemetry.records import read_lines

WATCHED = ["cluster=processes", "cluster.hang_floor_s=3", "trainer.steps=400"]


def stop(run_dir: Path, rank: int, after: int) -> Activity:
    """Stop a rank after so many steps, while it is in a call."""
    metrics, until = run_dir / "metrics.jsonl", time.monotonic() + 300
    while time.monotonic() < until:
        steps = [x["step"] for x in read_lines(metrics)] if metrics.exists() else []
        one = read(file_of(run_dir, rank))
        if one is not None and one.call and max(steps, default=0) >= after:
            os.kill(one.pid, signal.SIGSTOP)
            while not process_state(one.pid):
                time.sleep(0.01)
            return one
        time.sleep(0.1)
    raise AssertionError("the run has not come so far")


@pytest.mark.layouts
def test_a_rank_that_is_stopped_ends_the_run_with_one_line(
    command: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    run = command(*tiny_run, *WATCHED, "cluster.ranks=2", "run.dir=run")
    one = stop(tmp_path / "run", rank=1, after=1)
    table = list(status([str(tmp_path / "run")]))
    assert len(table) == 3
    assert re.fullmatch(rf"rank 1, pid {one.pid}: .*; is stopped by a signal", table[2])
    code, _, err = run.end(timeout=240)
    assert code == 1
    line = err.strip().splitlines()[-1]
    assert re.search(rf"rank 1 of 2 \(actor, reward\) on node .* \(pid {one.pid}\) failed", line)
    assert re.search(r"it is stuck .* for \d+ s; it is stopped by a signal", line)
    assert "rank 0, pid " in err  # and what the other one was in
    assert list(status([str(tmp_path / "run")])) == [f"failed  {tmp_path / 'run'}"]


@pytest.mark.wide
@pytest.mark.layouts
def test_a_generation_rank_that_is_stopped_ends_its_instance_alone(
    command: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    steps = "trainer.steps=12"
    layout = ["cluster.ranks=3", "cluster.pools.rollout=2", "schedule=one_step"]
    run = command(*tiny_run, *WATCHED, steps, *layout, "run.dir=run")
    one = stop(tmp_path / "run", rank=2, after=1)
    code, _, err = run.end(timeout=240)
    assert code == 0, err
    assert re.search(rf"rank 2 of 3 .*\(pid {one.pid}\) failed: it is stuck .* begin again", err)
    assert max(x["step"] for x in read_lines(tmp_path / "run" / "metrics.jsonl")) == 12
