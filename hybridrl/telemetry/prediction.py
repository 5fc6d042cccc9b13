"""What `hybridrl plan auto` predicts of a run's step, and how it compares with what was measured.

The planner runs the schedule itself in virtual time. So a prediction has the stages of a run's
records, by the same names.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from hybridrl.config.errors import ConfigError
from hybridrl.telemetry.rundata import PREDICTION, RunData, finite, is_number

__all__ = ["PREDICTION", "StepPrediction", "compared", "stage_key"]


def stage_key(stage: str) -> str:
    """The metric of a stage's seconds."""
    return f"{stage.replace(' ', '_')}_s"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPrediction:
    """Seconds of a step under a mapping, by stage."""

    source: str
    """Where the costs of a layer come from: a roofline, or a calibration."""
    mapping: str
    """The mapping in words."""
    response_tokens: float
    """The mean of the lengths that the plan was made for."""
    seconds: Mapping[str, float]
    """Seconds by name: the step (`step`), each stage, and the changes of phase."""
    recipe: str = ""
    """The recipe's function; empty where it is not known."""
    overrides: tuple[str, ...] = ()
    """The mapping as overrides of a run."""

    def to_json(self) -> dict[str, Any]:
        """Plain data, which `of_json` takes back."""
        return asdict(self)

    @classmethod
    def of_json(cls, values: Any) -> "StepPrediction":
        """Raises ValueError for anything else."""
        try:
            seconds = {str(name): float(s) for name, s in values["seconds"].items()}
            tokens = float(values["response_tokens"])
            source, mapping = str(values["source"]), str(values["mapping"])
            recipe, overrides = str(values.get("recipe", "")), values.get("overrides", ())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"no prediction of a step: {error!r}") from None
        if "step" not in seconds or not all(0 <= s < float("inf") for s in seconds.values()):
            raise ValueError("no prediction of a step: wanted seconds of `step` and of stages")
        return cls(
            source=source,
            mapping=mapping,
            response_tokens=tokens,
            seconds=seconds,
            recipe=recipe,
            overrides=tuple(map(str, overrides)),
        )


def read_prediction(path: str) -> StepPrediction:
    """The prediction in the file of `telemetry.predicted`. Raises ConfigError."""
    try:
        return StepPrediction.of_json(json.loads(Path(path).read_text("utf-8")))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        allowed = f"a file that hybridrl plan auto --out=... wrote ({reason})"
        raise ConfigError("telemetry.predicted", path, allowed) from None


def compared(run: RunData) -> dict[str, Any] | None:
    """Predicted and measured seconds of each stage of a step, and their ratio.

    Measured is the mean over the steps of reinforcement learning. The first one is left out where
    there are more, since it warms up. None for a run without a prediction.
    """
    try:
        prediction = StepPrediction.of_json(run.predicted)
    except ValueError:
        return None
    steps = run.steps("rl")
    steady = steps[1:] or steps
    rows = []
    for name, predicted in prediction.seconds.items():
        measured = _mean(steady, stage_key(name))
        if predicted == 0.0 and measured is None:
            continue
        ratio = measured / predicted if measured is not None and predicted else None
        rows.append([name, predicted, measured, ratio])
    return {
        "source": prediction.source,
        "mapping": prediction.mapping,
        "columns": ["stage", "predicted_s", "measured_s", "measured_over_predicted"],
        "rows": rows,
        "steps": len(steady),
        "predicted_tokens": prediction.response_tokens,
        "measured_tokens": _mean(steady, "response_tokens_mean"),
    }


def _mean(steps: list[dict[str, Any]], key: str) -> float | None:
    """The mean of a metric over the steps that have it."""
    values = [finite(row[key]) for row in steps if is_number(row.get(key))]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
