"""Runs `python -m gpu_dry` and its relatives: in processes of their own, cases two at a time."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def run_processes(
    folder: Path, halves: Sequence[Sequence[str]], *options: str
) -> list[dict[str, Any]]:
    """What each process of `halves`, lists of cases, has found; `folder` is scratch."""
    started = []
    for number, names in enumerate(halves):
        out = folder / f"{number}.json"
        command = [sys.executable, "-m", "gpu_dry", "--out", str(out), *options]
        command += [word for name in names for word in ("--case", name)]
        started.append((subprocess.Popen(command, env=_environment()), out))
    for process, _ in started:
        assert process.wait() == 0, "a dry run failed: its error is above"
    return [json.loads(out.read_text()) for _, out in started]


def missed_by_tests(folder: Path, tests: Sequence[str]) -> dict[str, list[str]]:
    """The lines that need a GPU, and that each of these ordinary `tests` misses."""
    out = folder / "missed.json"
    command = [sys.executable, "-m", "gpu_dry.ordinary", str(out), *tests]
    subprocess.run(command, env=_environment(), cwd=TESTS.parent, check=True)
    missed: dict[str, list[str]] = json.loads(out.read_text())
    return missed


def fsdp_memory(out: Path, cases: Sequence[str], *options: str) -> dict[str, dict[str, Any]]:
    """What `python -m gpu_dry.fsdp_memory` counts and plans; `out` is scratch."""
    command = [sys.executable, "-m", "gpu_dry.fsdp_memory", "--out", str(out), *options]
    command += [f"--case={name}" for name in cases]
    subprocess.run(command, env=_environment(), check=True)
    figures: dict[str, dict[str, Any]] = json.loads(out.read_text())
    return figures


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
