"""End-to-end samples/s: ours against a plain loop and TRL's two ways to generate, in turns.

A sample is generated, judged and trained on. Same starting weights, prompts in the same order,
sampling, lengths, batch, algorithm and cores for all sides; see docs/benchmarks.md.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from blocks import Side
from lines import line, show
from tasks import TASKS, THREADS

HERE = Path(__file__).parent
SCRIPTS = {
    "ours": "our_side.py", "loop": "plain_loop.py", "trl": "trl_loop.py",
    "trl_batching": "trl_batching.py",
}  # fmt: skip
OTHERS = list(SCRIPTS)[1:]
STEPS = {"short": 8, "longtail": 4}  # of a block
WARM_UP = 2


def compare(
    task: str, others: Sequence[str], cache: Path, rounds: int, steps: int, prompts: int
) -> None:
    """Print one line for each of `others`."""
    model = TASKS[task].model(cache)
    names = ["ours", *others]
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with ExitStack() as stack:
        sides = {}
        for name in names:
            command = [sys.executable, str(HERE / SCRIPTS[name]), task, str(model)]
            command += ["--prompts", str(prompts)]
            sides[name] = Side(command, {"OMP_NUM_THREADS": str(THREADS)})
            stack.callback(sides[name].close)
            sides[name].block(WARM_UP)
        for i in range(rounds):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                measured[name].append(sides[name].block(steps))
    for name in others:
        show(
            line(
                f"samples_per_s_{task}_vs_{name}", "samples/s", "higher",
                [block["samples_per_s"] for block in measured["ours"]],
                [block["samples_per_s"] for block in measured[name]],
                steps_per_block=steps,
                **_lengths("", measured["ours"]),
                **_lengths("baseline_", measured[name]),
            )
        )  # fmt: skip


def _lengths(prefix: str, blocks: list[dict[str, float]]) -> dict[str, float]:
    """Response tokens of a side, so that one can check that all sides had the same to do."""
    mean = statistics.fmean(block["response_tokens_mean"] for block in blocks)
    return {
        f"{prefix}response_tokens_mean": round(mean, 1),
        f"{prefix}response_tokens_max": max(block["response_tokens_max"] for block in blocks),
    }


def main(argv: list[str] | None = None) -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--against", choices=OTHERS, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="of a block")
    parser.add_argument("--prompts", type=int, default=32, help="of a step; 8 samples each")
    parser.add_argument("--cache", type=Path, default=Path(".cache/bench"))
    args = parser.parse_args(argv)
    for task in args.task or TASKS:
        against = args.against or OTHERS
        steps = args.steps or STEPS[task]
        compare(task, against, args.cache, args.rounds, steps, args.prompts)


if __name__ == "__main__":
    main()
