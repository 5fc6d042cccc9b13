"""A step's timeline of emulated runs, for the picture of docs/tail.md: docs/images/tail.json.

`python scripts/bench/tail_timeline.py`, then `python scripts/pictures.py`. Each side is a run of
`tail_cases.py`; the step is the same for all, with the same responses. A lane is an instance.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from emulated_steps import measure
from tail import CaseRuns
from tail_cases import CYCLE, PICTURE

Slice = tuple[str, float, float]  # name, start and end in device seconds

FILE = Path(__file__).parents[2] / "docs/images/tail.json"
_SHORT = 0.001  # of a step: what nobody would see, such as a verifier's call
_GAP = 0.004  # of a step: calls that follow each other so closely are drawn as one slice


def main() -> None:
    """Run each side and write the slices of one step, in device seconds from its start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wall-s", type=float, default=12.0, help="wall time of a serial step")
    parser.add_argument("--step", type=int, default=CYCLE + 1)
    (recipe, sides), *_ = PICTURE.sides.items()
    parser.add_argument("--sides", default=",".join(sides))
    args = parser.parse_args()
    drawn: dict[str, list[list[Slice]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = CaseRuns(PICTURE, recipe, Path(folder), args.wall_s)
        for side in args.sides.split(","):
            config = runs.config(side)
            config.trainer.steps = args.step
            measure(config, skip=args.step - 1)
            run = Path(config.run.dir)
            drawn[side] = lanes_of(run, args.step, PICTURE.instance, runs.scale)
    record = {"costs": PICTURE.costs, "ranks": PICTURE.ranks, "sides": drawn}
    FILE.write_text(json.dumps(record) + "\n")


def lanes_of(run: Path, step: int, ranks: int, scale: float) -> list[list[Slice]]:
    """The slices of each instance's first rank, from the step's start."""
    events = json.loads((run / "trace.json").read_text())
    lanes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    slices = [
        (lanes[e["pid"]], e["name"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X" and e["args"].get("step") == step
    ]
    length = max(end for _, _, _, end in slices) - min(start for _, _, start, _ in slices)
    slices = [s for s in slices if s[3] - s[2] > _SHORT * length]
    first = min(start for _, _, start, _ in slices)
    gap = _GAP * length
    num_ranks = sum(lane.startswith("rank ") for lane in lanes.values())

    def seconds(when: int) -> float:
        return round((when - first) / 1e6 / scale, 2)

    drawn = []
    for rank in range(0, num_ranks, ranks):
        own = sorted(
            (start, end, name) for lane, name, start, end in slices if lane == f"rank {rank}"
        )
        drawn.append(
            [(name, seconds(start), seconds(end)) for start, end, name in joined(own, gap)]
        )
    return drawn


def joined(slices: Sequence[tuple[int, int, str]], gap: float) -> list[tuple[int, int, str]]:
    """Neighbors of one name in one slice, whatever share of the guesses was right."""
    whole: list[tuple[int, int, str]] = []
    for begin, end, name in slices:
        name = "verify" if name.startswith("verify ") else name
        name = "wide decode" if name.startswith("wide ") else name
        if whole and whole[-1][2] == name and begin - whole[-1][1] <= gap:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]), name)
        else:
            whole.append((begin, end, name))
    return whole


if __name__ == "__main__":
    main()
