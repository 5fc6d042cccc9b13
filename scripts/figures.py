"""Keep a bench's figures, and bring docs/benchmarks.md up to date with those that are kept.

    python scripts/figures.py NAME SCRIPT [OPTION...]

The command runs the script, whose lines of JSON become `docs/figures/NAME.json`, with machine,
commit, command and date; `make bench-NAME` calls it. What was kept under that name is replaced, so
a try with small options shows in `git diff`. Without arguments the page is written anew.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_figures import written_between

from hybridrl.system.node_info import read_node_info

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "docs" / "benchmarks.md"
_KINDS = (  # heading of the table, what stands behind a value, the records' `emulated`
    ("figure", "", None),
    ("emulated figure", " (emulated)", True),
    ("predicted figure", " (predicted)", False),
)
_NOT_ON_THE_PAGE = ("async_", "learning_", "plan_step_train_", "plan_step_split_")
"""How names of figures begin that docs/async.md shows, or the files alone."""
BEGIN, END = "<!-- figures: scripts/figures.py writes this -->", "<!-- end of figures -->"


def run(script: str, options: Sequence[str]) -> list[dict[str, Any]]:
    """Run a bench, show what it prints, and return its records; exits where it fails."""
    command = [sys.executable, script, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        lines = []
        for line in bench.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if bench.returncode:
        sys.exit(bench.returncode)
    return [json.loads(line) for line in lines if line.startswith("{")]


def kept(figures: list[dict[str, Any]], command: str) -> dict[str, Any]:
    """Return what is kept of a bench: its records, and what is needed to measure them again."""
    return {
        "command": command,
        "machine": machine(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "figures": figures,
    }


def machine() -> str:
    """Return the machine in words."""
    node = read_node_info()
    gpus = ", ".join(gpu.name for gpu in node.gpus) or "no GPU"
    return (
        f"{node.cpus} CPUs ({node.cpu}), {node.memory / 1e9:.0f} GB, {gpus},"
        f" torch {node.packages['torch']}"
    )


def commit() -> str:
    """Return the tree's commit, with a mark where files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty=+changes", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def tables(folder: Path) -> str:
    """Return the kept benches by machine, and tables of their figures, for docs/benchmarks.md.

    What was measured, what is emulated, and what is predicted have tables apart from each other.
    """
    benches = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    by_machine: dict[str, list[str]] = {}
    for bench in benches:
        named = f"`{bench['command']}` ({bench['date']})"
        by_machine.setdefault(bench["machine"], []).append(named)
    lines = [f"- {machine}: {', '.join(named)}" for machine, named in by_machine.items()]
    records = [
        record
        for bench in benches
        for record in bench["figures"]
        if not record["name"].startswith(_NOT_ON_THE_PAGE)
    ]
    for heading, mark, emulated in _KINDS:
        own = [record for record in records if record.get("emulated") is emulated]
        lines += _table(heading, [_cells(record, mark) for record in own if _is_figure(record)])
    return "\n".join(lines)


def _table(heading: str, rows: list[list[str]]) -> list[str]:
    """Return the lines of a table of figures; none without any. A column without cells is left out.

    The first cell of a row is the figure's name.
    """
    if not rows:
        return []
    header = [heading, "ours", "over the baseline"]
    filled = [column for column in range(len(header)) if any(row[column] for row in rows)]
    head, *body = (f"| {' | '.join(row[column] for column in filled)} |" for row in (header, *rows))
    return ["", head, f"|{'---|' * len(filled)}", *body]


def _is_figure(record: dict[str, Any]) -> bool:
    """Whether a record has a value or a ratio; others describe the run."""
    return record.get("value") is not None or record.get("ratio") is not None


def _cells(record: dict[str, Any], mark: str) -> list[str]:
    """Return the cells of a figure: its name, its value with the `mark` and its bound, its ratio.

    A bound is in the value's unit, in seconds, or of the ratio; a prediction's is the datasheet's.
    """
    unit = f" {record.get('unit', '')}"
    bounds = {"bound": unit, "datasheet": unit, "bound_s": " s", "ratio_bound": " of the baseline"}
    bound = "".join(_number(record.get(key), unit) for key, unit in bounds.items())
    reached = _number(record.get("of_bound"), " of the ")
    ours = [_number(record.get("value"), unit + mark), bound and f"{reached}bound {bound}"]
    return [f"`{record['name']}`", ", ".join(filter(None, ours)), _number(record.get("ratio"))]


def _number(value: float | None, behind: str = "") -> str:
    if value is None:
        return ""
    return (f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}") + behind


def write_page() -> None:
    """Write the tables into the page."""
    page = PAGE.read_text()
    PAGE.write_text(written_between(page, BEGIN, END, tables(FIGURES)))


def main() -> None:
    """Run and keep a bench, if one is named, and write the page."""
    if sys.argv[1:]:
        name, script, *options = sys.argv[1:]
        target = "make bench" if name == "bench" else f"make bench-{name}"
        command = f"{target} ARGS={shlex.quote(shlex.join(options))}" if options else target
        content = kept(run(script, options), command)
        FIGURES.mkdir(exist_ok=True)
        (FIGURES / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    write_page()


if __name__ == "__main__":
    main()
