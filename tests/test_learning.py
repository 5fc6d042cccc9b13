"""A model learns as well under every schedule; takes many minutes, several seeds."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.telemetry.records import read_lines

SEEDS = (0, 1, 2)
RL_STEPS = 40
SCHEDULES = {
    "serial": [],
    "fused": ["schedule=fused"],
    "partial": ["schedule=partial"],
}


def accuracy(run_dir: Path, schedule: str, seed: int) -> tuple[float, float]:
    """Held-out accuracy before the recipe's steps (after the warm start) and at the end."""
    overrides = [
        "experiment=spell_tiny", f"trainer.steps={RL_STEPS}", "trainer.save_every=0",
        "eval.every=0", "telemetry.tensorboard=false", "telemetry.report=false",
        "telemetry.progress=false", f"run.seed={seed}", f"run.dir={run_dir}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "hybridrl.cli", "train", *overrides, *SCHEDULES[schedule]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    steps = [line for line in read_lines(run_dir / "metrics.jsonl") if "loss" in line]
    assert steps
    return found["accuracy_before"], found["accuracy_after"]


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_every_schedule_learns_as_serial_does(tmp_path: Path) -> None:
    """Means over the seeds agree within three standard errors of their difference.

    The spread over seeds is pooled over the schedules. Each accuracy is itself a share of 1024
    held-out words, with a standard error of at most 0.016, below which no spread is taken.
    """
    found: dict[str, list[float]] = {}
    for name in SCHEDULES:
        runs = [accuracy(tmp_path / f"{name}{seed}", name, seed) for seed in SEEDS]
        assert all(after > before + 0.1 for before, after in runs), (name, runs)
        found[name] = [after for _, after in runs]
    variances = [statistics.variance(values) for values in found.values()]
    spread = max(0.016, statistics.fmean(variances) ** 0.5)
    tolerance = 3 * spread * (2 / len(SEEDS)) ** 0.5
    means = {name: statistics.fmean(values) for name, values in found.items()}
    for name in ("fused", "partial"):
        assert abs(means[name] - means["serial"]) <= tolerance, (found, tolerance)
