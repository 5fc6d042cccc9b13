"""Predicted steps of whole runs against measured ones, on two ranks, under each mapping of them.

`hybridrl plan calibrate` measures this machine once (or --costs=FILE). Then PPO runs under every
generation layout of two ranks, under `serial` and `fused`, and with the critic apart, and
`hybridrl plan auto --price` predicts each. A line's value is the predicted seconds of a step, its
baseline the measured ones of all steps but the first two. Weights are random, so every response is
as long as it may be. Two more lines are the median and the worst error. The last one says how much
longer the mapping with the least predicted seconds takes than the best one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from lines import line, show

from hybridrl.controller import mapping_command

RUN = (
    *("recipe=ppo", "recipe.kl_coef=0.02", "recipe.num_samples=8", "trainer.prompts_per_step=16"),
    *("rollout.max_new_tokens=128", "data.max_prompt_tokens=16", "model.tiny.num_layers=4"),
    *("trainer.max_tokens_per_micro_batch=2048", "cluster.device=cpu", "cluster.ranks=2"),
    *("cluster.threads_per_rank=1", "cluster.memory_check=warn", "warm_start.steps=0"),
)
QUIET = (
    *("cluster=processes", "telemetry.loggers=[]", "telemetry.report=false", "trainer.steps=6"),
    *("telemetry.progress=false", "eval.sets.main.every=null", "eval.sets.main.num_prompts=2"),
)
GENERATION = {
    "instances_2": (),
    "tp_2": ("rollout.layout.tp=2",),
    "pp_2": ("rollout.layout.pp=2",),
}
MAPPINGS = {
    **{
        f"{name}_{schedule}": (*layout, f"schedule={schedule}")
        for name, layout in GENERATION.items()
        for schedule in ("serial", "fused")
    },
    "split_1_1_serial": ("cluster.placement=split", "schedule=serial"),
    "split_1_1_fused": ("cluster.placement=split", "schedule=fused"),
    "train_tp_2_serial": ("trainer.layout.tp=2", "schedule=serial"),
    "train_pp_2_serial": ("trainer.layout.pp=2", "schedule=serial"),
}


def measured_s(folder: Path, overrides: tuple[str, ...]) -> list[float]:
    """Seconds of the steps of a run, without the first two."""
    command = [sys.executable, "-m", "hybridrl.cli", "train", *RUN, *QUIET, *overrides]
    subprocess.run([*command, f"run.dir={folder}"], check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step_s"] for row in rows if "step_s" in row][2:]


def predicted_s(folder: Path, overrides: tuple[str, ...], costs: Path) -> float:
    """Of a step of the same lengths."""
    args = [*RUN, *overrides, "--price", f"--costs={costs}", f"--lengths={folder}"]
    (one,) = mapping_command.run(args).result.best
    return one.seconds.step_s


def main() -> None:
    """Calibrate, run, price, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(MAPPINGS), choices=list(MAPPINGS))
    parser.add_argument("--costs", type=Path, help="of plan calibrate, instead of a new one")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder, errors = Path(name), dict[str, float]()
        costs = args.costs or folder / "costs.json"
        if args.costs is None:
            command = [sys.executable, "-m", "hybridrl.cli", "plan", "calibrate", *RUN]
            subprocess.run([*command, f"--out={costs}"], check=True, stdout=subprocess.DEVNULL)
        predicted, medians = dict[str, float](), dict[str, float]()
        for mapping in args.only:
            seconds = measured_s(folder / mapping, MAPPINGS[mapping])
            predicted[mapping] = predicted_s(folder / mapping, MAPPINGS[mapping], costs)
            medians[mapping] = statistics.median(seconds)
            same = [predicted[mapping]] * len(seconds)
            show(line(f"plan_step_{mapping}", "s", "closer to 1", same, seconds))
            errors[mapping] = abs(predicted[mapping] / medians[mapping] - 1)
        chosen, best = (min(x, key=lambda name: x[name]) for x in (predicted, medians))
        figures = {
            "median_error": (statistics.median(errors.values()), 0.05),
            "worst_error": (max(errors.values()), 0.1),
            "chosen_over_best": (medians[chosen] / medians[best] - 1, 0.03),
        }
        for figure, (value, wanted) in figures.items():
            about = {"chosen": chosen, "best": best} if figure == "chosen_over_best" else {}
            record = {"name": f"plan_step_{figure}", "value": round(value, 4), "unit": "share"}
            show({**record, "wanted": wanted, "better": "lower", **about})


if __name__ == "__main__":
    main()
