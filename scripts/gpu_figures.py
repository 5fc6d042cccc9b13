"""Keep a measured report, and bring docs/gpu.md up to date with those that are kept.

    python scripts/gpu_figures.py [REPORT.json]

A report of `gpu_report.py`, wherever it was measured, becomes `docs/figures/gpu/CARD-DATE.json`.
Without one the pages are written anew. Figures of a CPU are refused.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_steps import ROOT
from gpu_steps.estimates import compared
from gpu_steps.figures import replace_file
from gpu_steps.report_shape import are_steps
from gpu_steps.steps import STEPS
from gpu_steps.table import number_text, range_text

from hybridrl.config import ConfigError

FIGURES = ROOT / "docs" / "figures" / "gpu"
PAGE = ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- measured: scripts/gpu_figures.py writes this -->", "<!-- end of measured -->"
_HEAD = ("device", "model", "machine", "commit")


def keep(file: Path, folder: Path) -> Path:
    """Copy a GPU's report into `folder` under its card and date; raises ConfigError for another."""
    try:
        report: Any = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("REPORT", file, f"the JSON of gpu_report.py ({error})") from None
    if not (isinstance(report, dict) and {*_HEAD} <= {*report} and are_steps(report.get("steps"))):
        raise ConfigError("REPORT", file, "the JSON of gpu_report.py, of this source tree")
    devices = {report["device"], *(step["device"] for step in report["steps"].values())}
    if devices != {"cuda"} or not report["machine"]["gpus"]:
        raise ConfigError("REPORT", file, "figures of a GPU alone; it has those of a CPU")
    card = re.sub(r"[^a-z0-9]+", "-", report["machine"]["gpus"][0]["name"].lower()).strip("-")
    date = time.strftime("%Y%m%d", time.gmtime(file.stat().st_mtime))
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{card}-{date}.json"
    replace_file(kept, json.dumps(report, indent=1) + "\n")
    return kept


def section(folder: Path) -> str:
    """Return the tables of all kept reports, for docs/gpu.md."""
    files = sorted(folder.glob("*.json"))
    if not files:
        return "No GPU has been measured yet."
    return "\n\n".join("\n".join(_report(file)) for file in files)


def _report(file: Path) -> Iterator[str]:
    report = json.loads(file.read_text())
    machine = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    names = [gpu["name"] for gpu in machine["gpus"]]
    yield (
        f"`docs/figures/gpu/{file.name}`: {len(names)} x {names[0]}, CUDA {machine['cuda']},"
        f" {versions}, model {report['model']}, commit {report['commit']}."
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


def _row(step: str, figure: dict[str, Any], estimate: dict[str, Any] | None) -> str:
    measured = f"{number_text(figure['value'])} {figure['unit']}".strip()
    estimated = "" if estimate is None else range_text(estimate["estimate"])
    follows = "" if estimate is None else estimate["follows"]
    return f"| `{step}` | `{figure['name']}` | {measured} | {estimated} | {follows} |"


def written(page: str, tables: str) -> str:
    """Return the page with `tables` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"docs/gpu.md has no {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


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
