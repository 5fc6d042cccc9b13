"""Learning with ranks that generate alone: stale samples, with and without correction.

`make bench-async-learning`. The demo's task, one rank that trains and one that generates. All sides
have the same seeds, and so the same words, start and warm start: `serial`, `periodic`, `one_step`,
and weights that change in flight with `max_staleness` of 1, 2 and 4. A side's value is the mean
over seeds of held-out accuracy at the end. Runs stay in the cache, and one that has ended is not
repeated. `periodic` makes the batches of `serial`: two strict runs have the same parameters, bit
for bit. Writes docs/images/curves/async.png.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import matplotlib.pyplot as plt
from lines import show

from hybridrl.telemetry.records import read_lines

PICTURE = Path(__file__).parents[2] / "docs/images/curves/async.png"
EVERY = 5  # steps between evaluations
CORRECTED = "recipe.correction.old_log_probs=trainer", "recipe.correction.weights=truncate"
IN_FLIGHT = "schedule=async", "schedule.new_weights=in_flight"
SIDES: dict[str, tuple[str, ...]] = {
    "serial": ("schedule=serial",),
    "periodic": ("schedule=periodic",),
    "one_step": ("schedule=one_step",),
    **{f"flight_{s}": (*IN_FLIGHT, f"schedule.max_staleness={s}") for s in (1, 2, 4)},
}
STALE = [side for side in SIDES if side not in ("serial", "periodic")]
SIDES |= {f"{side}_corrected": (*SIDES[side], *CORRECTED) for side in STALE}
COLORS = {
    "serial": "#444444",
    "periodic": "#5aa469",
    "one_step": "#bb5a2a",
    "flight_1": "#2a6fbb",
    "flight_2": "#8a5fb0",
    "flight_4": "#c79a1b",
}
Curve = list[tuple[int, float]]


def train(side: str, seed: int, args: argparse.Namespace, strict: bool = False) -> Path:
    """Run a side with a seed, unless it has ended already; its run directory."""
    folder: Path = args.cache / f"async-{side}{'-strict' * strict}-{args.steps}-{seed}"
    record = folder / "run.json"
    if record.exists() and json.loads(record.read_text())["state"] == "finished":
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # a run that was cut short
    command = [
        sys.executable, "-m", "hybridrl.cli", "train", "experiment=spell_tiny", "cluster=processes",
        "cluster.ranks=2", "cluster.pools.rollout=1", f"trainer.steps={args.steps}",
        "trainer.save_every=0", f"eval.sets.main.every={EVERY}", f"run.seed={seed}",
        "telemetry.loggers=[]", "telemetry.report=false", f"run.dir={folder}", *SIDES[side],
        *(["deterministic=strict"] if strict else []),
    ]  # fmt: skip
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"async_learning: {side}, seed {seed}: exit code {done.returncode}")
    print(f"{folder.name} has ended", file=sys.stderr, flush=True)
    return folder


def curve(folder: Path) -> Curve:
    """Steps of the recipe with an evaluation, and held-out accuracy."""
    lines = [line for line in read_lines(folder / "metrics.jsonl") if "eval_accuracy" in line]
    return [(line["step"] - lines[0]["step"], line["eval_accuracy"]) for line in lines]


def same_bits(one: Path, other: Path) -> bool:
    """Whether two runs have ended with the same parameters, bit for bit."""
    first, second = ((run / "final/model.safetensors").read_bytes() for run in (one, other))
    return first == second


def draw(curves: dict[str, list[Curve]]) -> None:
    """Draw the mean of each side over its seeds, and each seed's curve behind it.

    On the left those without correction, on the right the corrected ones, beside serial.
    """
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 2.6), dpi=120, sharey=True)
    titles = (
        "held-out accuracy, samples as they are",
        "with the correction",
    )
    for axes, title in zip(panels, titles, strict=True):
        for side, of_seeds in curves.items():
            corrected = side.endswith("_corrected")
            if side != "serial" and corrected != (axes is panels[1]):
                continue
            color = COLORS[side.removesuffix("_corrected")]
            steps = [step for step, _ in of_seeds[0]]
            for points in of_seeds:
                axes.plot(steps, [y for _, y in points], color=color, linewidth=0.6, alpha=0.35)
            accuracies = [[y for _, y in points] for points in of_seeds]
            means = [fmean(values) for values in zip(*accuracies, strict=True)]
            label = f"{side.removesuffix('_corrected').replace('_', ' ')}: {means[-1]:.3f}"
            dashed = "--" if side == "periodic" else "-"  # it may be on top of serial
            axes.plot(steps, means, dashed, color=color, linewidth=1.8, label=label)
        axes.set_xlim(0, steps[-1])
        axes.set_xlabel("step", fontsize=7)
        axes.set_title(title, fontsize=8)
        axes.tick_params(labelsize=7, length=2)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.legend(fontsize=7, frameon=False, loc="lower right")
    figure.tight_layout(pad=0.4)
    figure.savefig(PICTURE)
    plt.close(figure)


def compare(curves: dict[str, list[Curve]], bits: bool | None) -> None:
    """Print a line for each side: accuracies at the end, and differences to serial, in pairs."""
    ends = {side: [points[-1][1] for points in of_seeds] for side, of_seeds in curves.items()}
    serial = ends["serial"]
    for side, values in ends.items():
        apart = [ours - theirs for ours, theirs in zip(values, serial, strict=True)]
        facts = {"same_bits_as_serial_if_strict": bits} if side == "periodic" else {}
        show(
            {
                "name": f"learning_{side}" + "_vs_serial" * (side != "serial"),
                "value": round(fmean(values), 4),
                "unit": "held-out accuracy",
                "baseline": round(fmean(serial), 4),
                "difference": round(fmean(apart), 4),
                "differences": [round(x, 4) for x in apart],
                "deviation_over_seeds": round(stdev(values), 4) if len(values) > 1 else None,
                "before": round(fmean(points[0][1] for points in curves[side]), 4),
                "seeds": len(values),
                "steps": curves[side][0][-1][0],
                "better": "higher",
                **facts,
            }
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, train and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=1, help="runs; each has two ranks")
    parser.add_argument("--strict", action="store_true", help="the bits of periodic, too")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"))
    args = parser.parse_args(argv)
    args.cache = args.cache.resolve()
    pairs = list(product(range(args.seeds), SIDES))
    with ThreadPoolExecutor(args.at_once) as pool:
        folders = list(pool.map(lambda pair: train(pair[1], pair[0], args), pairs))
        strict = ["serial", "periodic"] if args.strict else []
        same = list(pool.map(lambda side: train(side, 0, args, strict=True), strict))
    curves: dict[str, list[Curve]] = {side: [] for side in SIDES}
    for (_, side), folder in zip(pairs, folders, strict=True):
        curves[side].append(curve(folder))
    draw(curves)
    compare(curves, same_bits(*same) if same else None)


if __name__ == "__main__":
    main()
