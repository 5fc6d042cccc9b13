"""The ways to a logger: in the caller's thread, or in a separate thread.

Each keeps what the logger raises as `failure`, and leaves the logger out from then on.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from hybridrl.telemetry.environment import without_secrets
from hybridrl.telemetry.loggers.interface import LoggedRun, RunLogger, with_phase
from hybridrl.telemetry.records import parse, read_lines, write_json

_MOST_WAITING = 256  # calls, two a step; with eight samples of 16 kB each, 30 MB
_MOST_CHARACTERS = 300  # of a failure


class Delivery:
    """Calls a logger of local files in the caller's thread: a checkpoint notes their sizes.

    The calls are those of `RunLogger`. None of them raises or takes long.
    """

    def __init__(self, logger: RunLogger, run: LoggedRun) -> None:
        self.failure = ""
        """Why the logger is left out; empty while it is not."""
        self._logger, self._run = logger, run
        self.open()

    def open(self) -> None:
        """Begin, or go on, with the run at the service."""
        self._do(partial(self._logger.start, self._run, None))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._do(partial(self._log, step, metrics))

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send samples of a step as a table."""
        self._do(partial(self._samples, step, name, rows))

    def close(self, state: str) -> None:
        """Begin to end the run at the service."""
        self._do(partial(self._close, state))

    def wait(self, seconds: float) -> None:
        """Wait until the logger has ended, or has failed to within so many seconds."""

    def _do(self, call: Callable[[], object]) -> None:
        if not self.failure:
            try:
                call()
            except Exception as error:
                self.failure = _line(error)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logger.log(step, metrics)

    def _samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self._logger.samples(step, name, rows)

    def _close(self, state: str) -> None:
        self._logger.close(state)


class BackgroundDelivery(Delivery):
    """Calls a logger in a separate thread: a server that does not answer holds up no step.

    The libraries' own asynchrony differs, and none covers start and end, where most time goes. The
    queue is bounded: a logger that is too far behind is left out. RUN/loggers/NAME.json has the
    run's id at the service and, for each metric, the last step that the library has stored. Calls
    of earlier steps are skipped, so a resumed run sends no step twice. What an earlier process
    has not sent is sent first: it waited when the run was killed, or the logger had failed.
    """

    def __init__(self, name: str, logger: RunLogger, run: LoggedRun) -> None:
        self._file = run.run_dir / "loggers" / f"{name}.json"
        self._metrics = run.run_dir / "metrics.jsonl"
        # Bytes of earlier processes' lines; this process's metrics come by `log`.
        self._recorded = self._metrics.stat().st_size if self._metrics.is_file() else 0
        self._calls: queue.Queue[Callable[[], object]] = queue.Queue(_MOST_WAITING)
        self._id: str | None = None
        self._sent: dict[str, int] = {}
        self._taken: dict[str, int] = {}  # taken, but not stored: see `keeps_last_step`
        self._closed = False
        self._thread = threading.Thread(target=self._deliver, name=f"logger-{name}", daemon=True)
        super().__init__(logger, run)

    # -- in the caller's thread ----------------------------------------------------------------

    def open(self) -> None:
        self._thread.start()

    def wait(self, seconds: float) -> None:
        if not self.failure:
            self._thread.join(max(0.0, seconds))
        if self._thread.is_alive() and not self.failure:
            self.failure = f"it has not ended in time, {self._calls.qsize()} calls wait"

    def _do(self, call: Callable[[], object]) -> None:
        if not self.failure:
            try:
                self._calls.put_nowait(call)
            except queue.Full:
                self.failure = f"it is {_MOST_WAITING} calls behind"

    # -- in the logger's thread ----------------------------------------------------------------

    def _deliver(self) -> None:
        try:
            self._start()
            while not self.failure and not self._closed:
                self._calls.get()()
        except Exception as error:
            self.failure = self.failure or _line(error)

    def _start(self) -> None:
        record = parse(self._file.read_text("utf-8")) if self._file.is_file() else None
        if isinstance(record, dict):
            self._id, self._sent = record["id"], record["sent"]
        self._id = self._logger.start(self._run, self._id)
        if (last := self._logger.last_step) is not None:
            self._sent = {name: min(step, last) for name, step in self._sent.items()}
        self._file.parent.mkdir(exist_ok=True)
        self._write()
        for row in read_lines(self._metrics, self._recorded):
            step, phase = row.pop("step"), row.pop("phase")
            del row["time"]
            metrics = {name: float(value) for name, value in row.items()}
            self._log(step, with_phase(phase, metrics))

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        new = {name: metrics[name] for name in self._unsent(step, metrics)}
        if new:
            self._logger.log(step, new)
            self._note(dict.fromkeys(new, step))

    def _samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._unsent(step, [name]):
            self._logger.samples(step, name, rows)
            self._note({name: step})

    def _close(self, state: str) -> None:
        self._logger.close(state)
        self._sent |= self._taken
        self._write()
        self._closed = True

    def _unsent(self, step: int, names: Iterable[str]) -> list[str]:
        had = self._sent | self._taken
        return [name for name in names if step > had.get(name, -1)]

    def _note(self, taken: dict[str, int]) -> None:
        """Metrics of one step have been taken."""
        if not self._logger.keeps_last_step:
            self._sent |= taken
        elif max(self._taken.values(), default=-1) < max(taken.values()):
            self._sent |= self._taken
            self._taken = taken
        else:
            self._taken |= taken
            return
        self._write()

    def _write(self) -> None:
        write_json(self._file, {"id": self._id, "sent": self._sent})


def _line(error: Exception) -> str:
    """An error as one short line, without secrets."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return without_secrets(text)[:_MOST_CHARACTERS]
