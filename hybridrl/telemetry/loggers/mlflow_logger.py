"""MLflow, whose own variables apply: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN, ..."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.telemetry.loggers.interface import LoggedRun, RunLogger

_PARAMS_PER_CALL = 100  # MLflow's limits
_PARAM_CHARACTERS = 6000
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MlflowLogger(RunLogger):
    """A run of MLflow, in the experiment of the project's name.

    It goes by the client, not by `mlflow.log_*`, whose present run belongs to the user's own code.
    Samples are one artifact a step: MLflow would read and write a table that grows as a whole.
    """

    def start(self, run: LoggedRun, run_id: str | None) -> str:
        """Raises MlflowException for a `run_id` that the store does not have."""
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, mlflow.MlflowClient()
        if run_id is None:
            experiment = mlflow.set_experiment(run.project)
            created = self._client.create_run(experiment.experiment_id, run_name=run.name)
            self._id = str(created.info.run_id)
            params = [Param(k, str(v)[:_PARAM_CHARACTERS]) for k, v in run.settings.items()]
            for start in range(0, len(params), _PARAMS_PER_CALL):
                self._client.log_batch(self._id, params=params[start : start + _PARAMS_PER_CALL])
        else:
            self._id = run_id  # its parameters stay: MLflow refuses another value
            self._client.update_run(run_id, status="RUNNING")
        return self._id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Characters that MLflow refuses in a name become underscores."""
        now = round(time.time() * 1000)
        batch = [
            self._metric(_NOT_IN_NAMES.sub("_", name), value, now, step)
            for name, value in metrics.items()
        ]
        self._client.log_batch(self._id, metrics=batch)

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        self._client.log_table(self._id, columns, f"{name}/step_{step:06d}.json")

    def close(self, state: str) -> None:
        self._client.set_terminated(self._id, _STATUS[state])
