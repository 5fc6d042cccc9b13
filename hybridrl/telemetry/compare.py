"""Several runs side by side: what differs in their settings, their curves and samples.

Runs that differ in seed and directory alone are one group. Its curves and figures are means, with
95 % intervals by Student's t.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import yaml

from hybridrl.config.errors import ConfigError
from hybridrl.telemetry.records import write_atomic
from hybridrl.telemetry.report import fill_page, is_run, script
from hybridrl.telemetry.rundata import RunData, StepKey

NOT_COMPARED = ("run.", "telemetry.", "log.", "cluster.address", "trainer.resume")
"""Settings that two runs of one group may have otherwise."""

_SHOWN = ("eval_accuracy", "reward_mean", "response_tokens_mean", "entropy", "grad_norm", "step_s")
_MAX_PROMPTS = 20

Curve = list[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over runs, and its interval where there are several."""

    mean: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} ± {(self.high - self.low) / 2:.2g}"


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs of the same settings but for the seed; `differs` are those that other groups have not.

    The label has these settings, or the directory's name where nothing differs.
    """

    label: str
    runs: tuple[RunData, ...]
    differs: Mapping[str, Any]

    def last(self, metric: str) -> Estimate | None:
        """The runs' last values of a metric; None where not every run has one."""
        values = [_last(run, metric) for run in self.runs]
        return estimate([v for v in values if v is not None]) if None not in values else None

    def curve(self, metric: str) -> Curve:
        """The mean at each step that every run has: `step`, `tokens`, `seconds`, `y`, bounds."""
        by_run = [_points(run, metric) for run in self.runs]
        steps = [step for step in by_run[0] if all(step in points for points in by_run)]
        curve = []
        for step in steps:
            points = [points[step] for points in by_run]
            y = estimate([point["y"] for point in points])
            mean = {key: statistics.fmean(p[key] for p in points) for key in ("tokens", "seconds")}
            bounds = {} if y.low is None or y.high is None else {"low": y.low, "high": y.high}
            curve.append({"step": float(step), **mean, "y": y.mean, **bounds})
        return curve


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run directories at `paths`, each a run or a sweep with runs in it.

    Raises ConfigError for a path that is neither, and for fewer than two runs.
    """
    runs: list[Path] = []
    for path in paths:
        inside = [path] if is_run(path) else sorted(filter(is_run, path.glob("*/")))
        if not inside:
            raise ConfigError("run", path, "a run directory, or one with runs in it (a sweep)")
        runs += inside
    if len(runs) < 2:
        raise ConfigError("run", " ".join(map(str, runs)), "two runs or more")
    return runs


def grouped(runs: Sequence[RunData]) -> list[RunGroup]:
    """The runs by settings, in their order."""
    settings = [settings_of(run) for run in runs]
    compared = [
        {key: value for key, value in one.items() if not key.startswith(NOT_COMPARED)}
        for one in settings
    ]
    keys = sorted({key for one in compared for key in one})
    differing = [key for key in keys if len({repr(one.get(key)) for one in compared}) > 1]
    by_settings: dict[str, list[int]] = {}
    for number, one in enumerate(compared):
        by_settings.setdefault(repr([one.get(key) for key in differing]), []).append(number)
    groups = []
    for numbers in by_settings.values():
        differs = {key: compared[numbers[0]].get(key) for key in differing}
        short = [f"{_short_key(key, differing)}={value}" for key, value in differs.items()]
        label = ", ".join(short[:3]) + (", ..." if len(short) > 3 else "")
        first = runs[numbers[0]]
        label += " (emulated)" * bool(label and first.status.get("emulated"))
        groups.append(RunGroup(label or first.name, tuple(runs[n] for n in numbers), differs))
    return groups


def settings_of(run: RunData) -> dict[str, Any]:
    """A run's settings by dotted key."""
    settings = yaml.safe_load(run.config) if run.config else {}
    return dict(_flat(settings if isinstance(settings, dict) else {}))


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of the `values`, and its 95 % interval by Student's t."""
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return Estimate(mean)
    from scipy.stats import t  # a second, which one run a group need not pay

    half = float(t.ppf(0.975, n - 1)) * statistics.stdev(values) / sqrt(n)
    return Estimate(mean, mean - half, mean + half)


def metrics_of(groups: Sequence[RunGroup]) -> list[str]:
    """The metrics of the table: those that every run of some group has."""
    evaluations = dict.fromkeys(
        name
        for group in groups
        for run in group.runs
        for name in run.metric_names
        if name.startswith("eval/") and "@" in name.rpartition("/")[2]
    )
    return [
        name
        for name in (*_SHOWN, *evaluations)
        if name != "eval/main/avg@1" and any(group.last(name) for group in groups)
    ]


def record(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """The last metrics of each group as plain numbers: mean, and bounds where it has seeds."""
    names = metrics_of(groups)
    return [
        {
            "group": group.label,
            "runs": [run.directory for run in group.runs],
            "metrics": {name: asdict(last) for name in names if (last := group.last(name))},
        }
        for group in groups
    ]


def table(groups: Sequence[RunGroup]) -> list[list[str]]:
    """A header and a row for each group: runs, steps, duration, and the last metrics."""
    metrics = metrics_of(groups)
    header = ["group", "runs", "steps", "seconds", *metrics]
    rows = []
    for group in groups:
        seconds = [run.seconds for run in group.runs]
        known = [s for s in seconds if s is not None]
        rows.append(
            [
                group.label,
                str(len(group.runs)),
                str(max((key.x for run in group.runs for key in run.metrics), default=0)),
                str(estimate(known)) if known else "",
                *(str(group.last(metric) or "") for metric in metrics),
            ]
        )
    return [header, *rows]


def render(groups: Sequence[RunGroup], out: Path) -> Path:
    """Write the page, which needs nothing but itself, and return its path."""
    html = fill_page("comparison", script("charts.js", "compare.js"), gather(groups))
    write_atomic(out, html)
    return out


def gather(groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Everything that the page shows, as JSON."""
    names = dict.fromkeys(n for group in groups for run in group.runs for n in run.metric_names)
    curves = {name: [group.curve(name) for group in groups] for name in names}
    curves = {name: of_groups for name, of_groups in curves.items() if any(of_groups)}
    first = [name for name in _SHOWN if name in curves]
    keys = list(dict.fromkeys(key for group in groups for key in group.differs))
    return {
        "groups": [
            {"label": group.label, "runs": [run.directory for run in group.runs]}
            for group in groups
        ],
        "table": table(groups),
        "settings": [[key, *(str(group.differs.get(key)) for group in groups)] for key in keys],
        "curves": [
            {"name": name, "shown": name in first, "groups": curves[name]}
            for name in (*first, *(n for n in curves if n not in first and n[-4:] != "/low"))
            if not name.endswith("/high")
        ],
        "samples": samples_beside(groups),
        "made": time.strftime("%Y-%m-%d %H:%M"),
    }


def samples_beside(groups: Sequence[RunGroup]) -> list[dict[str, Any]]:
    """Prompts that every group has evaluated, with the last response of each group's first run."""
    responses: list[dict[tuple[str, str], dict[str, Any]]] = []
    for group in groups:
        last: dict[tuple[str, str], dict[str, Any]] = {}
        for row in group.runs[0].samples:
            if row.get("phase") == "evaluation" and row.get("prompt") is not None:
                last[str(row.get("set", "")), str(row.get("prompt"))] = row
        responses.append(last)
    shared = [key for key in responses[0] if all(key in of_group for of_group in responses)]
    return [
        {
            "set": key[0],
            "prompt": key[1],
            "responses": [
                {name: of_group[key].get(name) for name in ("response", "reward", "step")}
                for of_group in responses
            ],
        }
        for key in shared[:_MAX_PROMPTS]
    ]


def _last(run: RunData, metric: str) -> float | None:
    values = [value for _, value in run.series(metric) if value is not None]
    return values[-1] if values else None


def _points(run: RunData, metric: str) -> dict[int, dict[str, float]]:
    """A metric by step on the run's axis, with the tokens and seconds until then."""
    start = run.started or 0.0
    tokens, passed = 0.0, dict[StepKey, float]()
    for key, row in run.metrics.items():
        count = row.get("samples/tokens")
        tokens += count if isinstance(count, int | float) else 0.0
        passed[key] = tokens
    return {
        key.x: {
            "y": value,
            "tokens": passed[key],
            "seconds": float(run.metrics[key].get("time", start)) - start,
        }
        for key, value in run.series(metric)
        if value is not None
    }


def _flat(settings: Mapping[str, Any], path: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat += _flat(value, f"{path}{key}.")
        else:
            flat.append((f"{path}{key}", value))
    return flat


def _short_key(key: str, keys: Sequence[str]) -> str:
    """The last name of a key, or all of it where another one ends alike."""
    name = key.rpartition(".")[2]
    return name if sum(other.rpartition(".")[2] == name for other in keys) == 1 else key
