"""The report as a table of plain text."""

from collections.abc import Iterator
from typing import Any

from gpu_steps.estimates import NOTE, compared
from gpu_steps.steps import STEPS
from hybridrl.config.versions import untried

_CPU = "Figures marked cpu are of a CPU: they show that the steps run, and nothing about a GPU."


def table(report: dict[str, Any]) -> str:
    """A line a figure, in the order of the steps; what is missing has its reason.

    For the card that the estimates are of, these follow in a table of their own.
    """
    rows = [("step", "figure", "value", "unit", "on", "with"), *_rows(report["steps"])]
    lines = [*_head(report), "", *_aligned(rows), ""]
    if estimates := [*_estimates(report)]:
        lines += [NOTE, "", *_aligned(estimates), ""]
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Rows with columns of one width, the last one free."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    for row in rows:
        yield "  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip()


def _estimates(report: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for number, each in enumerate(compared(report)):
        if number == 0:
            yield "step", "figure", "estimated", "measured", "unit", "what follows"
        measured = "not measured" if each["measured"] is None else number_text(each["measured"])
        yield (
            each["step"], each["figure"], range_text(each["estimate"]), measured, each["unit"],
            each["follows"] or "",
        )  # fmt: skip


def range_text(bounds: list[float]) -> str:
    """A range of an estimate, which may be one number."""
    return "-".join(dict.fromkeys(map(number_text, map(float, bounds))))


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
    if machine["compiler"]:
        yield f"No C compiler, which Triton's kernels need: {machine['compiler']}"
    yield from untried(machine["versions"])


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
    text = number_text(figure["value"])
    about = ", ".join(f"{key} {_short(x)}" for key, x in figure["about"].items())
    return name, figure["name"], text, figure["unit"], figure["device"], about


def number_text(value: object) -> str:
    """A figure's value; counts and words as they are."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if value < 1e4 else f"{value:,.0f}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
