"""Seconds of a step of each schedule on an emulated device, beside their prediction: JSON lines.

Long-tailed lengths, instances of four H100s by roofline, no model (docs/emulated.md). The sides of
a recipe take turns, each a run of its own.
"""

import argparse
import random
import tempfile
from pathlib import Path
from statistics import fmean

from emulated_steps import config_of, measure, predict
from lines import show

# A row of settings is a column of the table: add yours.
SIDES: dict[str, tuple[str, ...]] = {
    "serial": ("schedule=serial",),
    "fused": ("schedule=fused",),
    "fused_early": (
        "schedule=fused",
        "schedule.early_backward=auto",
        "trainer.layout.replicas={instances}",
    ),
    "packed": ("schedule=packed",),
    "partial": ("schedule=partial",),
}
GROUP = 8
# The settings of a recipe, and the names of its forward passes in the costs.
RECIPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "verifier": ((), ()),
    "reference_and_reward_model": (
        ("recipe.kl_coef=0.01", "reward=model", "reward.model=emulated"),
        ("reward", "reference"),
    ),
}


def main() -> None:
    """Parse, and let the schedules of each recipe take turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--instance", type=int, default=4, help="ranks of an instance")
    parser.add_argument("--costs", default="gpu:model=7b,critic=7b")
    parser.add_argument("--lengths", default="lognormal:median=128,p99=1024,max=2048")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a response at most")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument(
        "--steps", type=int, default=8, help="after the first, which does not count"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--per-process", type=int, default=32, help="0: without Ray")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--recipes", default=",".join(RECIPES))
    args = parser.parse_args()
    for recipe in args.recipes.split(","):
        compare(args, recipe)


def compare(args: argparse.Namespace, recipe: str) -> None:
    """All sides of one recipe, in turns."""
    settings, stages = RECIPES[recipe]
    common = [
        *settings,
        f'cluster.costs="{args.costs}"',
        f'cluster.lengths="{args.lengths}"',
        f"cluster.ranks={args.ranks}",
        f"cluster.ranks_per_process={args.per_process}",
        f"cluster.time_scale={args.time_scale}",
        f"rollout.layout.tp={args.instance}",
        f"rollout.max_new_tokens={args.longest}",
        f"trainer.prompts_per_step={args.prompts}",
        f"trainer.steps={args.steps + 1}",
        f"recipe.group_size={GROUP}",
        "recipe.skip_equal_groups=false",
    ]
    instances = args.ranks // args.instance
    names, draw = args.sides.split(","), random.Random(0)
    planned: dict[str, float] = {}
    measured: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in draw.sample(names, len(names)):
            with tempfile.TemporaryDirectory() as folder:
                own = [setting.format(instances=instances) for setting in SIDES[name]]
                config = config_of([*common, *own], Path(folder) / "run")
                measured[name].append(measure(config).seconds)
                planned[name] = predict(config, stages)
    for name in names:
        mean, first = fmean(measured[name]), fmean(measured[names[0]])
        show(
            {
                "name": f"tail_{recipe}_{name}",
                "emulated": True,
                "step_s": round(mean, 3),
                "planned_s": round(planned[name], 3),
                "step_over_planned": round(mean / planned[name], 3),
                f"{names[0]}_over_step": round(first / mean, 3),
                "planned_ratio": round(planned[names[0]] / planned[name], 3),
                "rounds": args.rounds,
                "ranks": args.ranks,
                "instances": instances,
                "time_scale": args.time_scale,
            }
        )


if __name__ == "__main__":
    main()
