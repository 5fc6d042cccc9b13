"""Programs judged per second on one core, in each jail and without one: `make bench-jail`.

The mechanisms take turns, one round each. Prints one JSON object a line.
"""

import argparse
import json
import statistics
import time

from hybridrl.config import ConfigError, JailKind, JudgeConfig, RewardKind
from hybridrl.rewards.code import judge_program
from hybridrl.rewards.jail import choose

PROGRAM = "numbers = list(map(int, input().split()))\nprint(sum(numbers))\n"


def seconds_of(kind: JailKind, tests: int, programs: int) -> float:
    """Seconds for `programs` programs with so many tests each, all of which they pass."""
    row = {"answer": {"inputs": ["1 2 3\n"] * tests, "outputs": ["6\n"] * tests}}
    config = JudgeConfig(kind=RewardKind.code, jail=kind, timeout_s=60.0)
    start = time.perf_counter()
    for _ in range(programs):
        assert judge_program(PROGRAM, row, config) == 1.0
    return time.perf_counter() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    kinds = [JailKind.off]
    for kind in (JailKind.bubblewrap, JailKind.namespaces):
        try:
            choose(kind)
            kinds.append(kind)
        except ConfigError as error:
            print(json.dumps({"name": kind.value, "skipped": error.allowed}))
    for tests in (1, 20):
        seconds: dict[JailKind, list[float]] = {kind: [] for kind in kinds}
        for _ in range(arguments.rounds + 1):  # the first warms up
            for kind in kinds:
                seconds[kind].append(seconds_of(kind, tests, arguments.programs))
        baseline = statistics.median(seconds[JailKind.off][1:])
        for kind in kinds:
            median = statistics.median(seconds[kind][1:])
            record = {
                "name": f"jail_{kind.value}",
                "tests": tests,
                "programs_per_s": round(arguments.programs / median, 1),
                "ms_per_program": round(1e3 * median / arguments.programs, 1),
                "ratio": round(baseline / median, 3),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
