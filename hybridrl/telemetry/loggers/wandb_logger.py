"""Weights & Biases, whose own variables apply: WANDB_MODE, WANDB_ENTITY, WANDB_BASE_URL, ..."""

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.telemetry.loggers.interface import CLOSE_S, LoggedRun, RunLogger

_STEP = "step"
_ROWS = 100  # numbers of wandb's rows for each step: those of late metrics lie between steps
_FLUSH_S = 1.0  # by itself wandb writes RUN/wandb every 15 s, and a kill loses what waits


class WandbLogger(RunLogger):
    """A run of wandb; its files are in RUN/wandb.

    With WANDB_MODE=offline every process of a run writes a folder there, all with the run's id.

    Every row has its step, the axis of all charts. wandb's own numbers of rows must grow, and calls
    of one number make one row. So metrics of a step that is past have a row to themselves.
    """

    keeps_last_step = True

    def start(self, run: LoggedRun, run_id: str | None) -> str:
        """Raises RuntimeError without an API key: wandb would ask for one."""
        import wandb

        online = wandb.setup().settings.mode == "online"
        if online and not wandb.login(prompt=False):
            raise RuntimeError("no API key; wandb login stores one, WANDB_MODE=offline needs none")
        self._table = wandb.Table
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run_id,
            resume="allow" if online else None,  # offline it cannot look, and says so
            dir=run.run_dir,
            config=dict(run.settings),
            allow_val_change=run_id is not None,  # a resumed run may have more steps, say
            settings=wandb.Settings(
                console="off",  # the terminal stays with the run
                finish_timeout=CLOSE_S,  # an end without a connection is not waited for
                x_transaction_log_flush_interval=_FLUSH_S,
            ),
        )
        self._run.define_metric("*", step_metric=_STEP)
        if online and run_id is not None:  # it sends in batches: a killed process has lost some
            self.last_step = (self._run.step - 1) // _ROWS
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._log(step, metrics)

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        data = [list(row.values()) for row in rows]
        table = self._table(columns=list(rows[0]), data=data, allow_mixed_types=True)
        self._log(step, {name: table})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        row, last = step * _ROWS, int(self._run.step)
        self._run.log({**values, _STEP: step}, step=row if row >= last else last + 1)

    def close(self, state: str) -> None:
        self._run.finish(exit_code=int(state != "finished"))
