"""Shared by all benchmarks: alternating sides, and printed lines."""

import json
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

Side = TypeVar("Side")


def take_turns(sides: Mapping[Side, Callable[[], float]], rounds: int) -> dict[Side, list[float]]:
    """Measurements of every side, one a round; the order is drawn anew for every round.

    In a fixed order each side would always suffer the after-effects of the one before. A first
    round warms up and is not kept.
    """
    draw = random.Random(0)
    names = list(sides)
    measured: dict[Side, list[float]] = {name: [] for name in names}
    for i in range(rounds + 1):
        for name in draw.sample(names, len(names)):
            value = sides[name]()
            if i:
                measured[name].append(value)
    return measured


def line(
    name: str,
    unit: str,
    better: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    **extra: Any,
) -> dict[str, Any]:
    """The record of one comparison: medians, and the median of the ratios round by round.

    A ratio of two measurements that were taken right after each other cancels most of what else the
    machine did. So it is steadier than the ratio of the medians.
    """
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return {
        "name": name,
        "value": float(f"{statistics.median(ours):.4g}"),
        "unit": unit,
        "baseline": float(f"{statistics.median(theirs):.4g}"),
        "ratio": round(ratio, 3),
        "better": better,
        "rounds": len(ours),
        **extra,
    }


def show(record: Mapping[str, Any]) -> None:
    """Print a record as one line of JSON."""
    print(json.dumps(record), flush=True)
