"""One self-contained page about a run: no server, no network, nothing but the file itself.

The data is gathered here and embedded as JSON; `page/*.js` draws it at the width of the screen.
"""

import string
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.telemetry.advice import advise
from hybridrl.telemetry.environment import essentials
from hybridrl.telemetry.figures import charts, headline, lengths, memory, phases, tiles
from hybridrl.telemetry.records import dump, write_atomic
from hybridrl.telemetry.rundata import RunData, load
from hybridrl.telemetry.tables import events, samples, switches, timelines

_RECORDS = ("run.json", "metrics.jsonl", "events.jsonl", "trace.json")


def render(run_dir: Path, run: RunData | None = None) -> Path:
    """Write `report.html` into a run directory, whose contents are `run`, and return its path.

    Missing, empty or truncated files are left out of the page. To show the final state, render
    after the run's `Telemetry` has closed. Raises `ConfigError` if the directory holds no run.
    """
    run_dir = Path(run_dir)
    if not is_run(run_dir):
        raise ConfigError("run", run_dir, "a run directory (one that holds run.json)")
    report, run = run_dir / "report.html", run or load(run_dir)
    write_atomic(
        report, fill_page(run.name, script("charts.js", "page.js") + "render();\n", gather(run))
    )
    return report


def fill_page(name: str, program: str, data: Mapping[str, Any]) -> str:
    """The page whose `program`, in JavaScript, draws `data`; it needs nothing but itself."""
    return string.Template(_page_file("page.html")).substitute(
        title=_escape(f"{name} · hybridrl"),
        style=_page_file("page.css"),
        script=program,
        # `<` never appears in the embedded JSON, so no text of a model can end the script element.
        data=dump(data).replace("<", "\\u003c"),
    )


def script(*names: str) -> str:
    """Scripts of the page, in this order."""
    return "".join(map(_page_file, names))


def is_run(directory: Path) -> bool:
    """Whether a directory holds the records of a run."""
    return any((directory / name).is_file() for name in _RECORDS)


def gather(run: RunData) -> dict[str, Any]:
    """Everything that the page shows, as JSON."""
    known = phases(run)
    shown, note = samples(run)
    return {
        "name": run.name,
        "directory": run.directory,
        "state": run.state,
        "reason": run.status.get("reason") or "",
        "started": _clock(run.started),
        "duration": run.seconds,
        "headline": headline(run),
        "tiles": tiles(run),
        "advice": [[advice.text, advice.key] for advice in advise(run)],
        "phases": known,
        "charts": charts(run),
        "timelines": timelines(run),
        "predicted": predicted(run),
        "memory": memory(run),
        "lengths": lengths(run),
        "switches": switches(run),
        "samples": shown,
        "samples_note": note,
        "events": events(run),
        "config": run.config,
        "environment": [list(row) for row in essentials(run.environment)],
        "made": _clock(time.time()),
    }


def predicted(run: RunData) -> dict[str, Any] | None:
    """Seconds of each kind of work by its counted operations, beside what the run has measured.

    None for a run that has not learned its scales: of a few calls, say.
    """
    rows = [
        [kind, calls, counted, measured, measured / counted]
        for kind, calls, counted, measured in run.kinds
        if counted
    ]
    columns = ["work", "calls", "predicted_s", "measured_s", "measured_over_predicted"]
    return {"columns": columns, "rows": rows} if rows else None


def _page_file(name: str) -> str:
    return (files("hybridrl.telemetry") / "page" / name).read_text("utf-8")


def _clock(when: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when)) if when else ""


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
