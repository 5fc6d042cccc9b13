"""TensorBoard: event files in RUN/tensorboard, scalars and samples as text."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.telemetry.loggers.interface import LoggedRun, RunLogger


class TensorBoardLogger(RunLogger):
    """Its files are records of the run: each call flushes, and a resumed run cuts them back."""

    def start(self, run: LoggedRun, run_id: str | None) -> str:
        """A directory has no id."""
        # A third of a second, and a bare machine has no TensorBoard.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._scalar, self._text = Event, scalar_pb, text_pb
        self._values: dict[str, Any] = {}  # the message of each metric, which takes long to make
        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"))
        return ""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        event = self._event(wall_time=time.time(), step=step)
        for name, value in metrics.items():
            if name not in self._values:
                self._values[name] = self._scalar(name, value).value[0]
            self._values[name].tensor.float_val[0] = value
            event.summary.value.append(self._values[name])
        self._writer.add_event(event)
        self._writer.flush()

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """TensorBoard shows a matrix of texts as a table, each in Markdown."""
        table = [[f"**{key}**" for key in rows[0]]]
        table += [[_as_code(value) for value in row.values()] for row in rows]
        summary = self._text(name, table)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self, state: str) -> None:
        self._writer.close()


def _as_code(value: Any) -> str:
    """Indented by four spaces, Markdown leaves the lines of a text as they are."""
    return "    " + str(value).replace("\n", "\n    ") if isinstance(value, str) else f"{value}"
