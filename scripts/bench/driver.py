"""What one driver carries: its seconds a step and a sample, by the number of emulated ranks.

JSON lines. The ranks hold no model (docs/emulated.md); the driver, Ray and its object store, the
calls and the records are those of any run. `over_s` is what a step takes beyond the same schedule
in virtual time, where the driver costs nothing. `cpu_s` is the CPU time of the driver's process.
"""

import argparse
import cProfile
import sys
import tempfile
from pathlib import Path

from emulated_steps import config_of, hottest, measure, predict
from lines import show
from ray_hosts import on_ray

# A 7B on H100s, four a generation instance. p99 over p50 of the lengths is 8.
SETTINGS = ('cluster.costs="gpu:model=7b"', "recipe.skip_equal_groups=false", "recipe.group_size=8")


def main() -> None:
    """Parse, and measure each number of ranks in turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="8,64,256,1024", help="numbers of ranks")
    parser.add_argument("--tp", type=int, default=4, help="ranks of an instance")
    parser.add_argument("--schedules", default="serial,fused")
    parser.add_argument(
        "--steps", type=int, default=3, help="after the first, which is not counted"
    )
    parser.add_argument("--decode-steps", type=int, default=64, help="of one call of an instance")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a response at most")
    parser.add_argument("--samples-per-rank", type=int, default=8)
    parser.add_argument("--processes", type=int, default=4, help="that the ranks share")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--profile", type=Path, help="a file for the driver's hottest functions")
    args = parser.parse_args()
    profile = cProfile.Profile() if args.profile else None
    for ranks in map(int, args.ranks.split(",")):
        for schedule in args.schedules.split(","):
            one(args, ranks, schedule, profile)
    if profile is not None:
        args.profile.write_text(hottest(profile, 40))
        print(f"the driver's profile is in {args.profile}", file=sys.stderr)


def one(
    args: argparse.Namespace, ranks: int, schedule: str, profile: cProfile.Profile | None
) -> None:
    """One number of ranks under one schedule."""
    instances, longest = ranks // args.tp, args.longest
    lengths = f"lognormal:median={longest // 8},sigma=0.894,max={longest}"
    settings = [
        *SETTINGS,
        f"schedule={schedule}",
        f"cluster.ranks={ranks}",
        f"cluster.time_scale={args.time_scale}",
        f"rollout.layout.tp={args.tp}",
        f"rollout.decode_steps={args.decode_steps}",
        f"trainer.steps={args.steps + 1}",
        f"trainer.prompts_per_step={ranks * args.samples_per_rank // 8}",
        f'cluster.lengths="{lengths}"',
        f"rollout.max_new_tokens={args.longest}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(settings, Path(folder) / "run")
        with on_ray(-(-instances // args.processes) * args.tp) as started:
            steps = measure(config, profile)
        virtual, predicted = predict(config, (), 0.0), predict(config, ())
    show(
        {
            "name": "driver",
            "emulated": True,
            "ranks": ranks,
            "instances": instances,
            "processes": sum(started),
            "schedule": schedule,
            "decode_steps": args.decode_steps,
            "longest": args.longest,
            "samples": steps.samples,
            "step_s": round(steps.seconds, 3),
            "planned_s": round(predicted, 3),
            "step_over_planned": round(steps.seconds / predicted, 3),
            "over_s": round(steps.seconds - virtual, 3),
            "over_share": round((steps.seconds - virtual) / steps.seconds, 4),
            "cpu_s": round(steps.cpu_s, 3),
            "cpu_share": round(steps.cpu_s / steps.seconds, 4),
            "cpu_ms_per_sample": round(1e3 * steps.cpu_s / max(1.0, steps.samples), 3),
            "time_scale": args.time_scale,
        }
    )


if __name__ == "__main__":
    main()
