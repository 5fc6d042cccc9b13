"""`hybridrl watch` of a server: the curves of its clients' models, in a real browser."""

from pathlib import Path
from typing import Any

import pytest
from serve_ranks import DATUM, IDS, FakeRanks, answered, turns_of
from watched import served

from hybridrl.config import TelemetryConfig
from hybridrl.serving.loop import Turns
from hybridrl.serving.requests import (
    CreateModel,
    ForwardBackward,
    OptimStep,
    SampleRequest,
    SampleSettings,
    Save,
)
from hybridrl.telemetry.run import Telemetry

CHARTS = ["loss", "grad_norm", "response_tokens_mean", "wait_s", "sample_wait_s", "switches"]


@pytest.mark.browser
def test_every_model_has_a_curve_of_what_it_did(viewer: Any, tmp_path: Path) -> None:
    """New steps appear without a reload, and no chart of one model alone is left."""
    quiet, models = TelemetryConfig(progress=False, loggers=[]), ["one:train:0", "two:train:0"]
    ranks = FakeRanks(step_model={"bad_step": 0.0, "grad_norm": 2.0, "lr": 0.1})
    with Telemetry(tmp_path / "run", quiet, total_steps=0) as telemetry:
        turns = turns_of(ranks, tmp_path, telemetry=telemetry)
        _step(turns, models[0])
        with served(tmp_path / "run") as address:
            page = viewer.open(address)
            assert _points(page) == {f"model/{name}": ["1"] for name in CHARTS}
            _step(turns, models[1])
            second = f'[data-key="switches/{models[1]}"]'
            page.wait_for_selector(second, state="attached")  # one point has no length
            assert _points(page) == {f"model/{name}": ["1", "1"] for name in CHARTS}
            keys = page.locator("[data-chart] path.raw").evaluate_all(
                "paths => paths.map(path => path.dataset.key)"
            )
            assert [key for key in keys if key.startswith("loss")] == [
                "loss",
                *(f"loss/{model}" for model in models),
            ]
            lengths = page.locator('[data-chart="model/response_tokens_mean"]')
            assert lengths.locator(".legend span").all_inner_texts() == [
                "one:train:0 1.00",
                "two:train:0 1.00",
            ]
            colors = lengths.locator("path.raw").evaluate_all(
                "paths => paths.map(path => getComputedStyle(path).stroke)"
            )
            assert len({*colors}) == len(models)
            page.close()
    assert viewer.errors == []


def _points(page: Any) -> dict[str, list[str]]:
    """How many points each curve of the charts by model has."""
    charts = page.locator('[data-chart^="model/"]')
    read = "cs => cs.map(c => [c.dataset.chart, [...c.querySelectorAll('path.raw')]"
    return dict(charts.evaluate_all(f"{read}.map(path => path.dataset.points)])"))


def _step(turns: Turns, model: str) -> None:
    """Samples of a new model, and an optimizer step."""
    answered(turns, CreateModel(model))
    answered(turns, Save(model, "x", "sampler_weights", files=False))
    weights, settings = f"tinker://{model}/sampler_weights/x", SampleSettings(max_tokens=4)
    answered(turns, SampleRequest(weights, IDS, 2, settings, (0, 0), "s"))
    answered(turns, ForwardBackward(model, (DATUM,), "cross_entropy", {}, True))
    answered(turns, OptimStep(model, 0.1, 0.9, 0.95, 1e-8, 0.0, 0.0))
