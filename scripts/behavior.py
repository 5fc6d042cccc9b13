"""Records the results of runs at one commit and compares them with another, for refactorings.

    python scripts/behavior.py record DIR [NAME ...]     # at each of the two commits
    python scripts/behavior.py compare BEFORE AFTER

`record` runs the demo, and three steps of every recipe and of every schedule. Others have vLLM,
tools, the mechanisms of the tail on two ranks, or emulated ranks. `compare` compares the metrics
and the checksum of the final weights, or their norms where time decides how rows are batched
(`ROUNDED`). It prints every difference but in times, and ends with 1 if there is one. Both on one
machine: other processors round otherwise.
"""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
SHORT = ["trainer.steps=3", "warm_start.steps=100", "trainer.prompts_per_step=8"]
SHORT += ["eval.sets.main.num_prompts=64", "telemetry.report=false", "telemetry.loggers=[]"]
SERIAL = ["schedule=serial", *SHORT]  # what `auto` chooses may change
REFERENCE = ["recipe=grpo", "recipe.kl_coef=0.01"]
NAMES = ("serial", "fused", "partial", "packed")
SCHEDULES = {name: [f"schedule={name}", *REFERENCE] for name in NAMES}
TAIL = ["schedule=fused", "cluster.ranks=2", "schedule.early_backward=auto"]
TAIL += ["trainer.layout.replicas=2", "rollout.tail_tp=2", "rollout.speculate=2"]
EMULATED = ["cluster=emulated", "cluster.ranks=16", "rollout.layout.tp=4", "cluster.time_scale=0.1"]
EMULATED += [
    "cluster.costs='gpu:model=8b'",
    "cluster.lengths='lognormal:median=400,sigma=0.9899334019750842'",
]
EMULATED += ["rollout.max_new_tokens=4000", "trainer.steps=3"]
MORE = {
    "vllm": ["rollout=vllm", *SERIAL],
    "tools": ["experiment=tools_tiny", *SERIAL],
    "tail": [*TAIL, *SHORT],
    **{f"emulated-{name}": [*EMULATED, f"schedule={name}"] for name in NAMES},
}
# Decided by the clock, or by measured costs.
TIMES = (
    *("time", "_s", "_per_s", "bubble_share", "mfu", "_bytes"),
    *("migrated", "trained_early", "widened", "guessed", "accepted"),
)
# Here the clock also decides which rows are computed together, so that values differ by rounding.
ROUNDED = ("tools", "tail", "vllm", "recipe-gigpo")


EXPERIMENTS = {"gigpo": ["experiment=tools_tiny"]}
"""What a recipe has besides: this one reads the rewards of turns."""


def runs() -> dict[str, list[str]]:
    """The overrides of every run, by its name."""
    recipes = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/config.yaml"))
    return {
        "demo": ["experiment=spell_tiny", "schedule=serial"],
        **{
            f"recipe-{name}": [*EXPERIMENTS.get(name, []), f"recipe={name}", *SERIAL]
            for name in recipes
        },
        **{f"schedule-{name}": [*how, *SHORT] for name, how in SCHEDULES.items()},
        **MORE,
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
        if run.name in ROUNDED:
            norms = {name: float(tensor.norm()) for name, tensor in load_file(file).items()}
            values.update(norms)
        else:
            values[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return values


def same(old: Any, new: Any, run: str) -> bool:
    """Whether a value of both runs is the same, up to rounding where time decides on it."""
    if run in ROUNDED and isinstance(old, float) and isinstance(new, float):
        return math.isclose(old, new, rel_tol=1e-3, abs_tol=1e-4)
    return bool(old == new)


def compare(before: Path, after: Path) -> int:
    """Print what differs; gives the number of differences. A run that one of them lacks is one."""
    runs, others = ({path.name for path in side.iterdir()} for side in (before, after))
    differences = len(runs ^ others)
    for run in sorted(runs ^ others):
        print(f"{run}: only in {before if run in runs else after}")
    for run in sorted(runs & others):
        old, new = outcome(before / run), outcome(after / run)
        keys = [key for key in {**old, **new} if not same(old.get(key), new.get(key), run)]
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
