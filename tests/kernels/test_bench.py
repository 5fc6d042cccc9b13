"""The bench runs, with a tiny size, and prints records of the agreed shape."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts/bench/linear_log_probs.py"


@pytest.mark.slow
def test_prints_its_lines():
    options = ["--size", "1024", "32", "20000", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    records = {record["name"]: record for record in map(json.loads, done.stdout.splitlines())}
    if not torch.cuda.is_available():
        assert "no CUDA device" in records["linear_log_probs_vs_liger"]["skipped"]
    for name in ("linear_log_probs_seconds_vs_logits", "linear_log_probs_peak_vs_logits"):
        record = records[name]
        assert list(record)[:6] == ["name", "value", "unit", "baseline", "ratio", "better"]
        assert record["loss_difference"] < 1e-2  # bf16 on a GPU
    # 2^24 logits in float32 are 64 MiB; all of them are 78 MiB, held three times by autograd.
    assert records["linear_log_probs_peak_vs_logits"]["ratio"] < 0.6
