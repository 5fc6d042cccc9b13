"""Trackio, whose own variables apply: TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, ..."""

import sys
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from hybridrl.telemetry.loggers.interface import LoggedRun, RunLogger


class TrackioLogger(RunLogger):
    """A run of Trackio, found again by its name, which therefore ends in random characters.

    Trackio writes twice a second from a separate thread; a killed driver loses what waits there.
    """

    def start(self, run: LoggedRun, run_id: str | None) -> str:
        """The id is the name."""
        import trackio

        _keep_standard_output_clean()
        name = run_id or f"{run.name}-{uuid.uuid4().hex[:8]}"
        self._table = trackio.Table
        self._run = trackio.init(
            project=run.project,
            name=name,
            resume="allow",
            config=dict(run.settings),
            embed=False,
            auto_log_cpu=False,  # of the driver alone; the trace has what ranks hold
            auto_log_gpu=False,
        )
        return name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        data = [list(row.values()) for row in rows]
        self._run.log({name: self._table(columns=list(rows[0]), data=data)}, step=step)

    def close(self, state: str) -> None:
        """Trackio has no states."""
        self._run.finish()


def _keep_standard_output_clean() -> None:
    """Have Trackio print to standard error: standard output holds a command's result alone.

    To redirect standard output would take other threads' prints with it.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            vars(module)["print"] = partial(print, file=sys.stderr)
