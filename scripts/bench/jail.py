"""Programs judged per second of one core, in each jail and without one: `make bench-jail`.

The mechanisms take turns, one round each, on one core. Prints one JSON object a line: medians of
wall time, and CPU time of the verifier and its jails, which other load changes less.
"""

import argparse
import json
import os
import statistics
import time

from hybridrl.config import ConfigError, JailKind, JudgeConfig, RewardKind
from hybridrl.rewards.code import judge_program
from hybridrl.sandbox.jail import choose

PROGRAM = "numbers = list(map(int, input().split()))\nprint(sum(numbers))\n"


def seconds_of(kind: JailKind, tests: int, programs: int) -> tuple[float, float]:
    """Wall and CPU seconds for `programs` programs with so many tests each, which they pass."""
    row = {"answer": {"inputs": ["1 2 3\n"] * tests, "outputs": ["6\n"] * tests}}
    config = JudgeConfig(kind=RewardKind.code, jail=kind, timeout_s=60.0)
    start, before = time.perf_counter(), os.times()
    for _ in range(programs):
        assert judge_program(PROGRAM, row, config) == 1.0
    wall, after = time.perf_counter() - start, os.times()
    return wall, sum(after[:4]) - sum(before[:4])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    kinds = [JailKind.off]
    for kind in (JailKind.bubblewrap, JailKind.namespaces):
        try:
            choose(kind)
            kinds.append(kind)
        except ConfigError as error:
            print(json.dumps({"name": kind.value, "skipped": error.allowed}))
    for tests in (1, 20):
        seconds: dict[JailKind, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(arguments.rounds + 1):  # the first warms up
            for kind in kinds:
                seconds[kind].append(seconds_of(kind, tests, arguments.programs))
        for kind in kinds:
            wall, cpu = (
                statistics.median(column) for column in zip(*seconds[kind][1:], strict=True)
            )
            record = {
                "name": f"jail_{kind.value}",
                "tests": tests,
                "programs_per_s": round(arguments.programs / wall, 1),
                "programs_per_cpu_s": round(arguments.programs / cpu, 1),
            }
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
