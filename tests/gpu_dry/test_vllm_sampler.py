"""Draws in vLLM on a fake GPU: the host waits for nothing, and launches as much for any batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu_dry

TESTS = Path(__file__).parents[1]


def test_a_draw_waits_for_nothing(tmp_path: Path) -> None:
    """Nor do the ranks of a tensor-parallel group, whose tokens travel on the device."""
    out = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "gpu_dry.vllm_sampler", str(out)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    for name, by_rows in figures.items():
        first, *others = by_rows.values()
        assert first["syncs"] == {}, name
        assert first["kernels"] >= (1 if name == "rank 1 of 2" else 20), name
        assert all(other == first for other in others), name
