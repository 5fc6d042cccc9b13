"""Share of prompts with something to learn from, with and without `data.curriculum`: JSON lines.

The demo's task on few prompts, so that an epoch is a few steps.
A group has spread if its rewards differ; GRPO leaves the others out. Each setting is the same run,
seed by seed, but for the curriculum. Counted are the steps after the first epoch.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from hybridrl.telemetry.records import read_lines

PROMPTS_PER_STEP, GROUP = 32, 8


def train(name: str, args: argparse.Namespace, seed: int, folder: Path) -> dict[str, float]:
    """One run: its share of groups with spread, and its accuracy."""
    run = folder / f"{name}-{seed}"
    rests = {"easy_rest": args.easy_rest, "hard_rest": args.hard_rest}
    curriculum = [f"data.curriculum.{key}={rest}" for key, rest in rests.items()]
    command = [
        sys.executable, "-m", "hybridrl.cli", "train", "experiment=spell_tiny", "cluster=processes",
        f"trainer.steps={args.steps}", f"trainer.prompts_per_step={PROMPTS_PER_STEP}",
        "trainer.save_every=0", f"recipe.group_size={GROUP}", f"data.size={args.prompts}",
        f"run.seed={seed}", "eval.sets.main.every=null", "telemetry.loggers=[]",
        "telemetry.report=false", f"run.dir={run}", *(curriculum if name == "on" else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    rows = [line for line in read_lines(run / "metrics.jsonl") if "samples/filtered" in line]
    recipe_rows = rows[-args.steps :]
    counted = recipe_rows[args.prompts // PROMPTS_PER_STEP :]
    share = fmean(1 - row["samples/filtered"] / (PROMPTS_PER_STEP * GROUP) for row in counted)
    return {"groups_with_spread": share, "accuracy": result["accuracy_after"]}


def main() -> None:
    """Run both settings for each seed and print a line each, then the means."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=256, help="training prompts")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--easy-rest", type=int, default=6)
    parser.add_argument("--hard-rest", type=int, default=2)
    parser.add_argument("--only", choices=("off", "on"), help="one setting in place of both")
    args = parser.parse_args()
    names = [args.only] if args.only else ["off", "on"]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for name in names:
                results[name].append(train(name, args, seed, Path(folder)))
                print(
                    json.dumps({"curriculum": name, "seed": seed, **results[name][-1]}), flush=True
                )
    for name, runs in results.items():
        means = {key: round(fmean(run[key] for run in runs), 3) for key in runs[0]}
        print(json.dumps({"curriculum": name, "seeds": args.seeds, **means}))


if __name__ == "__main__":
    main()
