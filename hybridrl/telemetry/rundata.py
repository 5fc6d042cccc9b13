"""A run directory as it is read back, whole or damaged."""

import contextlib
import math
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.telemetry.records import parse, read_lines
from hybridrl.telemetry.trace import Counter, TraceSpan, read_timeline

COSTS = "costs.json"
_CONFIGS = ("config.yaml", "config.json", ".hydra/config.yaml")
RECORD_FILES = (
    *("run.json", "environment.json", "metrics.jsonl", "events.jsonl", "samples.jsonl"),
    *("lengths.jsonl", "trace.json", COSTS, *_CONFIGS),
)
"""All that `load` reads."""
_NOT_METRICS = {"step", "time", "phase"}


@dataclass(frozen=True, order=True, slots=True)
class StepKey:
    """A step of a phase, at `x` on the axis that counts over all phases."""

    x: int
    phase: str
    step: int


@dataclass(kw_only=True)
class RunData:
    """The contents of a run directory's files. `metrics` is merged per step, in order of `x`."""

    name: str
    directory: str
    status: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    metrics: dict[StepKey, dict[str, Any]] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    lengths: list[dict[str, Any]] = field(default_factory=list)
    spans: list[TraceSpan] = field(default_factory=list)
    counters: list[Counter] = field(default_factory=list)
    config: str = ""
    kinds: list[list[Any]] = field(default_factory=list)
    """Each kind of work that the run has scaled: its name, calls, counted and measured seconds."""

    @property
    def state(self) -> str:
        """`running`, `finished`, `failed`, `interrupted`; `killed` if its process is gone."""
        state = str(self.status.get("state", "unknown"))
        pid, host = self.status.get("pid"), self.status.get("host")
        if state != "running" or host != socket.gethostname() or not isinstance(pid, int):
            return state
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "killed"
        except PermissionError:
            pass  # it lives, as another user
        return state

    @property
    def started(self) -> float | None:
        """Seconds since the epoch."""
        times = [self.status.get("started"), *(row.get("time") for row in self.metrics.values())]
        return min((t for t in times if isinstance(t, int | float)), default=None)

    @property
    def seconds(self) -> float | None:
        """Wall seconds from the start to the end, or to the last record of a run without one."""
        ended = self.status.get("ended")
        rows = [*self.metrics.values(), *self.events]
        times = [row["time"] for row in rows if isinstance(row.get("time"), int | float)]
        last = ended if isinstance(ended, int | float) else max(times, default=None)
        return None if last is None or self.started is None else max(0.0, last - self.started)

    def key(self, record: dict[str, Any]) -> StepKey:
        """The step and phase that a record belongs to."""
        phase, step = str(record.get("phase") or "rl"), _step(record)
        return StepKey(self.offsets.get(phase, 0) + step, phase, step)

    def steps(self, phase: str) -> list[dict[str, Any]]:
        """The metrics of each step of a phase, in order; those of evaluations alone are no step.

        A step whose samples were all left out has no loss.
        """
        return [
            row
            for key, row in self.metrics.items()
            if key.phase == phase and row.keys() & {"step_s", "loss"}
        ]

    def series(self, name: str) -> list[tuple[StepKey, float | None]]:
        """A metric over the steps that have it; None where it was not finite."""
        return [
            (key, finite(row[name]))
            for key, row in self.metrics.items()
            if row.get(name) is not None and is_number(row[name])
        ]

    @property
    def metric_names(self) -> list[str]:
        """Every metric that some step has, in order of first appearance."""
        names = dict.fromkeys(name for row in self.metrics.values() for name in row)
        return [name for name in names if name not in _NOT_METRICS and self.series(name)]


def state_of(run_dir: Path) -> str:
    """The state of a run, without its other records; see `RunData.state`."""
    status = _read_json(run_dir / "run.json")
    return RunData(name=run_dir.name, directory=str(run_dir), status=status).state


def load(run_dir: Path) -> RunData:
    """Read a run directory. Files and lines that are missing or cut off are left out."""
    status = _read_json(run_dir / "run.json")
    spans, counters = read_timeline(run_dir / "trace.json")
    run = RunData(
        name=run_dir.resolve().name + " (emulated)" * bool(status.get("emulated")),
        directory=str(run_dir),
        status=status,
        environment=_read_json(run_dir / "environment.json"),
        events=read_lines(run_dir / "events.jsonl"),
        samples=read_lines(run_dir / "samples.jsonl"),
        lengths=read_lines(run_dir / "lengths.jsonl"),
        spans=spans,
        counters=counters,
        kinds=_read_json(run_dir / COSTS).get("kinds", []),
        config=next((_text(run_dir / n) for n in _CONFIGS if (run_dir / n).is_file()), ""),
    )
    rows = [row for row in read_lines(run_dir / "metrics.jsonl") if is_number(row.get("step"))]
    run.offsets = _offsets(rows)
    for row in rows:  # in file order: a step that was run again after a resume replaces the first
        key = run.key(row)
        run.metrics.setdefault(key, {}).update(row)
    order = {phase: number for number, phase in enumerate(run.offsets)}
    run.metrics = dict(sorted(run.metrics.items(), key=lambda kv: (kv[0].x, order[kv[0].phase])))
    return run


def last_step(run_dir: Path) -> int:
    """The last step that has a row of metrics; 0 without one."""
    return max((_step(row) for row in read_lines(run_dir / "metrics.jsonl")), default=0)


def environment_at(run_dir: Path, when: float) -> dict[str, Any]:
    """The environment of the process that worked on a run at `when` (Unix seconds).

    Empty where none was recorded.
    """
    records = environments_of(run_dir)
    begun = [record for record in records if float(record.get("time", 0)) <= when]
    return (begun or records)[-1]


def environments_of(run_dir: Path) -> list[dict[str, Any]]:
    """The environments of the processes that worked on a run, the newest one last."""
    files = [*run_dir.glob("earlier-*-environment.json"), run_dir / "environment.json"]
    return sorted((_read_json(file) for file in files), key=lambda x: float(x.get("time", 0)))


def checkpoints_of(run_dir: Path, which: str) -> dict[int, Path]:
    """The checkpoints that a run has left, by step, ascending.

    `which` is `all`, `final`, or steps with commas between them. Raises ConfigError where one is
    not there.
    """
    steps_of: dict[Path, int] = {}
    for event in read_lines(run_dir / "events.jsonl"):
        if event.get("kind") == "checkpoint":
            name = Path(str(event.get("path"))).name
            folders = (run_dir / "checkpoints" / name, run_dir / name)  # it may have been moved
            steps_of |= {folder: _step(event) for folder in folders}
    # A run that goes on from a checkpoint has cut that one's event off, with all later records.
    ends = run_dir / "warm_start", run_dir / "final"
    for folder in (*(run_dir / "checkpoints").glob("step_*"), *ends):
        if state := _read_json(folder / "resume" / "state.json"):
            steps_of[folder] = _step(state)
    there = [(step, f) for f, step in steps_of.items() if (f / "config.json").is_file()]
    present = dict(sorted(there, key=lambda x: (x[0], x[1].name == "final")))
    if not present:
        raise ConfigError("run", run_dir, "a run directory with a checkpoint, or final/")
    if which == "all":
        return present
    if which == "final":
        return dict([present.popitem()])
    steps = [step.strip() for step in which.split(",")]
    for step in steps:
        if not step.isdecimal() or int(step) not in present:
            allowed = f"all, final, or steps among {', '.join(map(str, present))}"
            raise ConfigError("--checkpoints", step, allowed)
    return {step: present[step] for step in sorted(map(int, steps))}


def finite(value: Any) -> float | None:
    """`value` as a number, None for one that is not finite."""
    number = float(value)
    return number if math.isfinite(number) else None


def is_number(value: Any) -> bool:
    """Whether `value` is a number, or the text that stands for one that is not finite."""
    if isinstance(value, str):
        return value in {"NaN", "Infinity", "-Infinity"}
    return isinstance(value, int | float) and not isinstance(value, bool)


def _offsets(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Steps before each phase on the common axis: 0 where steps already count over all phases."""
    ranges: dict[str, tuple[int, int]] = {}
    for row in rows:
        phase, step = str(row.get("phase") or "rl"), _step(row)
        low, high = ranges.get(phase, (step, step))
        ranges[phase] = (min(low, step), max(high, step))
    offsets, end = {}, 0
    for phase, (low, high) in ranges.items():
        # A phase may begin with an evaluation at the very step at which the one before it ended.
        offsets[phase] = end if low < end else 0
        end = max(end, offsets[phase] + high)
    return offsets


def _step(record: dict[str, Any]) -> int:
    step = record.get("step", 0)
    return int(step) if is_number(step) and finite(step) is not None else 0


def _read_json(path: Path) -> dict[str, Any]:
    value = parse(_text(path)) if path.is_file() else None
    return value if isinstance(value, dict) else {}


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace")
    return ""
