"""`make bench-driver`: emulated ranks that share processes of Ray."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "driver.py"


@pytest.mark.wide
@pytest.mark.ray
def test_ranks_share_processes_of_ray() -> None:
    options = "--ranks 8 --steps 1 --schedules fused --longest 64 --processes 2 --time-scale 0.1"
    command = [sys.executable, str(BENCH), *options.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert (line["emulated"], line["ranks"], line["samples"]) == (True, 8, 64.0)
    assert line["processes"] == 2
    assert line["step_over_planned"] > 0.9  # modeled seconds are slept, so it is never sooner
