"""The committed tables of the dry runs, and how what was counted compares with them."""

import json
import os
from pathlib import Path
from typing import Any

from gpu_dry.cases import CASES, OTHER_RANKS

HERE = Path(__file__).parent
COUNTS, MEMORY = HERE / "counts.json", HERE / "memory.json"
MISSED = HERE / "missed.json"
"""Lines for a GPU that no dry run runs, each with a reason."""
RUN_BY = "run by "
"""How the reason of a line begins that an ordinary test runs; the test follows."""
BY_DRIVER = "the driver of test_logical_gpus.py runs it"
"""The reason of lines that this test runs."""
BY_SAMPLER = "the process of test_vllm_sampler.py runs it"
NOT_RUN = (
    "a graph step draws from all tokens, and no other step takes these kernels",
    "a profile of a GPU needs one",
    "of ranks that generate alone, with adapters, which no dry run has",
    "a checkpoint in the background is written by a thread, which a dry run has not",
    "a dry run joins without a worker, and calls it itself",
    "doctor measures a device, and a fake one has no times",
    "ranks and the doctor measure a device, and a fake one has no times",
    "needs torchao, which is not installed here: make test-adamw8bit runs it on a CPU",
    "vLLM is not installed, and its GPU build needs a GPU to start",
)
"""The reasons of lines that no test here runs."""
WRITE = "GPU_DRY_WRITE"
"""Set this variable to rewrite both."""
MOST = 0.05
"""How far a planned phase may be from its peak."""


def committed(file: Path, counted: dict[str, Any]) -> dict[str, Any]:
    """The rows of `counted`'s cases, which are written first if `WRITE` is set."""
    table = json.loads(file.read_text())
    if WRITE in os.environ:
        rows = table | counted
        table = {name: rows[name] for name in rows if name in CASES | OTHER_RANKS}
        file.write_text(json.dumps(table, indent=1) + "\n")
    return {name: table[name] for name in counted}


def count_changes(counted: dict[str, Any]) -> list[str]:
    """A line for each phase whose figures are not the table's."""
    table = committed(COUNTS, counted)
    changes = [
        f"{case}, {phase}: {table[case]['phases'].get(phase)} -> {counts}"
        for case, figures in counted.items()
        for phase, counts in figures["phases"].items()
        if counts != table[case]["phases"].get(phase)
    ]
    return changes + [
        f"{case}: no phase {phase}"
        for case, figures in counted.items()
        for phase in table[case]["phases"].keys() - figures["phases"].keys()
    ]


def memory_changes(memory: dict[str, Any]) -> list[str]:
    """A line for each case with another peak or plan, and for each plan that is off its peak."""
    table = committed(MEMORY, memory)
    changes = [
        f"{case}: {table[case]} -> {phases}"
        for case, phases in memory.items()
        if phases != table[case]
    ]
    for name, phases in memory.items():
        for phase, (peak, planned) in phases.items():
            if abs(planned / peak - 1) >= MOST:
                changes.append(f"{name}, {phase}: {peak} counted, {planned} planned")
    return changes
