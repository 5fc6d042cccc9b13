"""Where two runs first differ: `hybridrl blame`. By their records, then by replays of that step."""

import shutil
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.driver.train import RUN_ERRORS
from hybridrl.replay.step import ReplayReport, ReplayRequest, replay
from hybridrl.telemetry.compare import settings_of
from hybridrl.telemetry.digests import (
    Comparison,
    StepRecord,
    coarse_steps,
    compare_steps,
    read_steps,
)
from hybridrl.telemetry.report import is_run
from hybridrl.telemetry.rundata import load

_NOT_COMPARED = ("run.dir", "telemetry.", "log.", "cluster.address", "trainer.resume")


@dataclass(frozen=True, kw_only=True)
class BlameReport:
    """The first difference of two runs; `first` None where there is none in the steps compared.

    `settings` lists those that differ: key and both values. `tensor` says how far the first tensor
    is apart, where both runs could be replayed. `comparisons` are all of the step.
    """

    runs: tuple[Path, Path]
    settings: tuple[tuple[str, Any, Any], ...]
    steps: tuple[int, ...]
    step: int | None = None
    comparisons: tuple[Comparison, ...] = ()
    first: Comparison | None = None
    tensor: str = ""
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For a reader."""
        lines = [f"setting {key}: {one} and {other}" for key, one, other in self.settings]
        if self.first is None:
            one, last = self.steps[0], self.steps[-1]
            span = f"step {one}" if one == last else f"steps {one} to {last}"
            return [*lines, f"no difference in {span}", *self.notes]
        first = self.first
        place = f"step {self.step}, stage {first.stage}, {first.name}"
        lines.append(f"first difference: {place}: {first.verdict}")
        if self.tensor:
            lines.append(self.tensor)
        return [*lines, *self.notes]

    def record(self) -> dict[str, Any]:
        """All of it, in plain JSON types."""
        first = self.first
        return {
            "runs": [str(run) for run in self.runs],
            "settings": {key: [one, other] for key, one, other in self.settings},
            "equal": first is None,
            "steps": [self.steps[0], self.steps[-1]],
            "first": None if first is None else {
                "step": self.step, "stage": first.stage, "name": first.name, "of": first.first,
                "values": list(first.values), "tensor": self.tensor,
            },
        }  # fmt: skip


def blame(
    one: Path,
    other: Path,
    *,
    tolerance: float = 0.0,
    replays: bool = True,
    from_start: bool = False,
    force: bool = False,
) -> BlameReport:
    """Find the first step, stage, sample and tensor in which two runs differ.

    Records say which step. With `replays` both runs make it again, and its tensors are compared.
    Raises ConfigError for a directory that is no run, and for runs without a step in common.
    """
    runs = (one, other)
    for run in runs:
        if not is_run(run):
            raise ConfigError("run", run, "a run directory (one that holds run.json)")
    records = _records(runs)
    steps = tuple(sorted(records[0].keys() & records[1].keys()))
    if not steps:
        raise ConfigError("run", f"{one} {other}", "runs that have made a step in common")
    report = BlameReport(runs=runs, settings=tuple(_settings(runs)), steps=steps)
    report = _first(report, records, steps, tolerance)
    if report.first is None or not replays:
        return report
    request = ReplayRequest(
        run_dir=one, step=report.step or 0, from_start=from_start, force=force, saves=True
    )
    exact = all(record.exact for of_run in records for record in of_run.values())
    try:
        with ExitStack() as weights:
            return _by_replays(report, request, tolerance, exact, weights)
    except (ConfigError, *RUN_ERRORS) as error:
        return replace(report, notes=(*report.notes, f"by the records alone: {error}"))


Records = tuple[dict[int, StepRecord], dict[int, StepRecord]]
"""The records of two runs, by step."""


def _records(runs: tuple[Path, Path]) -> Records:
    """The records of both runs, of each step those that both have: digests, or the few of all."""
    exact, coarse = ([read(run) for run in runs] for read in (read_steps, coarse_steps))
    both = exact[0].keys() & exact[1].keys()
    one, other = (
        {step: exact[i][step] if step in both else record for step, record in coarse[i].items()}
        for i in range(2)
    )
    return one, other


def _settings(runs: tuple[Path, Path]) -> list[tuple[str, Any, Any]]:
    one, other = (settings_of(load(run)) for run in runs)
    return [
        (key, one.get(key), other.get(key))
        for key in sorted(one.keys() | other.keys())
        if repr(one.get(key)) != repr(other.get(key)) and not key.startswith(_NOT_COMPARED)
    ]


def _first(
    report: BlameReport,
    records: Records,
    steps: tuple[int, ...],
    tolerance: float,
) -> BlameReport:
    """The report with the first difference in these records."""
    for step in steps:
        comparisons = compare_steps(records[0][step], records[1][step])
        first = next((c for c in comparisons if not c.within(tolerance)), None)
        if first is not None:
            return replace(report, step=step, comparisons=tuple(comparisons), first=first)
    return report


def _by_replays(
    report: BlameReport,
    request: ReplayRequest,
    tolerance: float,
    exact: bool,
    weights: ExitStack,
) -> BlameReport:
    """The report of replays, whose `weights` are deleted at the end.

    Where records are not `exact`, the weights may differ a step before the metrics.
    """
    assert report.step is not None
    earliest = report.step if exact else max(report.step - 1, report.steps[0])
    replayed = _replays(report, replace(request, earliest=earliest), weights)
    records = tuple(read_steps(one.directory) for one in replayed)
    steps = tuple(sorted(records[0].keys() & records[1].keys()))
    again = _first(replace(report, first=None), (records[0], records[1]), steps, tolerance)
    if again.first is None:
        note = "the replays are equal, so what differs is not of the run's making: time, say"
        return replace(report, notes=(*report.notes, note))
    if again.step != report.step:  # its tensors were not kept
        assert again.step is not None
        replayed = _replays(again, replace(request, step=again.step), weights)
    notes = [
        f"a replay of {run} differs from it, in {first.name} of step {one.compared}"
        for run, one in zip(report.runs, replayed, strict=True)
        if (first := one.first) is not None
    ]
    tensor = _tensor(again.first, [one.directory for one in replayed])
    return replace(again, tensor=tensor, notes=(*report.notes, *notes))


def _replays(report: BlameReport, request: ReplayRequest, weights: ExitStack) -> list[ReplayReport]:
    """Replays of both runs; at the end of `weights` their weights and optimizer states are gone."""
    replayed = []
    for run in report.runs:
        replayed.append(replay(replace(request, run_dir=run)))
        weights.callback(shutil.rmtree, replayed[-1].directory / "final", ignore_errors=True)
    return replayed


def _tensor(first: Comparison, directories: list[Path]) -> str:
    """How far the first tensor that differs is apart, over all weights if it is one of them."""
    from hybridrl.checkpoint.differences import batch_difference, weight_difference

    one, other = directories
    if first.role:  # the loss of a later mini-batch differs where the weights do
        role = first.role
        folders = [directory / "final" / "resume" / role for directory in (one, other)]
        if not all(folder.is_dir() for folder in folders):  # one of the runs has no such role
            return ""
        differences = weight_difference(*folders)
        differences.sort(key=lambda x: x.name != first.first)  # stable: the first one, then others
        if len(differences) < 2:
            return "".join(map(str, differences))
        worst = max(differences, key=lambda x: x.most)
        return f"{differences[0]}; the largest difference is {worst.most:.3g}, in {worst.name}"
    key = f"{first.first.removeprefix('sample ')}/{first.name}"
    return str(batch_difference(one / "batch", other / "batch", key) or "")
