"""Seconds of a step with each mechanism on emulated devices, their prediction and bound.

Long-tailed lengths, GPUs by roofline, no model (docs/emulated.md). Prints JSON lines: the bounds of
a case first, then its sides, each a run. Seconds are those of the device: wall time over
`cluster.time_scale`. `tail_cases.py` has the settings, `tail_bounds.py` the bounds.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from emulated_steps import config_of, measure, setting_of
from lines import show
from tail_bounds import Machine, bounds, pass_tokens
from tail_cases import ACCEPT, CASES, CYCLE, MORE_CASES, RECIPES, SIDES, Case

from hybridrl.config import Config, SerialScheduleConfig
from hybridrl.costs.instance import LONGEST_DRAFT, Costs
from hybridrl.costs.roofline import Roofline
from hybridrl.plan.schedule import Setting, replay
from hybridrl.preflight.prepare import prepare
from hybridrl.workers.emulation import scaled

SEEN, UNSEEN = 0, 1  # run.seed of the emulated runs, and of a prediction without their lengths


@dataclass(frozen=True, slots=True)
class Row:
    """A side: device seconds of a step as emulated, as planned for the same lengths and others."""

    step_s: float
    planned_s: float
    unseen_s: float


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, and measure each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_name = {case.name: case for case in (*CASES, *MORE_CASES)}
    parser.add_argument(
        "--cases", default=",".join(case.name for case in CASES), help=", ".join(by_name)
    )
    parser.add_argument("--sides", help="instead of each case's own")
    parser.add_argument("--recipes", help="instead of each case's own")
    parser.add_argument("--cycles", type=int, help=f"of {CYCLE} steps; one more warms up")
    parser.add_argument("--wall-s", type=float, help="wall time of a serial step")
    parser.add_argument("--planned", action="store_true", help="only in virtual time")
    args = parser.parse_args(argv)
    if args.sides and not {"serial", "fused"} <= {*args.sides.split(",")} <= {*SIDES}:
        parser.error(f"--sides {args.sides}: wanted serial, fused and others of {', '.join(SIDES)}")
    for key, known in (("cases", by_name), ("recipes", RECIPES)):
        if wrong := [x for x in (getattr(args, key) or "").split(",") if x and x not in known]:
            parser.error(f"--{key} {wrong[0]}: wanted some of {', '.join(known)}")
    for name in args.cases.split(","):
        case = by_name[name]
        recipes = args.recipes.split(",") if args.recipes else [*case.sides]
        own = tuple(args.sides.split(",")) if args.sides else None
        case = replace(
            case,
            sides={recipe: own or case.sides[recipe] for recipe in recipes},
            cycles=args.cycles or case.cycles,
            wall_s=args.wall_s or case.wall_s,
        )
        for recipe in recipes:
            with tempfile.TemporaryDirectory() as folder:
                compare(case, recipe, Path(folder), args.planned)


class CaseRuns:
    """The runs of a case and recipe: their costs in a file, and the scale of their time."""

    def __init__(self, case: Case, recipe: str, folder: Path, wall_s: float) -> None:
        self.case, self.recipe, self.folder = case, recipe, folder
        self.stages, self.scale = RECIPES[recipe].stages, 1.0
        self.costs = folder / "costs.json"
        self._write(case_costs(case, self.stages))
        if case.published_shares:
            self._write(at_shares(self.planned("serial"), case.published_shares))
        step_s = replay(self.planned("serial"), SerialScheduleConfig(), CYCLE).step_s
        self.scale = min(1.0, wall_s / step_s)

    def config(self, side: str, seed: int = SEEN, steps: int | None = None) -> Config:
        """A run of a side; `steps` after those that warm up, instead of the case's own."""
        case = self.case
        own = [setting.format(instances=case.instances) for setting in SIDES[side]]
        own += [f"run.seed={seed}", f"cluster.costs={self.costs}"]
        own += [f"cluster.time_scale={self.scale}"]
        own += [f"trainer.steps={CYCLE + (steps or case.cycles * CYCLE)}"]
        return config_of([*settings_of(case, self.recipe), *own], self.folder / f"{side}{seed}")

    def check(self, side: str) -> None:
        """Raise ConfigError for a side whose layout the models or the GPU's memory exclude.

        The costs of the runs are in a file, which names neither.
        """
        case = self.case
        model = case.costs.partition("model=")[2].split(",")[0]
        judged = "reward" in self.stages and "critic=" not in case.costs
        critic = f",critic={model}" if judged else ""
        own = [setting.format(instances=case.instances) for setting in SIDES[side]]
        own.append(f'cluster.costs="{case.costs}{critic}"')
        prepare(config_of([*settings_of(case, self.recipe), *own], self.folder / f"{side}_checked"))

    def planned(self, side: str, seed: int = SEEN, steps: int | None = None) -> Setting:
        """The setting of a side for the planner, in the wall time of the run.

        A schedule has constants in seconds, such as the length of a call that others wait for.
        """
        return setting_of(self.config(side, seed, steps), self.stages)

    def planned_s(self, side: str, seed: int = SEEN, steps: int | None = None) -> float:
        """Device seconds of a step in virtual time."""
        schedule = self.config(side, seed).schedule
        return replay(self.planned(side, seed, steps), schedule, CYCLE).step_s / self.scale

    def emulated_s(self, side: str) -> float:
        """Device seconds of a step in wall time."""
        return measure(self.config(side), skip=CYCLE).seconds / self.scale

    def _write(self, costs: Costs) -> None:
        record = {"costs": costs.to_json(), "num_instances": self.case.instances}
        self.costs.write_text(json.dumps(record))


def compare(case: Case, recipe: str, folder: Path, planned: bool) -> None:
    """The bounds and all sides of one recipe."""
    started = time.perf_counter()
    runs = CaseRuns(case, recipe, folder, case.wall_s)
    for side in case.sides[recipe]:
        runs.check(side)
    least = show_bounds(runs)
    rows = {}
    for side in case.sides[recipe]:
        same = runs.planned_s(side)
        other = runs.planned_s(side, UNSEEN, case.cycles * CYCLE)
        rows[side] = Row(same if planned else runs.emulated_s(side), same, other)
    for side in rows:
        show(line_of(runs, side, rows, least[side], planned))
    show({"name": f"tail_{case.name}_{recipe}_took", "s": round(time.perf_counter() - started, 1)})


def settings_of(case: Case, recipe: str) -> list[str]:
    """The settings that all sides share."""
    return [
        *RECIPES[recipe].settings,
        f'cluster.lengths="{case.lengths}"',
        f"cluster.prompt_tokens={case.prompt_tokens}",
        f"cluster.ranks={case.ranks}",
        f"rollout.layout.tp={case.instance}",
        f"rollout.max_new_tokens={case.limit}",
        f"rollout.decode_steps={case.decode_steps}",
        f"trainer.prompts_per_step={case.prompts}",
        f"{RECIPES[recipe].group_key}={case.group}",
    ]


def case_costs(case: Case, stages: Sequence[str]) -> Costs:
    """The roofline's; without a critic of its own a reward model is of the actor's size.

    A roofline has that with a critic alone. Then the critic's training is left out.
    """
    if "critic=" in case.costs:
        costs = Roofline.of(case.costs, case.instance, case.ranks).costs(case.widths)
        return costs
    model = case.costs.removeprefix("gpu:").split(",")[0].removeprefix("model=")
    text = f"{case.costs},critic={model}" if "reward" in stages else case.costs
    with_critic = Roofline.of(text, case.instance, case.ranks).costs(case.widths)
    alone = Roofline.of(case.costs, case.instance, case.ranks).costs()
    return replace(with_critic, train_token_s=alone.train_token_s)


def at_shares(setting: Setting, shares: tuple[float, float, float]) -> Costs:
    """The costs with which a serial step has these shares of generation, inference, training."""
    costs, (generation, inference, training) = setting.costs, shares
    bare = replace(setting, costs=replace(costs, token_s={}, train_token_s=0.0))
    rollout = replay(bare, SerialScheduleConfig(), CYCLE).step_s
    passes = replace(setting, costs=replace(costs, train_token_s=0.0))
    inferred = replay(passes, SerialScheduleConfig(), CYCLE).step_s - rollout
    trained = replay(setting, SerialScheduleConfig(), CYCLE).step_s - rollout - inferred
    times = inference / generation * rollout / inferred
    return replace(
        costs,
        token_s={name: seconds * times for name, seconds in costs.token_s.items()},
        train_token_s=costs.train_token_s * training / generation * rollout / trained,
    )


def show_bounds(runs: CaseRuns) -> dict[str, float]:
    """What each side may reach at most, before anything is run."""
    case, setting = runs.case, runs.planned("serial")
    costs = scaled(setting.costs, 1 / runs.scale)
    machine = Machine(
        costs=costs,
        instances=case.instances,
        max_held=setting.max_held,
        wide_step_s=min([costs.step_s, *costs.wide_step_s.values()]),
        pass_tokens=pass_tokens(LONGEST_DRAFT, ACCEPT),
    )
    work = setting.workload
    first = CYCLE * work.prompts_per_step
    steps = [
        work.groups[i : i + work.prompts_per_step]
        for i in range(first, work.num_steps * work.prompts_per_step, work.prompts_per_step)
    ]
    least = bounds(steps, machine, CYCLE, case.sides[runs.recipe])
    show(
        {
            "name": f"tail_{case.name}_{runs.recipe}_bounds",
            "at_least_s": {side: round(seconds, 2) for side, seconds in least.items()},
            "fused_over": {side: round(least["fused"] / s, 3) for side, s in least.items()},
        }
    )
    return least


def line_of(
    runs: CaseRuns, side: str, rows: dict[str, Row], least: float, planned: bool
) -> dict[str, object]:
    """The record of a side: device seconds, and how much sooner than serial and fused it is."""
    case, row, serial, fused = runs.case, rows[side], rows["serial"], rows["fused"]
    unseen = fused.unseen_s / row.unseen_s
    return {
        "name": f"tail_{case.name}_{runs.recipe}_{side}",
        "emulated": not planned,
        "step_s": round(row.step_s, 2),
        "planned_s": round(row.planned_s, 2),
        "step_over_planned": round(row.step_s / row.planned_s, 3),
        "serial_over_step": round(serial.step_s / row.step_s, 3),
        "fused_over_step": round(fused.step_s / row.step_s, 3),
        "unseen_fused_over_step": round(unseen, 3),
        "ratio_over_unseen": round(fused.step_s / row.step_s / unseen, 3),
        "bound_s": round(least, 2),
        "ranks": case.ranks,
        "instances": case.instances,
        "steps": case.cycles * CYCLE,
        "time_scale": round(runs.scale, 4),
    }


if __name__ == "__main__":
    main()
