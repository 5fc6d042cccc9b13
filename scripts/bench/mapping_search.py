"""Seconds of the mapping search on HybridFlow's setting: PPO of 13B models, all 15 placements.

A line's value is what the search for the ten best takes on one core, with the memory that
`hybridrl plan auto` counts. Its baseline is what is wanted: a minute for 128 GPUs, five for 1,024.
A search ends after ten minutes. `complete` says whether it was through, `rest` is the least bound
of what is left, over the last result.

- `serial`: the paper's lengths, which are all the same, under `serial`;
- `fused_long_tailed`: `fused` beside `serial`, responses up to eight times the median;
- `joint`: as `serial`, with updates in one plan where that is quicker;
- `all`: `fused` beside `serial`, long-tailed, with updates in one plan.

The others are not among the default cases: `fused_split`, `fused_standalone` and `fused_colocate`
are one placement each, with the paper's lengths, under `fused` alone.
"""

import argparse
from collections.abc import Mapping
from typing import Any

from lines import line, show
from placements import PLACEMENTS, all_placements, long_tailed

from hybridrl.config import FusedScheduleConfig, SerialScheduleConfig

WANTED = {128: 60.0, 1024: 300.0}
LONG_TAILED: Mapping[str, Any] = {
    "schedules": (SerialScheduleConfig(), FusedScheduleConfig()),
    "workload": long_tailed(),
}
CASES: dict[str, Mapping[str, Any]] = {
    "serial": {},
    "fused_long_tailed": LONG_TAILED,
    "joint": {"fuses": True},
    "all": {**LONG_TAILED, "fuses": True},
}
MORE_CASES: dict[str, Mapping[str, Any]] = {
    f"fused_{name}": {"schedules": (FusedScheduleConfig(),), "placement": name}
    for name in PLACEMENTS
}


def main() -> None:
    """Search on each number of GPUs, in each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, nargs="*", choices=WANTED, default=list(WANTED))
    parser.add_argument("--cases", nargs="*", choices=CASES | MORE_CASES, default=list(CASES))
    parser.add_argument("--number", type=int, default=10, help="of mappings to find")
    args = parser.parse_args()
    for gpus in args.gpus:
        for case in args.cases:
            result = all_placements(gpus, args.number, **(CASES | MORE_CASES)[case])
            best, last = result.best[0], result.best[-1].seconds.step_s
            about = {
                "number": args.number,
                "replayed": result.num_replayed,
                "complete": result.is_complete,
                "rest": None if result.rest_s is None else round(result.rest_s / last, 3),
                "best_step_s": round(best.seconds.step_s, 2),
                "schedule": best.mapping.schedule.kind.value,
                "one_plan": best.mapping.fuses,
            }
            name = f"mapping_search_{gpus}_gpus_{case}"
            show(line(name, "s", "lower", [result.seconds], [WANTED[gpus]], **about))


if __name__ == "__main__":
    main()
