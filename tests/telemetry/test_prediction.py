"""Predicted seconds of a step beside measured ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.telemetry.prediction import StepPrediction, compared, read_prediction
from hybridrl.telemetry.rundata import RunData, StepKey

PREDICTED = StepPrediction(
    source="roofline",
    mapping="2: actor; serial",
    response_tokens=40.0,
    seconds={"step": 2.0, "to_generate": 0.5, "generate": 1.0, "to_train": 0.0, "values": 0.5},
)


def _run(steps: list[dict[str, Any]], predicted: dict[str, Any]) -> RunData:
    metrics = {StepKey(x, "rl", x): row for x, row in enumerate(steps, 1)}
    return RunData(name="run", directory="run", metrics=metrics, predicted=predicted)


def test_the_first_step_warms_up() -> None:
    """Ratios are of the mean over the others; a stage that is not there has none."""
    first = {"step_s": 100.0, "generate_s": 50.0, "to_generate_s": 9.0, "to_train_s": 9.0}
    others = [
        {"step_s": s, "generate_s": 0.5, "to_generate_s": 1.0, "response_tokens_mean": 44.0}
        for s in (3.0, 5.0)
    ]
    shown = compared(_run([first, *others], PREDICTED.to_json()))
    assert shown is not None
    assert shown["rows"] == [
        ["step", 2.0, 4.0, 2.0],
        ["to_generate", 0.5, 1.0, 2.0],
        ["generate", 1.0, 0.5, 0.5],
        ["values", 0.5, None, None],
    ]
    assert (shown["steps"], shown["predicted_tokens"], shown["measured_tokens"]) == (2, 40.0, 44.0)


def test_a_run_that_was_not_planned_has_none() -> None:
    assert compared(_run([{"step_s": 1.0}], {})) is None
    assert compared(_run([{"step_s": 1.0}], {"seconds": {"step": "soon"}})) is None


@pytest.mark.parametrize(
    "text",
    [None, "{", "[]", "{}", json.dumps(PREDICTED.to_json() | {"seconds": {"generate": 1.0}})],
)
def test_a_file_that_is_no_prediction(text: str | None, tmp_path: Path) -> None:
    """One line, which names the key and the file."""
    file = tmp_path / "plan.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=rf"telemetry\.predicted={file}.*plan auto --out"):
        read_prediction(str(file))
