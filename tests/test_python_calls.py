"""The Python calls of a step of the demo, held to the table of python_calls.json.

The counts are exact: `cProfile` counts every call of a run of ten steps and of one of two, in one
process, and the difference is eight steps. `PYTHON_CALLS_WRITE=1` writes the table anew.
"""

import json
import os
import pstats
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.telemetry.records import read_lines

TABLE = Path(__file__).with_name("python_calls.json")
OWN = tuple(f"{Path(__file__).parents[1] / room}/" for room in ("hybridrl", "recipes"))
ROOM = 1.05  # other versions of packages make other calls
FEW, MANY = 2, 10
DEMO = (
    "experiment=spell_tiny", "cluster=processes", "cluster.ranks=1", "telemetry.report=false",
    "eval.sets.main.every=1000", "trainer.save_every=1000",
)  # fmt: skip


def profiled(folder: Path, steps: int) -> tuple[pstats.Stats, float]:
    """The profile of the demo with so many steps, and the tokens of its samples."""
    command = [sys.executable, "-m", "cProfile", "-o", str(folder / f"{steps}.prof")]
    command += [str(Path(sys.executable).with_name("hybridrl")), "train", *DEMO]
    command += [f"trainer.steps={steps}", f"run.dir={folder / str(steps)}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = read_lines(folder / str(steps) / "metrics.jsonl")
    tokens = sum(row.get("samples/tokens", 0) for row in rows if row["phase"] == "rl")
    return pstats.Stats(str(folder / f"{steps}.prof")), tokens


def own_calls(stats: pstats.Stats) -> int:
    """Calls of functions of this project."""
    rows = stats.stats.items()  # type: ignore[attr-defined]
    return sum(row[1] for (file, _, _), row in rows if file.startswith(OWN))


@pytest.mark.layouts
def test_a_step_makes_no_more_calls_than_the_table_says(tmp_path: Path) -> None:
    (few, few_tokens), (many, many_tokens) = (profiled(tmp_path, n) for n in (FEW, MANY))
    calls = many.total_calls - few.total_calls  # type: ignore[attr-defined]
    counted = {
        "calls_per_step": calls / (MANY - FEW),
        "own_calls_per_step": (own_calls(many) - own_calls(few)) / (MANY - FEW),
        "calls_per_token": calls / (many_tokens - few_tokens),
    }
    if os.environ.get("PYTHON_CALLS_WRITE"):
        rounded = {name: round(number, 1) for name, number in counted.items()}
        TABLE.write_text(json.dumps(rounded, indent=2) + "\n")
    table = json.loads(TABLE.read_text())
    assert counted["own_calls_per_step"] > 1000  # the profile has this project's functions
    assert {name: n for name, n in counted.items() if n > ROOM * table[name]} == {}
