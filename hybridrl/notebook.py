"""Runs from Python, in a notebook say: `hybridrl.train([...])`, with the command line's overrides.

result = hybridrl.train(["recipe=grpo", "trainer.steps=20"])
result.metrics["reward_mean"]
result.plot()
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from hybridrl.config import Config, ConfigError


@dataclass(frozen=True)
class Result:
    """A run that has ended: its directory, and what the command line prints as its last line."""

    run_dir: Path
    summary: dict[str, Any]

    @cached_property
    def metrics(self) -> Any:
        """A pandas table with a row for each step, in order, and a column for each metric."""
        import pandas as pd

        from hybridrl.telemetry.rundata import load

        rows = [
            {**row, "step": key.x, "phase": key.phase}
            for key, row in load(self.run_dir).metrics.items()
        ]
        return pd.DataFrame(rows).set_index("step")

    def plot(self, *names: str) -> Any:
        """Draw metrics over steps, each in separate axes; returns matplotlib's figure.

        Without names the held-out accuracy and the mean reward, as far as the run has them. Raises
        ConfigError for a name that it has not, or where matplotlib is missing.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError:
            raise ConfigError("plot", "", "matplotlib: pip install 'hybridrl[curves]'") from None
        table = self.metrics
        known = [n for n in ("eval_accuracy", "reward_mean", "loss") if n in table.columns]
        for name in names:
            if name not in table.columns:
                raise ConfigError("plot", name, sorted(table.columns))
        shown = names or known[:2]
        figure, axes = plt.subplots(1, len(shown), figsize=(5 * len(shown), 3), squeeze=False)
        for name, ax in zip(shown, axes[0], strict=True):
            values = table[name].dropna()
            ax.plot(values.index, values, marker="o" if len(values) < 30 else "")
            ax.set(title=name.replace("_", " "), xlabel="step")
        figure.tight_layout()
        return figure

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        return f"<pre>{json.dumps({'run_dir': str(self.run_dir), **self.summary}, indent=2)}</pre>"


def train(overrides: Sequence[str] = ()) -> Result:
    """Run `hybridrl train` with these overrides in this process.

    Raises `ConfigError` for settings that cannot work, before a process starts; otherwise as the
    run ends. `run.dir` must hold no run yet, unless `trainer.resume` continues it.
    """
    from hybridrl.driver.train import train as train_config

    return _run(train_config, overrides, new=True)


def evaluate(overrides: Sequence[str]) -> Result:
    """Run `hybridrl eval` with these overrides in this process: `["model.path=DIR", ...]`."""
    from hybridrl.driver.train import evaluate_only

    return _run(evaluate_only, overrides, new=False)


def _run(
    action: Callable[[Config], dict[str, Any]], overrides: Sequence[str], *, new: bool
) -> Result:
    from hybridrl.preflight.settings import check_command, composed_run

    config = composed_run(overrides, new=new)
    check_command(config, "train" if new else "eval")
    return Result(Path(config.run.dir), action(config))


def serve(overrides: Sequence[str] = ()) -> AbstractContextManager[Any]:
    """A server of `hybridrl serve` with these overrides, until the end of a `with` block.

    It has `url` and `key`, for the clients. Raises `ConfigError` before a process starts.
    """
    from hybridrl.serving.start import serving

    return serving(overrides)
