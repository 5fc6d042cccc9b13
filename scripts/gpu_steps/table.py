"""The report as a table of plain text."""

from collections.abc import Iterator
from typing import Any

from gpu_steps.steps import STEPS

_CPU = "Figures marked cpu are of a CPU: they show that the steps run, and nothing about a GPU."


def table(report: dict[str, Any]) -> str:
    """A line a figure, in the order of the steps; what is missing has its reason."""
    rows = [("step", "figure", "value", "unit", "on", "with"), *_rows(report["steps"])]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [
        "  ".join([*map(str.ljust, row[:5], widths), row[5]]).rstrip()  # the last one is free
        for row in rows
    ]
    return "\n".join([*_head(report), "", *lines, ""])


def _head(report: dict[str, Any]) -> Iterator[str]:
    machine = report["machine"]
    names = [gpu["name"] for gpu in machine["gpus"]]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield f"{gpus or 'no GPU'}; {machine['cpus']} x {machine['cpu']}"
    yield f"{versions}; Python {machine['python']}, CUDA {machine['cuda'] or 'none'}"
    yield f"model {report['model']}, commit {report['commit']}, source {report['source']}"
    if report["device"] == "cpu":
        yield _CPU


def _rows(steps: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in STEPS:
        if name not in steps:
            yield name, "", "not run", "", "", ""
            continue
        step = steps[name]
        for figure in step["figures"]:
            yield _row(name, figure)
        if step["status"] != "done":
            yield name, "", step["status"], "", step["device"], step["reason"]


def _row(name: str, figure: dict[str, Any]) -> tuple[str, ...]:
    if "skipped" in figure:
        return name, figure["name"], "skipped", "", figure["device"], figure["skipped"]
    value = figure["value"]
    text = str(value)
    if isinstance(value, float):
        text = f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"
    about = ", ".join(f"{key} {_short(x)}" for key, x in figure["about"].items())
    return name, figure["name"], text, figure["unit"], figure["device"], about


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
