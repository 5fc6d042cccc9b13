"""Train every recipe on the demo's task and draw how held-out accuracy rises: `make curves`.

Each recipe runs by its defaults on experiment=spell_tiny, but for the settings in SETTINGS. Runs
stay in `runs/curves/`, and a recipe whose run is there already is only drawn. Writes
docs/images/curves/RECIPE.png and prints a table. Reading: the line is greedy accuracy on 1,024
held-out words (of `rm`: on as many held-out pairs), from the end of the warm start. Dashed, for
`safe_rlhf`, the mean cost of each step's samples.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from hybridrl.telemetry.records import read_lines

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/images/curves"
SETTINGS = {
    # fine-tuning is what the warm start would be
    "sft": [
        "warm_start.steps=0", "trainer.steps=120", "trainer.optim.lr=2e-3",
        "trainer.optim.schedule=constant",
    ],
    # the teacher is what grpo has made, so that runs first
    "distill": ["teacher.path={runs}/grpo-{steps}-{seed}/final"],
    "distill_topk": ["teacher.path={runs}/grpo-{steps}-{seed}/final"],
    # those of recipes/safe_rlhf/README.md
    "safe_rlhf": [
        "recipe.multiplier=0.5", "recipe.multiplier_lr=0.3", "recipe.multiplier_max=1",
        "recipe.kl_coef=0.2", "trainer.optim.lr=1e-4", "trainer.optim.schedule=constant",
    ],
    # it takes one sample of a prompt, and the greedy one
    "remax": ["trainer.prompts_per_step=128"],
    # a vote is to be right more often than any single mistake
    "ttrl": ["warm_start.steps=300"],
    # to be right, and to be a word
    "gdpo": [
        "reward=sum",
        "+reward.parts={{right: {{kind: exact, extract: '#(.*)'}}, "
        "form: {{kind: regex, pattern: '#[a-z]+', weight: 0.5}}}}",
    ],
    # as many samples a step as the others, from an eighth of the prompts
    "brorl": ["recipe=grpo", "recipe.group_size=64", "trainer.prompts_per_step=4"],
}  # fmt: skip
"""Overrides of a curve besides `recipe=NAME` and the recipe's defaults."""
FOLDERS = {path.parent.name for path in ROOT.glob("recipes/*/config.yaml")}
RECIPES = ["grpo", *sorted((FOLDERS | set(SETTINGS)) - {"grpo"})]


def train(recipe: str, steps: int, seed: int, runs: Path) -> Path:
    """Run a recipe, unless its run has ended already; its run directory."""
    folder = runs / f"{recipe}-{steps}-{seed}"
    record = folder / "run.json"
    if record.exists() and json.loads(record.read_text())["state"] == "finished":
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was cut short
    more = [text.format(runs=runs, steps=steps, seed=seed) for text in SETTINGS.get(recipe, [])]
    if not any(text.startswith("recipe=") for text in more):
        more.append(f"recipe={recipe}")
    command = [
        sys.executable, "-m", "hybridrl.cli", "train", "experiment=spell_tiny", "cluster=processes",
        f"trainer.steps={steps}", "trainer.save_every=0", "eval.sets.main.every=5",
        f"run.seed={seed}",
        "telemetry.loggers=[]", "telemetry.report=false", f"run.dir={folder}", *more,
    ]  # fmt: skip
    print(f"{recipe}: {steps} steps", file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"curves: recipe={recipe} ended with exit code {done.returncode}")
    return folder


def curve(folder: Path, metric: str) -> tuple[list[int], list[float]]:
    """Steps of the recipe that have the metric, and its values."""
    lines = read_lines(folder / "metrics.jsonl")
    first = next(line["step"] for line in lines if "eval_accuracy" in line)
    points = [(line["step"] - first, line[metric]) for line in lines if metric in line]
    steps, values = zip(*[pair for pair in points if pair[0] >= 0], strict=True)
    return list(steps), list(values)


def draw(recipe: str, folder: Path) -> None:
    """A small picture; prints the recipe's row."""
    steps, accuracies = curve(folder, "eval_accuracy")
    figure, axes = plt.subplots(figsize=(2.6, 1.3), dpi=120)
    axes.plot(steps, accuracies, color="#2a6fbb", linewidth=1.6)
    if recipe == "safe_rlhf":
        axes.plot(*curve(folder, "cost_mean"), color="#bb5a2a", linewidth=1, linestyle="--")
        axes.axhline(0, color="#bbbbbb", linewidth=0.6)
    axes.set_ylim(-1 if recipe == "safe_rlhf" else 0, 1)
    axes.set_xlim(0, steps[-1])
    axes.tick_params(labelsize=6, length=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.annotate(f"{accuracies[-1]:.2f}", (steps[-1], accuracies[-1]), fontsize=7, ha="right",
                  xytext=(0, 3), textcoords="offset points", color="#2a6fbb")  # fmt: skip
    axes.set_title(f"{recipe}: held-out accuracy", fontsize=7)
    figure.tight_layout(pad=0.3)
    PICTURES.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURES / f"{recipe}.png")
    plt.close(figure)
    record = json.loads((folder / "run.json").read_text())
    seconds = record["ended"] - record["started"]
    print(f"| {recipe} | {accuracies[0]:.3f} | {accuracies[-1]:.3f} | {seconds:.0f} |", flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="*", default=RECIPES, help="which; all without a name")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/curves"))
    args = parser.parse_args()
    unknown = sorted(set(args.recipes) - set(RECIPES))
    if unknown:
        parser.error(f"unknown recipe {unknown[0]}: wanted one of {', '.join(RECIPES)}")
    print("| recipe | before | after | seconds |\n|---|---|---|---|")
    for recipe in args.recipes:
        draw(recipe, train(recipe, args.steps, args.seed, args.runs.resolve()))


if __name__ == "__main__":
    main()
