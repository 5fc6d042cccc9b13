"""Whether the demo's mixture of experts learns as its dense model does, and in what time.

`experiment=spell_tiny` on two ranks, with `model=tiny` and with `model=tiny_moe`: whole experts on
each rank, in training (ep 2) and in generation (tp 2, ep 2). Sides take turns, a pair of runs a
seed, each first in every other pair. Accuracy is greedy, on 1,024 held-out words, at the end.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

from lines import line, show

SIDES: dict[str, list[str]] = {
    "dense": [],
    "moe": ["model=tiny_moe", "trainer.layout.ep=2", "rollout.layout.tp=2", "rollout.layout.ep=2"],
}


def train(side: str, seed: int, runs: Path, more: list[str]) -> dict[str, Any]:
    """The result of a run, which is the last line of its output; of an earlier one if it ended."""
    settings = [crc32(" ".join(more).encode())] if more else []  # "=" is no part of a folder's name
    name = "-".join(map(str, [side, seed, *settings]))
    folder, kept = runs / name, runs / f"{name}.json"
    if not kept.exists():
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
        command = [
            sys.executable, "-m", "hybridrl.cli", "train", "experiment=spell_tiny",
            "cluster.ranks=2", "telemetry.loggers=[]", "telemetry.report=false",
            f"run.seed={seed}", f"run.dir={folder}", *SIDES[side], *more,
        ]  # fmt: skip
        print(f"{side}, seed {seed}", file=sys.stderr, flush=True)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{side}, seed {seed}: exit code {done.returncode}")
        kept.write_text(done.stdout.splitlines()[-1])
    result: dict[str, Any] = json.loads(kept.read_text())
    return result


def compare(results: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The lines, from the results of each side by seed."""
    accuracy = {side: [result["accuracy_after"] for result in of] for side, of in results.items()}
    behind = [d - m for d, m in zip(accuracy["dense"], accuracy["moe"], strict=True)]
    seconds = {side: [result["seconds"] for result in of] for side, of in results.items()}
    return [
        line(
            "moe_accuracy_vs_dense", "accuracy", "higher", accuracy["moe"], accuracy["dense"],
            behind_mean=round(sum(behind) / len(behind), 4), by_seed=accuracy,
        ),
        line(
            "moe_seconds_vs_dense", "s", "lower", seconds["moe"], seconds["dense"], by_seed=seconds
        ),
    ]  # fmt: skip


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="pairs of runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/moe_learning"), help="are kept")
    parser.add_argument("overrides", nargs="*", help="of both sides: trainer.steps=40")
    args = parser.parse_args()
    args.runs.mkdir(parents=True, exist_ok=True)
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for seed in range(args.seeds):
        for side in list(SIDES)[:: -1 if seed % 2 else 1]:
            results[side].append(train(side, seed, args.runs.resolve(), args.overrides))
    for record in compare(results):
        show(record)


if __name__ == "__main__":
    main()
