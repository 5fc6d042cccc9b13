"""Tokens/s of GRPO by a client of `hybridrl serve` against `hybridrl train recipe=grpo`, in turns.

    make bench-serve

The client uses Tinker's SDK in a process of its own, so that its work counts. Both sides have the
same starting weights, prompts, draws, ranks and optimizer, and so the same responses:
`response_tokens_mean` and `baseline_response_tokens_mean` are equal but for near-ties.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from blocks import in_turns
from lines import line, show
from tasks import TASKS

HERE = Path(__file__).parent
WARM_UP = 2
SDK = ".cache/tinker/bin/python"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print a line for each rank of adapters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="of a block")
    parser.add_argument("--prompts", type=int, default=32, help="of a step; 8 samples each")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--lora", type=int, nargs="+", default=[8, 0], help="0: all weights")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"))
    parser.add_argument("--python", default=SDK, help="one that has Tinker's SDK")
    args = parser.parse_args(argv)
    model = TASKS["short"].model(args.cache)
    for lora in args.lora:
        rest = [str(model), f"--prompts={args.prompts}", f"--ranks={args.ranks}", f"--lora={lora}"]
        commands = {
            name: [args.python, str(HERE / "serve_sides.py"), name, *rest]
            for name in ("served", "run")
        }
        blocks = in_turns(commands, args.rounds, args.steps, WARM_UP)
        name = f"served_tokens_per_s_{f'lora{lora}' if lora else 'all_weights'}"
        sizes = {"steps_per_block": args.steps, "ranks": args.ranks}
        show(compared(name, blocks["served"], blocks["run"], **sizes))


def compared(
    name: str,
    ours: Sequence[Mapping[str, float]],
    theirs: Sequence[Mapping[str, float]],
    **sizes: Any,
) -> dict[str, Any]:
    """The record of two sides' blocks by the tokens of their responses, a second."""
    both = (ours, theirs)
    per_s = [[x["samples_per_s"] * x["response_tokens_mean"] for x in own] for own in both]
    tokens = [round(fmean(x["response_tokens_mean"] for x in own), 1) for own in both]
    return line(
        name, "tokens/s", "higher", *per_s, **sizes,
        response_tokens_mean=tokens[0], baseline_response_tokens_mean=tokens[1],
    )  # fmt: skip


if __name__ == "__main__":
    main()
