"""The judgements that have failed in a run's whole steps: `RUN/judges/failures.jsonl`.

Where such a step is made again, by the resumed run or a replay, they fail again. So its batch stays
the same, though the judge may answer by then.
"""

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.driver.judges import FOLDER
from hybridrl.flow.executor import Computed, Event
from hybridrl.flow.judgements import OK
from hybridrl.flow.sample import Sample
from hybridrl.telemetry.records import read_lines

FILE = "failures.jsonl"
STATUS = "_status"


class JudgeFailures:
    """Statuses by sample id and field, of judgements that have failed."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / FOLDER / FILE
        self._known: dict[str, dict[str, str]] = {}

    def resume(self, last_step: int | None) -> None:
        """Have those of the run's own record fail; later ones than of `last_step` are deleted."""
        lines = read_lines(self.path)
        stand = [line for line in lines if last_step is None or line["step"] <= last_step]
        if len(stand) < len(lines):
            self.path.write_text("".join(json.dumps(line) + "\n" for line in stand))
        self._take(stand)

    def follow(self, run_dir: Path) -> None:
        """Have the judgements fail that have failed in another run."""
        self._take(read_lines(run_dir / FOLDER / FILE))

    def _take(self, lines: Iterable[dict[str, Any]]) -> None:
        for line in lines:
            self._known[line["id"]] = line["failed"]

    def followed(self, event: Event) -> Event:
        """The event; of judgements that are known to have failed with what they failed with."""
        if not isinstance(event, Computed) or self._known.keys().isdisjoint(map(str, event.ids)):
            return event
        scalars = {name: list(values) for name, values in event.scalars.items()}
        for place, id in enumerate(event.ids):
            for status, text in self._known.get(str(id), {}).items():
                if status in scalars:
                    scalars[status][place] = text
                    scalars[status.removesuffix(STATUS)][place] = 0.0
        return replace(event, scalars={name: tuple(values) for name, values in scalars.items()})

    def record(self, step: int, samples: Iterable[Sample]) -> None:
        """Record what has failed in a whole step, whose `samples` these are."""
        lines = []
        for sample in samples:
            failed = {
                name: value
                for name, value in sample.scalars.items()
                if name.endswith(STATUS) and value != OK
            }
            if failed and self._known.get(str(sample.id)) != failed:
                lines.append({"step": step, "id": str(sample.id), "failed": failed})
        if lines:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            self._take(lines)
