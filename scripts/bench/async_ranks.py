"""One rank that trains and one that generates, against serial on two ranks that do both.

`make bench-async-ranks`. The long-tailed task and the model of `make bench-fusion`, on two real
ranks of one thread. The sides are runs of their own that take turns, some steps at a time; while
one runs the others wait. Let G be the seconds in which `serial` generates a step, and T the rest of
its step, both on two cores. A core has half of either work to do alone, so a step of two ranks
with a job each takes about max(2 G, 2 T): they gain nothing here, and are held to this. A step is
shorter where a wider batch decodes in less than its share, and where ranks finish their calls while
another side has its turn.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

from blocks import in_turns
from fusion import WIDER, weights
from lines import line, show

HERE = Path(__file__).parent
APART = ("cluster.pools.rollout=1",)
SIDES: dict[str, tuple[str, ...]] = {
    "serial": ("schedule=serial",),
    "periodic": ("schedule=periodic", *APART),
    "one_step": ("schedule=one_step", *APART),
}
Block = dict[str, float]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, and compare the sides."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="of each side in a round")
    parser.add_argument("--prompts", type=int, default=16, help="of a step; 8 samples each")
    parser.add_argument("--wider", type=int, default=WIDER, help="than the trained weights")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"))
    args = parser.parse_args(argv)
    actor, _ = weights(args.cache, args.wider)
    side = [sys.executable, str(HERE / "tail_side.py"), str(actor), "--prompts", str(args.prompts)]
    commands = {name: [*side, "--settings", *settings] for name, settings in SIDES.items()}
    blocks = in_turns(commands, args.rounds, args.steps)
    for name in SIDES:
        show_side(name, blocks[name], blocks["serial"], args.steps)


def show_side(name: str, ours: list[Block], serial: list[Block], steps: int) -> None:
    """Seconds of a step against those of serial in the same round, its bound, and the push."""
    seconds, theirs = ([block["wall_s"] for block in side] for side in (ours, serial))
    facts: dict[str, float] = {}
    if name == "serial":
        facts["generate_s"] = round(fmean(block["generate_s"] for block in serial), 3)
    else:
        bounds = [2 * max(b["generate_s"], b["wall_s"] - b["generate_s"]) for b in serial]
        pushes = [block["push_s"] for block in ours]
        facts = {
            "bound_s": round(median(bounds), 3),
            "of_bound": round(median(b / s for b, s in zip(bounds, seconds, strict=True)), 3),
            "push_s": float(f"{fmean(pushes):.3g}"),
            "push_share": float(
                f"{fmean(p / s for p, s in zip(pushes, seconds, strict=True)):.3g}"
            ),
            "load_s": float(f"{fmean(block['load_s'] for block in ours):.3g}"),
            "actor_waits": round(fmean(block["bubble_share/actor"] for block in ours), 3),
            "rollout_waits": round(fmean(block["bubble_share/rollout"] for block in ours), 3),
        }
    lengths = round(fmean(block["response_tokens_mean"] for block in ours), 1)
    show(
        line(
            f"async_ranks_{name}" + "_vs_serial" * (name != "serial"),
            "s per step", "lower", seconds, theirs,
            steps_per_block=steps, response_tokens_mean=lengths, **facts,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
