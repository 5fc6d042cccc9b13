"""Predicted steps of whole runs against measured ones, on two ranks, under each mapping of them.

PPO runs under every layout that two ranks have in training and in generation, under `serial` and
`fused`, and with the critic apart. A few runs are alive at a time and take turns, step by step; the
first mapping is in each group. Weights stay as they are to the last bits, so all of them train on
the same samples. The scales that the first mapping's run has learned price all of them:
`hybridrl plan auto --price --costs=RUN` predicts each step for its own lengths.

A line's value is the predicted seconds of a step, its baseline the measured ones. `over_first` is
the measured ratio to the first mapping in the same rounds, `predicted_over_first` the predicted
one. Both ratios have the machine as it was in these rounds, which the seconds do not where it has
become slower meanwhile. Lines at the end are the median and the worst error, of
seconds and of ratios. The last one says how much longer the mapping with the least predicted
seconds takes than the best one, by `over_first`.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from blocks import in_turns
from lines import line, show

from hybridrl.plan import mapping_command

SIDE = Path(__file__).parent / "plan_side.py"
RUN = (
    *("recipe=ppo", "recipe.kl_coef=0.02", "recipe.num_samples=8", "trainer.prompts_per_step=16"),
    *("rollout.max_new_tokens=128", "data.max_prompt_tokens=16", "model.tiny.num_layers=4"),
    *("trainer.max_tokens_per_micro_batch=2048", "cluster.device=cpu", "cluster.ranks=2"),
    *("cluster.threads_per_rank=1", "cluster.memory_check=warn", "warm_start.steps=0"),
)
QUIET = (
    *("cluster=processes", "cluster.rank_in_driver=false"),
    *("telemetry.loggers=[]", "telemetry.report=false"),
    *("telemetry.progress=false", "eval.sets.main.every=null", "eval.sets.main.num_prompts=2"),
    *("trainer.steps=1000000", "trainer.optim.lr=1e-9", "roles.critic.optim.lr=1e-9"),
)
TRAINING = {
    "fsdp_2": (),
    "replicas_2": ("trainer.layout.replicas=2",),
    "tp_2": ("trainer.layout.tp=2",),
    "pp_2": ("trainer.layout.pp=2",),
}
GENERATION = {
    "instances_2": (),
    "tp_2": ("rollout.layout.tp=2",),
    "pp_2": ("rollout.layout.pp=2",),
}
# `fused` on one instance is not `serial`: the reference scores samples while others decode.
SCHEDULES = ("serial", "fused")
MAPPINGS = {
    f"train_{train}_gen_{gen}_{schedule}": (
        *TRAINING[train],
        *GENERATION[gen],
        f"schedule={schedule}",
    )
    for train, gen, schedule in itertools.product(TRAINING, GENERATION, SCHEDULES)
} | {f"split_1_1_{s}": ("cluster.placement=split", f"schedule={s}") for s in SCHEDULES}
FIRST = next(iter(MAPPINGS))
AT_ONCE = 4  # besides the first
WARM_UP = 2  # steps of each run, in which `fused` learns costs and lengths
START_S, STEP_S = 10, 3.5  # of a run, about


def groups_of(mappings: Sequence[str]) -> Iterator[list[str]]:
    """The mappings that are alive at a time, the first mapping among them."""
    others = [name for name in mappings if name != FIRST]
    for i in range(0, max(1, len(others)), AT_ONCE):
        yield [FIRST, *others[i : i + AT_ONCE]]


def measured_s(folder: Path, names: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of the steps of runs that take turns; their directories are in `folder`."""
    commands = {
        name: [sys.executable, str(SIDE), str(folder / name), *RUN, *QUIET, *MAPPINGS[name]]
        for name in names
    }
    blocks = in_turns(commands, rounds, steps=1, warm_up=WARM_UP)
    return {name: [block["step_s"] for block in blocks[name]] for name in names}


def predicted_s(run_dir: Path, overrides: Sequence[str], learned: Path) -> tuple[list[float], int]:
    """Predicted seconds of the measured steps of a run; the response tokens of all of them."""
    lengths, seconds, tokens = run_dir / "one_step.jsonl", [], 0
    for row in (run_dir / "lengths.jsonl").read_text().splitlines()[WARM_UP:]:
        lengths.write_text(row)
        args = [
            *RUN,
            *overrides,
            "--price",
            f"--costs={learned}",
            "--nodes=1",
            "--gpus-per-node=2",
            f"--lengths={lengths}",
        ]
        (one,) = mapping_command.run(args).result.best
        seconds.append(one.seconds.step_s)
        tokens += sum(json.loads(row)["lengths"])
    return seconds, tokens


def main() -> None:
    """Run, price, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(MAPPINGS), choices=list(MAPPINGS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    groups = list(groups_of(args.only))
    run_s = START_S + (WARM_UP + args.rounds) * STEP_S
    minutes = 1 + sum(map(len, groups)) * run_s / 60
    print(f"about {minutes:.0f} minutes on two cores", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        compare(Path(name), groups, args.rounds)


def compare(folder: Path, groups: Sequence[Sequence[str]], rounds: int) -> None:
    """A line for each mapping, and those of all; the first mapping counts in its first group."""
    predicted, over = dict[str, float](), dict[str, float]()
    errors, of_ratios = list[float](), list[float]()
    for number, names in enumerate(groups):
        runs = folder / str(number)
        measured = measured_s(runs, names, rounds)
        first_s, _ = predicted_s(runs / FIRST, MAPPINGS[FIRST], runs / FIRST)
        for name in names[number > 0 :]:
            seconds, tokens = predicted_s(runs / name, MAPPINGS[name], runs / FIRST)
            ratios = [a / b for a, b in zip(measured[name], measured[FIRST], strict=True)]
            predicted[name], over[name] = statistics.median(seconds), statistics.median(ratios)
            expected = statistics.median(a / b for a, b in zip(seconds, first_s, strict=True))
            about = {
                "over_first": round(over[name], 3),
                "predicted_over_first": round(expected, 3),
                "response_tokens": tokens,
            }
            record = line(f"plan_step_{name}", "s", "closer to 1", seconds, measured[name], **about)
            show(record)
            errors.append(abs(record["ratio"] - 1))
            of_ratios += [abs(expected / over[name] - 1)] if name != FIRST else []
    chosen, best = (min(x, key=lambda name: x[name]) for x in (predicted, over))
    figures = {
        "median_error": (statistics.median(errors), 0.05),
        "worst_error": (max(errors), 0.1),
        "median_error_of_ratios": (statistics.median(of_ratios or [0.0]), 0.05),
        "worst_error_of_ratios": (max(of_ratios, default=0.0), 0.1),
        "chosen_over_best": (over[chosen] / over[best] - 1, 0.1),
    }
    for figure, (value, wanted) in figures.items():
        names_of = {"chosen": chosen, "best": best} if figure == "chosen_over_best" else {}
        record = {"name": f"plan_step_{figure}", "value": round(value, 4), "unit": "share"}
        show({**record, "wanted": wanted, "better": "lower", **names_of})


if __name__ == "__main__":
    main()
