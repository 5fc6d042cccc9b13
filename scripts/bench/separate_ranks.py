"""Seconds of a step with ranks that generate alone, against shared ranks, on emulated devices.

Prints JSON lines: of each case its sides, each a run under the real driver, beside the plan of
`hybridrl plan schedule` and a lower bound, then whether their order is the planned one. Sides of
separate ranks have the split that the plan finds best. Seconds are those of the device: wall time
over `cluster.time_scale`. `separate_cases.py` has the settings, `separate_bounds.py` the bounds.
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emulated_steps import config_of, measure, setting_of
from lines import show
from separate_bounds import Bound, bound
from separate_cases import CASES, SEPARATE, SIDES, Case

from hybridrl.config import AsyncScheduleConfig, Config
from hybridrl.plan.schedule import Outcome, replay
from hybridrl.plan.separate import steps_to_skip

_TIE = 0.02  # sides whose plans differ by less have no order


@dataclass(frozen=True, slots=True)
class Row:
    """A side: its ranks that generate, device seconds of a step, its plan and its bound."""

    rollout: int
    step_s: float
    planned_s: float
    bound: Bound


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, and measure each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_name = {case.name: case for case in CASES}
    parser.add_argument("--cases", default=",".join(by_name), help=", ".join(by_name))
    parser.add_argument("--sides", help="instead of each case's own")
    parser.add_argument("--steps", type=int, help="after the first, which do not count")
    parser.add_argument("--wall-s", type=float, help="wall time of a step of the quickest side")
    parser.add_argument("--planned", action="store_true", help="only in virtual time")
    args = parser.parse_args(argv)
    for key, known in (("cases", by_name), ("sides", SIDES)):
        if wrong := [x for x in (getattr(args, key) or "").split(",") if x and x not in known]:
            parser.error(f"--{key} {wrong[0]}: wanted some of {', '.join(known)}")
    for name in args.cases.split(","):
        case = by_name[name]
        case = replace(
            case,
            sides=tuple(args.sides.split(",")) if args.sides else case.sides,
            steps=args.steps or case.steps,
            wall_s=args.wall_s or case.wall_s,
        )
        with tempfile.TemporaryDirectory() as folder:
            compare(case, Path(folder), args.planned)


class CaseRuns:
    """The runs of a case: the split of each side, and the scale of their time."""

    def __init__(self, case: Case, folder: Path) -> None:
        """Find the splits in device seconds, then the scale that makes the quickest step short."""
        self.case, self.folder, self.scale = case, folder, 1.0
        self._settings = case.settings(folder)
        self._planned: dict[tuple[str, float], Outcome] = {}
        self._splits: dict[tuple[str, ...], int] = {}
        self.rollout = {side: self._best_split(side) for side in case.sides}
        self.scale = case.wall_s / min(self.planned(side).step_s for side in case.sides)

    def config(self, side: str) -> Config:
        """The run of a side, with its split."""
        return self._config(side, self.rollout[side])

    def planned(self, side: str) -> Outcome:
        """The mean step of a side in virtual time, in wall seconds, as a schedule's constants."""
        key = side, self.scale
        if key not in self._planned:
            self._planned[key] = self._replayed(self.config(side))
        return self._planned[key]

    def bound(self, side: str) -> Bound:
        """The least device seconds of a step of a side, in the batches of its plan."""
        config, planned = self.config(side), self.planned(side)
        skip, _ = _steps(config)
        least = bound(setting_of(config, ()), config.schedule, planned.decode_s, skip)
        return least.scaled(1 / self.scale)

    def emulated_s(self, side: str) -> float:
        """Device seconds of a step in wall time.

        The plan is that of a run that goes on. A run that ends begins no further batches, which
        leaves instances to those that are left: its last S steps do not count.
        """
        config = self.config(side)
        skip, period = _steps(config)
        config.trainer.steps += period - 1
        return measure(config, skip=skip, rest=period - 1).seconds / self.scale

    def _best_split(self, side: str) -> int:
        """The ranks that generate alone with which the plan is quickest; 0 on shared ranks."""
        if side not in SEPARATE:
            return 0
        # Caches that stay make no other split the best.
        alike = tuple(x for x in SEPARATE[side] if not x.startswith("schedule.parked_kv"))
        if alike not in self._splits:
            size, seconds = self.case.instance, dict[int, float]()
            for instances in self.case.splits:
                config = self._config(side, instances * size, self.case.split_steps)
                seconds[instances * size] = self._replayed(config).step_s
            self._splits[alike] = min(seconds, key=lambda ranks: seconds[ranks])
        return self._splits[alike]

    def _replayed(self, config: Config) -> Outcome:
        return replay(setting_of(config, ()), config.schedule, _steps(config)[0])

    def _config(self, side: str, rollout: int, counted: int | None = None) -> Config:
        """The run of a side, with so many steps that count at least, in whole periods."""
        case = self.case
        own = [setting.format(instances=case.ranks // case.instance) for setting in SIDES[side]]
        own += [f"cluster.pools.rollout={rollout}", f"cluster.time_scale={self.scale}"]
        config = config_of([*self._settings, *own], self.folder / f"{side}{rollout}")
        skip, period = _steps(config)
        counted = case.steps if counted is None else counted
        config.trainer.steps = skip + -(-counted // period) * period
        return config


def _steps(config: Config) -> tuple[int, int]:
    """The first steps, which do not count, and the period of those that do."""
    if isinstance(config.schedule, AsyncScheduleConfig):
        return steps_to_skip(config.schedule), 1 + config.schedule.max_staleness
    return 2, 1


def compare(case: Case, folder: Path, planned: bool) -> None:
    """All sides of a case, then their order."""
    started = time.perf_counter()
    runs, rows = CaseRuns(case, folder), dict[str, Row]()
    for side in case.sides:
        plan_s = runs.planned(side).step_s / runs.scale
        step_s = plan_s if planned else runs.emulated_s(side)
        rows[side] = Row(runs.rollout[side], step_s, plan_s, runs.bound(side))
        show(line_of(case, side, rows[side], rows.get("serial"), runs.scale, planned))
    took = round(time.perf_counter() - started, 1)
    show({"name": f"async_{case.name}_order", "emulated": not planned, **order(rows), "took": took})


def line_of(
    case: Case, side: str, row: Row, serial: Row | None, scale: float, planned: bool
) -> dict[str, object]:
    """The record of a side; `ratio` is its step over that of serial."""
    over_serial = {} if serial is None else {
        "baseline": round(serial.step_s, 2),
        "ratio": round(row.step_s / serial.step_s, 3),
        "serial_over_step": round(serial.step_s / row.step_s, 3),
        "planned_serial_over_step": round(serial.planned_s / row.planned_s, 3),
    }  # fmt: skip
    return {
        "name": f"async_{case.name}_{side}",
        "value": round(row.step_s, 2),
        "unit": "s",
        **over_serial,
        "better": "lower",
        "emulated": not planned,
        "generate_ranks": row.rollout,
        "ranks": case.ranks,
        "planned_s": round(row.planned_s, 2),
        "step_over_planned": round(row.step_s / row.planned_s, 3),
        "bound_s": round(row.bound.seconds, 2),
        "bound_by": row.bound.by,
        "of_bound": round(row.bound.seconds / row.step_s, 3),
        "terms_s": {name: round(value, 2) for name, value in row.bound.terms.items()},
        "steps": case.steps,
        "time_scale": round(scale, 4),
    }


def order(rows: dict[str, Row]) -> dict[str, object]:
    """The sides from the quickest on, as emulated and as planned, and whether that is one order.

    Sides whose plans are within 2 percent of each other may stand either way.
    """
    wrong = [
        f"{a}, {b}"
        for a, b in itertools.combinations(sorted(rows, key=lambda s: rows[s].planned_s), 2)
        if rows[b].planned_s > (1 + _TIE) * rows[a].planned_s and rows[b].step_s < rows[a].step_s
    ]
    return {
        "emulated_order": sorted(rows, key=lambda side: rows[side].step_s),
        "planned_order": sorted(rows, key=lambda side: rows[side].planned_s),
        "as_planned": not wrong,
        "turned": wrong,
    }


if __name__ == "__main__":
    main()
