"""Keep a measured report, and bring docs/gpu.md up to date with those that are kept.

    python scripts/gpu_figures.py [REPORT.json | first_run.json]

A report of `gpu_report.py`, wherever it was measured, becomes `docs/figures/gpu/CARD-DATE.json`;
another one of that card and day `CARD-DATE-2.json`. With `first_run.json`, which `gpu_first_run.sh`
writes beside its report, the steps of its trainings are kept with the report. Without an argument
the page is written anew. Figures of a CPU are refused.
"""

import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_first_run import PARTS, SHOWN
from gpu_steps import ROOT
from gpu_steps.estimates import compared
from gpu_steps.figures import replace_file
from gpu_steps.report_shape import MEASURED, are_steps
from gpu_steps.steps import STEPS
from gpu_steps.table import number_text, range_text

from hybridrl.config import ConfigError

FIGURES = ROOT / "docs" / "figures" / "gpu"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- measured: scripts/gpu_figures.py writes this -->", "<!-- end of measured -->"
_HEAD = ("device", "model", "machine", "commit", "measured")
_TRAININGS = PARTS[1:]


def keep(file: Path, folder: Path) -> Path:
    """Keep a GPU's report in `folder` under its card and date; raises ConfigError for another.

    A file that is there stays: another report of that card and day gets a number.
    """
    content, trainings = _read(file), {}
    if isinstance(content, dict) and content.keys() == {*PARTS}:
        trainings = {name: content[name] for name in _TRAININGS}
        if not all(map(_is_training, trainings.values())):
            raise ConfigError("REPORT", file, "the first_run.json of gpu_first_run.sh")
        file = file.with_name("report.json")
        content = _read(file)
    report = _checked(content, file)
    if trainings:
        report |= {"trainings": trainings}
    card = re.sub(r"[^a-z0-9]+", "-", report["machine"]["gpus"][0]["name"].lower()).strip("-")
    date = time.strftime("%Y%m%d", time.strptime(report["measured"], MEASURED))
    text = json.dumps(report, indent=1) + "\n"
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    paths = (folder / f"{card}-{date}{number}.json" for number in numbers)
    kept = next(path for path in paths if not path.exists() or path.read_text() == text)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(kept, text)
    return kept


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        allowed = f"the JSON of gpu_report.py, or first_run.json beside its report.json ({error})"
        raise ConfigError("REPORT", file, allowed) from None


def _checked(report: Any, file: Path) -> dict[str, Any]:
    """The report, which is one of this source tree and of a GPU."""
    if not (isinstance(report, dict) and {*_HEAD} <= {*report} and are_steps(report.get("steps"))):
        raise ConfigError("REPORT", file, "the JSON of gpu_report.py, of this source tree")
    try:
        time.strptime(report["measured"], MEASURED)
    except (TypeError, ValueError):
        allowed = f"a report whose `measured` has the form {MEASURED}"
        raise ConfigError("REPORT", file, allowed) from None
    devices = {report["device"], *(step["device"] for step in report["steps"].values())}
    if devices != {"cuda"} or not report["machine"]["gpus"]:
        raise ConfigError("REPORT", file, "figures of a GPU alone; it has those of a CPU")
    return report


def _is_training(outcome: Any) -> bool:
    """Whether it is a training's outcome, with all that the table reads."""
    if not (isinstance(outcome, dict) and isinstance(outcome.get("state"), str)):
        return False
    steps = outcome.get("steps", [])
    return isinstance(steps, list) and all(isinstance(step, dict) for step in steps)


def section(folder: Path) -> str:
    """Return the tables of all kept reports, for docs/gpu.md."""
    files = sorted(folder.glob("*.json"))
    if not files:
        return "No GPU has been measured yet."
    reports = [(file, json.loads(file.read_text())) for file in files]
    tables = [[*_report(file, report), *_trainings(report)] for file, report in reports]
    return "\n\n".join(map("\n".join, tables))


def _report(file: Path, report: dict[str, Any]) -> Iterator[str]:
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    names = [gpu["name"] for gpu in machine["gpus"]]
    yield (
        f"`docs/figures/gpu/{file.name}`: {len(names)} x {names[0]}, CUDA {machine['cuda']},"
        f" {versions}, model {report['model']}, commit {report['commit']},"
        f" measured {report['measured']}."
    )
    yield ""
    yield "| step | figure | measured | estimated | what follows |"
    yield "|---|---|---|---|---|"
    estimates = {(x["step"], x["figure"]): x for x in compared(report)}
    for name in STEPS:
        step = report["steps"].get(name)
        if step is None:
            continue
        for figure in step["figures"]:
            if "value" in figure:
                yield _row(name, figure, estimates.get((name, figure["name"])))
        if step["status"] != "done":
            yield f"| `{name}` | | {step['status']} | | {step['reason'].replace('|', '/')} |"


def _trainings(report: dict[str, Any]) -> Iterator[str]:
    """Each step of the trainings of a first run, and why one of them has ended early."""
    if "trainings" not in report:
        return
    yield ""
    yield f"| training | {' | '.join(SHOWN)} |"
    yield "|---" * (1 + len(SHOWN)) + "|"
    for name, outcome in report["trainings"].items():
        for step in outcome.get("steps", ()):
            cells = (number_text(step[key]) if key in step else "" for key in SHOWN)
            yield f"| `{name}` | {' | '.join(cells)} |"
    for name, outcome in report["trainings"].items():
        if outcome["state"] != "done":
            reason = f": {outcome['reason']}" if "reason" in outcome else ""
            yield ""
            yield f"`{name}`: {outcome['state']}{reason}."


def _row(step: str, figure: dict[str, Any], estimate: dict[str, Any] | None) -> str:
    measured = f"{number_text(figure['value'])} {figure['unit']}".strip()
    estimated = "" if estimate is None else range_text(estimate["estimate"])
    follows = "" if estimate is None else estimate["follows"]
    return f"| `{step}` | `{figure['name']}` | {measured} | {estimated} | {follows} |"


def written(page: str, tables: str) -> str:
    """Return the page with `tables` between its two marks."""
    return written_between(page, BEGIN, END, tables)


def written_between(page: str, begin: str, end: str, text: str) -> str:
    """Return the page with `text` between the marks `begin` and `end`."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    assert after, f"the page has no {begin} and {end}"
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main() -> None:
    """Keep the report, if one is named, and write the page."""
    try:
        for argument in sys.argv[1:]:
            print(keep(Path(argument), FIGURES))
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    replace_file(PAGE, written(PAGE.read_text(), section(FIGURES)))


if __name__ == "__main__":
    main()
