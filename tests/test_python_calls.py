"""The Python calls of a step of the demo, held to the table of python_calls.json.

The counts are exact: a profiler counts every call in the driver's process, which is the only rank,
from the end of step 2 to the end of step 10. Calls of other threads, such as the one that owns the
judges, are not counted. `PYTHON_CALLS_WRITE=1` writes the table anew.
"""

import json
import os
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
    "eval.sets.main.every=1000", "eval.sets.main.num_prompts=1", "trainer.save_every=1000",
)  # fmt: skip
# `python -m cProfile` keeps one of several functions with one name and line, as named tuples have.
COUNT = """
import cProfile, json, runpy, sys
path, few, many, *sys.argv = sys.argv[1:]
from hybridrl.driver.run_records import RunRecords
profile, record, done = cProfile.Profile(), RunRecords.record_step, []

def recorded(records, *args):
    metrics = record(records, *args)
    done.extend(["rl"] * (records.telemetry._phase == "rl"))  # not the warm start
    if len(done) == int(few):
        profile.enable()
    elif len(done) == int(many):
        profile.disable()
    return metrics

RunRecords.record_step = recorded
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    rows = [(getattr(e.code, "co_filename", ""), e.callcount) for e in profile.getstats()]
    with open(path, "w") as file:
        json.dump(rows, file)
"""


def counted(folder: Path) -> tuple[int, int, float]:
    """The calls of the steps after `FEW`, those of this project, and their samples' tokens."""
    run, counts = folder / "run", folder / "calls.json"
    command = [sys.executable, "-c", COUNT, str(counts), str(FEW), str(MANY)]
    command += [str(Path(sys.executable).with_name("hybridrl")), "train", *DEMO]
    command += [f"trainer.steps={MANY}", f"run.dir={run}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    calls = json.loads(counts.read_text())
    own = sum(number for file, number in calls if file.startswith(OWN))
    rows = [row for row in read_lines(run / "metrics.jsonl") if row["phase"] == "rl"]
    tokens = [row["samples/tokens"] for row in rows if "samples/tokens" in row]
    assert len(tokens) == MANY
    return sum(number for _, number in calls), own, sum(tokens[FEW:])


@pytest.mark.layouts
def test_a_step_makes_no_more_calls_than_the_table_says(tmp_path: Path) -> None:
    calls, own, tokens = counted(tmp_path)
    rates = {
        "calls_per_step": calls / (MANY - FEW),
        "own_calls_per_step": own / (MANY - FEW),
        "calls_per_token": calls / tokens,
        "own_calls_per_token": own / tokens,
    }
    if os.environ.get("PYTHON_CALLS_WRITE"):
        rounded = {name: round(number, 1) for name, number in rates.items()}
        TABLE.write_text(json.dumps(rounded, indent=2) + "\n")
    table = json.loads(TABLE.read_text())
    assert rates["own_calls_per_step"] > 1000  # the profile has this project's functions
    assert {name: n for name, n in rates.items() if n > ROOM * table[name]} == {}
