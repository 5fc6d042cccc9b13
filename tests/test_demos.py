"""The demos of environments learn, with their own settings; takes minutes, two seeds each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

# Held-out accuracy: at most before the recipe's first step, at least after its last, and the gain.
WANTED = {"tools_tiny": (0.65, 0.95, 0.3), "grid_tiny": (0.65, 0.5, 0.1)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("experiment", sorted(WANTED))
def test_the_demos_of_environments_learn(tmp_path: Path, experiment: str, seed: int) -> None:
    """A tool that is called half of the time is relied on; who reads replies comes to the end."""
    command = [
        sys.executable, "-m", "hybridrl.cli", "train", f"experiment={experiment}",
        f"run.seed={seed}", f"run.dir={tmp_path / 'run'}", "trainer.save_every=0",
        "eval.sets.main.every=null", "telemetry.loggers=[]", "telemetry.report=false",
        "telemetry.progress=false",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    before, after = result["accuracy_before"], result["accuracy_after"]
    most_before, least_after, gain = WANTED[experiment]
    assert before <= most_before
    assert after >= max(least_after, before + gain)
