"""The mechanisms of the tail on two real ranks: serial, fused, fused with each, and all.

`make bench-tail-ranks`. The long-tailed task and the model of `make bench-fusion`. The sides are
runs of their own that take turns, step by step; the others wait. Four are alive at a
time. docs/tail.md describes the mechanisms.
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
CYCLE = 4  # steps of schedule=packed: its block has whole cycles
EARLY, WIDE, SPECULATE = (
    ("schedule.early_backward=auto",),
    ("rollout.tail_tp=2",),
    ("rollout.speculate=auto",),
)
SIDES: dict[str, tuple[str, ...]] = {
    "serial": ("schedule=serial",),
    "fused": ("schedule=fused",),
    "early": ("schedule=fused", *EARLY),
    "wide": ("schedule=fused", *WIDE),
    "speculate": ("schedule=fused", *SPECULATE),
    "all": ("schedule=fused", *EARLY, "rollout.tail_tp=auto", *SPECULATE),  # where each pays
    "packed": ("schedule=packed",),
}
BASES = ("serial", "fused")  # what the others are compared with, in the same rounds
AT_ONCE = 2  # others in a group: seven runs alive take more than 24 GB
# Every side has it, since early backward needs whole replicas.
COMMON = ("trainer.layout.replicas=2",)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, and compare all sides with and without forward passes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6, help=f"of {CYCLE} steps of each side")
    parser.add_argument("--prompts", type=int, default=16, help="of a step; 8 samples each")
    parser.add_argument("--wider", type=int, default=WIDER, help="than the trained weights")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--roles", nargs="*", default=["verifier", "models"])
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"))
    args = parser.parse_args(argv)
    actor, judge = weights(args.cache, args.wider)
    for roles in args.roles:
        command = [str(actor), "--prompts", str(args.prompts)]
        command += ["--judge", str(judge)] if roles == "models" else []
        compare(roles, command, args.sides.split(","), args.rounds)


def compare(roles: str, command: Sequence[str], names: Sequence[str], rounds: int) -> None:
    """The sides in groups that the memory holds, each with serial and fused; then their lines.

    They take turns step by step, since what else the machine does changes within seconds.
    """
    others = [name for name in names if name not in BASES]
    for i in range(0, max(1, len(others)), AT_ONCE):
        group = [*BASES, *others[i : i + AT_ONCE]]
        side = [sys.executable, str(HERE / "tail_side.py"), *command, "--settings", *COMMON]
        steps = CYCLE if "packed" in group else 1
        commands = {name: [*side, *SIDES[name]] for name in group}
        blocks = in_turns(commands, rounds * CYCLE // steps, steps, warm_up=2 * CYCLE)
        for name in group[len(BASES) * (i > 0) :]:
            show_side(roles, name, blocks, steps)


def show_side(roles: str, name: str, blocks: dict[str, list[dict[str, float]]], steps: int) -> None:
    """Seconds of a sample against those of serial in the same round."""
    ours, theirs = (
        [1 / block["samples_per_s"] for block in blocks[side]] for side in (name, "serial")
    )
    facts = {
        key: round(fmean(block[key] for block in blocks[name]), 3)
        for key in blocks[name][0]
        if key != "samples_per_s"
    }
    fused = [1 / block["samples_per_s"] for block in blocks["fused"]]
    over = median(a / b for a, b in zip(ours, fused, strict=True))
    of_totals = sum(ours) / sum(theirs)  # every step has as many samples
    show(
        line(
            f"tail_ranks_{roles}_{name}_vs_serial", "s per sample", "lower", ours, theirs,
            of_totals=round(of_totals, 3), over_fused=round(over, 3), steps_per_block=steps,
            **facts,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
