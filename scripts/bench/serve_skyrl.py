"""Tokens/s of `hybridrl serve` against those of SkyRL 0.4.0's server on its CPU backend, in turns.

    make bench-serve-skyrl [ARGS=--skyrl=a Python that has skyrl[tinker,jax]==0.4.0]

One program by Tinker's SDK, in a process of its own, is in front of each server: it draws samples
of fixed weights, then it takes steps of GRPO. The client counts the tokens. Both servers have the
same weights, prompts, adapters' rank and places, and cores. Their draws differ, so the lengths of
their responses are equal in the mean alone: `response_tokens_mean` shows that they are. SkyRL's
takes the mean of a loss over tokens and data, where ours has the sum that Tinker documents.
"""

import argparse
import subprocess
from collections.abc import Sequence
from pathlib import Path

from blocks import in_turns
from lines import show
from serve import HERE, WARM_UP, compared
from tasks import TASKS

VERSION = "0.4.0"
SDK = ".cache/tinker-0.25/bin/python"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a line for samples and one for GRPO."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skyrl", default=".cache/skyrl/bin/python", help="one that has SkyRL")
    parser.add_argument(
        "--python", default=".cache/tinker-0.25/bin/python", help="one that has Tinker's SDK 0.25"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--prompts", type=int, default=32, help="of a step; 8 samples each")
    parser.add_argument("--ranks", type=int, default=2, help="of ours; SkyRL's takes all cores")
    parser.add_argument("--lora", type=int, default=8, help="rank of the adapters")
    parser.add_argument("--rows", type=int, default=64, help="that SkyRL samples at once")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"))
    args = parser.parse_args(argv)
    if version(args.skyrl) != VERSION:
        parser.error(
            f"--skyrl={args.skyrl}: wanted a Python that has skyrl[tinker,jax]=={VERSION}"
            " (docs/serve.md: how it is installed)"
        )
    model = TASKS["short"].model(args.cache)
    for work in ("sample", "grpo"):
        rest = [
            str(model), f"--work={work}", f"--prompts={args.prompts}", f"--ranks={args.ranks}",
            f"--lora={args.lora}", f"--skyrl={args.skyrl}", f"--rows={args.rows}",
        ]  # fmt: skip
        commands = {
            name: [args.python, str(HERE / "serve_sides.py"), name, *rest]
            for name in ("served", "skyrl")
        }
        # SkyRL's server pads all sequences of this task to one length, which it compiles at first.
        blocks = in_turns(commands, args.rounds, args.steps, WARM_UP)
        sizes = {"steps_per_block": args.steps, "ranks": args.ranks, "lora": args.lora}
        name = f"served_{work}_tokens_per_s_vs_skyrl"
        show(compared(name, blocks["served"], blocks["skyrl"], **sizes))


def version(python: str) -> str:
    """Return the version of SkyRL that this Python has; empty where either does not exist."""
    command = [python, "-c", "import importlib.metadata as m; print(m.version('skyrl'))"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
