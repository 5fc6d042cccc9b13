"""Records the results of runs at one commit and compares them with another, for refactorings.

    python scripts/behavior.py record DIR [NAME ...]     # at each of the two commits
    python scripts/behavior.py compare BEFORE AFTER

`record` runs the demo, three steps of every recipe and of every schedule, and keeps the metrics and
the checksum of the final weights. `compare` prints every difference but in times, and ends with 1
if there is one. Both on one machine: other processors round otherwise.
"""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SHORT = ["trainer.steps=3", "warm_start.steps=100", "trainer.prompts_per_step=8"]
SHORT += ["eval.sets.main.num_prompts=64", "telemetry.report=false", "telemetry.loggers=[]"]
REFERENCE = ["recipe=grpo", "recipe.kl_coef=0.01"]
NAMES = ("serial", "fused", "partial", "packed")
SCHEDULES = {name: [f"schedule={name}", *REFERENCE] for name in NAMES}
# Decided by the clock, or by measured costs.
TIMES = ("time", "_s", "bubble_share", "_per_s", "migrated", "_bytes")


def runs() -> dict[str, list[str]]:
    """The overrides of every run, by its name."""
    recipes = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/config.yaml"))
    return {
        "demo": ["experiment=spell_tiny"],
        **{f"recipe-{name}": [f"recipe={name}", *SHORT] for name in recipes},
        **{f"schedule-{name}": [*how, *SHORT] for name, how in SCHEDULES.items()},
    }


def record(directory: Path, names: list[str]) -> None:
    """Run those of `names`, or all, into `directory`; what is there already stays."""
    for name, overrides in runs().items():
        run = directory / name
        if (names and name not in names) or (run / "final").is_dir():
            continue
        command = [str(Path(sys.executable).with_name("hybridrl")), "train", *overrides]
        print(name, flush=True)
        subprocess.run([*command, f"run.dir={run}"], check=True, stdout=subprocess.DEVNULL)


def outcome(run: Path) -> dict[str, Any]:
    """Values that must not change: metrics by line and key, and the weights."""
    values: dict[str, Any] = {}
    for number, line in enumerate((run / "metrics.jsonl").read_text().splitlines()):
        for key, value in json.loads(line).items():
            if not key.endswith(TIMES):
                values[f"{number}.{key}"] = value
    for file in sorted((run / "final").rglob("*.safetensors")):
        weights = hashlib.sha256(file.read_bytes()).hexdigest()
        values[str(file.relative_to(run))] = weights
    return values


def compare(before: Path, after: Path) -> int:
    """Print what differs; gives the number of differences."""
    differences = 0
    for run in sorted(path.name for path in before.iterdir()):
        old, new = outcome(before / run), outcome(after / run)
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
        for key in keys:
            print(f"{run}: {key}: {old.get(key)} -> {new.get(key)}")
        differences += len(keys)
        print(f"{run}: {len(old)} values, {len(keys)} differ")
    return differences


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", directory, *names]:
            record(Path(directory).absolute(), names)
        case ["compare", before, after]:
            sys.exit(1 if compare(Path(before), Path(after)) else 0)
        case _:
            sys.exit(__doc__)
