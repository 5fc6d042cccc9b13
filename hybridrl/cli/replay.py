"""`hybridrl replay` and `hybridrl blame`: a step again, and where two runs first differ."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.cli.output import fail, print_json, print_table, refuse
from hybridrl.config import ConfigError
from hybridrl.system.imports import imports_uncollected
from hybridrl.telemetry.digests import Comparison

_COMPARED = 3  # the column of a table whose texts may be long; names stay whole


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a command prints: lines, a table with a header, its record; and whether all is well."""

    lines: list[str]
    rows: list[list[str]]
    record: dict[str, Any]
    equal: bool


def inspect(command: Callable[[Sequence[str]], Inspection], args: Sequence[str]) -> None:
    """Run `replay` or `blame`: a table, a line of JSON, exit 1 where runs differ."""
    with imports_uncollected():
        from hybridrl.driver import train

    try:
        result = command(args)
    except train.RUN_ERRORS as error:
        fail(str(error), 1)
    for line in result.lines:
        print(line)
    print_table(result.rows, wraps={_COMPARED})
    print_json(result.record)
    sys.exit(0 if result.equal else 1)


def replay(args: Sequence[str]) -> Inspection:
    """Replay a step of a run; the arguments that are no options are overrides."""
    from hybridrl.replay import step

    parser = argparse.ArgumentParser(
        prog="hybridrl replay",
        description="A step of a run again, from the nearest checkpoint before it, compared with"
        " the run's records. What follows the options are settings that differ: KEY=VALUE.",
        allow_abbrev=False,
    )
    parser.add_argument("run", type=Path, help="the run's directory")
    parser.add_argument("--step", type=int, required=True, help="a step of its recipe")
    parser.add_argument("--stage", help="generate: up to the batch; train: on that batch")
    parser.add_argument(
        "--batch", type=Path, help="with --stage train: the replay whose batch is trained"
    )
    parser.add_argument("--dir", type=Path, help="the replay's own directory")
    parser.add_argument("--tolerance", type=float, help="how far numbers may be apart")
    parser.add_argument(
        "--from-start", action="store_true", help="without a checkpoint make all steps again"
    )
    parser.add_argument(
        "--recorded-rewards", action="store_true", help="take the judges' recorded scores"
    )
    parser.add_argument("--save", action="store_true", help="write the weights after the step")
    parser.add_argument(
        "--force", action="store_true", help="replay although data, code or packages have changed"
    )
    parser.error = refuse  # type: ignore[method-assign]
    options, overrides = parser.parse_known_args(list(args))
    _check_overrides(overrides)
    stages = [stage.value for stage in step.ReplayStage]
    if options.stage not in (None, *stages):
        raise ConfigError("--stage", options.stage, stages)
    report = step.replay(
        step.ReplayRequest(
            run_dir=options.run,
            step=options.step,
            directory=options.dir,
            stage=options.stage and step.ReplayStage(options.stage),
            batch=options.batch,
            overrides=tuple(overrides),
            tolerance=options.tolerance,
            from_start=options.from_start,
            force=options.force,
            recorded_rewards=options.recorded_rewards,
            saves=options.save,
        )
    )
    begun = f"after step {report.begun_after}" if report.begun_after else "from the start"
    lines = [f"step {report.step} of {options.run}, {begun}: {report.promise.value}"]
    if report.compared != report.step:
        lines.append(f"step {report.compared}, on the way, differs")
    if not report.comparisons:
        lines.append("the run has no record of this step to compare with")
    rows = table_of(report.comparisons, report.tolerance)
    return Inspection([*lines, *report.notes], rows, report.record(), report.as_promised)


def blame(args: Sequence[str]) -> Inspection:
    """Find where two runs first differ."""
    from hybridrl.replay.blame import blame as find_difference

    parser = argparse.ArgumentParser(
        prog="hybridrl blame",
        description="The first step, stage, sample and tensor in which two runs differ.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="two run directories")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="differences up to this are none (0)"
    )
    parser.add_argument(
        "--no-replay", action="store_true", help="by the runs' records alone, without replays"
    )
    parser.add_argument(
        "--from-start", action="store_true", help="without a checkpoint replay all steps"
    )
    parser.add_argument(
        "--force", action="store_true", help="replay although data, code or packages have changed"
    )
    parser.error = refuse  # type: ignore[method-assign]
    options = parser.parse_args(list(args))
    if len(options.runs) != 2:
        raise ConfigError("run", " ".join(map(str, options.runs)), "two runs")
    result = find_difference(
        *options.runs,
        tolerance=options.tolerance,
        replays=not options.no_replay,
        from_start=options.from_start,
        force=options.force,
    )
    rows = table_of(result.comparisons, options.tolerance)
    return Inspection(result.lines(), rows, result.record(), result.first is None)


def table_of(comparisons: Sequence[Comparison], tolerance: float) -> list[list[str]]:
    """A header and a row for each value that was compared; what is too far apart is marked."""
    if not comparisons:
        return []
    rows = [
        [c.stage, c.name, str(c.compared), c.verdict, "" if c.within(tolerance) else "differs"]
        for c in comparisons
    ]
    return [["stage", "value", "number", "compared", ""], *rows]


def _check_overrides(overrides: Sequence[str]) -> None:
    for override in overrides:
        if "=" not in override or override.startswith("-"):
            raise ConfigError("argument", override, "an option of replay --help, or KEY=VALUE")
