"""All loggers of a run."""

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridrl.config.run import LoggerName
from hybridrl.telemetry.environment import without_secrets
from hybridrl.telemetry.loggers.delivery import BackgroundDelivery, Delivery
from hybridrl.telemetry.loggers.interface import CLOSE_S, LoggedRun, RunLogger, with_phase
from hybridrl.telemetry.loggers.mlflow_logger import MlflowLogger
from hybridrl.telemetry.loggers.tensorboard_logger import TensorBoardLogger
from hybridrl.telemetry.loggers.trackio_logger import TrackioLogger
from hybridrl.telemetry.loggers.wandb_logger import WandbLogger
from hybridrl.telemetry.records import with_lost_texts

LOGGERS: dict[LoggerName, type[RunLogger]] = {
    LoggerName.tensorboard: TensorBoardLogger,
    LoggerName.wandb: WandbLogger,
    LoggerName.mlflow: MlflowLogger,
    LoggerName.trackio: TrackioLogger,
}
_MOST_CHARACTERS = 4000  # of a text in a table; samples.jsonl has all


class RunLoggers:
    """Passes a run's records on to every logger, from the driver's thread."""

    def __init__(self, names: Sequence[LoggerName], run: LoggedRun) -> None:
        self._deliveries: dict[str, Delivery] = {}
        self._told: set[str] = set()
        for name in names:
            logger = LOGGERS[name]()
            self._deliveries[name.value] = (
                Delivery(logger, run)
                if name is LoggerName.tensorboard
                else BackgroundDelivery(name.value, logger, run)
            )

    def log(self, step: int, phase: str, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step as `phase/name`."""
        for delivery in self._deliveries.values():
            delivery.log(step, with_phase(phase, metrics))

    def samples(self, step: int, phase: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Send samples as the table `samples/phase`."""
        if not records:
            return
        names = list(dict.fromkeys(name for record in records for name in record))
        shown = [with_lost_texts(record) for record in records]
        rows = [{name: _cell(record.get(name)) for name in names} for record in shown]
        for delivery in self._deliveries.values():
            delivery.samples(step, f"samples/{phase}", rows)

    @contextmanager
    def files_closed(self) -> Iterator[None]:
        """Within, no logger has a record of the run open, since these are cut; services go on."""
        local = [d for d in self._deliveries.values() if not isinstance(d, BackgroundDelivery)]
        for delivery in local:
            delivery.close("running")
        try:
            yield
        finally:
            for delivery in local:
                delivery.open()

    def close(self, state: str) -> None:
        """End all, which takes `CLOSE_S` at most."""
        until = time.monotonic() + CLOSE_S
        for delivery in self._deliveries.values():
            delivery.close(state)
        for delivery in self._deliveries.values():
            delivery.wait(until - time.monotonic())

    def new_failures(self) -> Iterator[str]:
        """A line for each logger that has been left out since the last call."""
        for name, delivery in self._deliveries.items():
            if delivery.failure and name not in self._told:
                self._told.add(name)
                yield f"telemetry.loggers: {name} is left out from here on: {delivery.failure}"


def logged_run(run_dir: Path, project: str, settings: Mapping[str, Any]) -> LoggedRun:
    """A run as services may know it: its settings without secrets."""
    shown = {key: _shown(value) for key, value in settings.items()}
    return LoggedRun(run_dir=run_dir, project=project, settings=shown)


def forget_runs(run_dir: Path) -> None:
    """Let the services have a new run from here on: this one has gone back to an earlier step."""
    shutil.rmtree(run_dir / "loggers", ignore_errors=True)


def _shown(value: Any) -> Any:
    return without_secrets(value) if isinstance(value, str) else value


def _cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    left = len(value) - _MOST_CHARACTERS
    return value if left <= 0 else f"{value[:_MOST_CHARACTERS]} [{left:,} more characters]"
