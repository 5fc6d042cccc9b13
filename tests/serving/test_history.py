"""What a server records of each model, on ranks that compute nothing."""

from pathlib import Path
from unittest.mock import Mock

import pytest
from serve_ranks import DATUM, IDS, FakeRanks, answered, taken, turns_of, work_all

from hybridrl.serving.requests import (
    CreateModel,
    ForwardBackward,
    OptimStep,
    SampleRequest,
    SampleSettings,
    Save,
    Unload,
)

STEPPED = {"bad_step": 0.0, "grad_norm": 2.0, "lr": 0.1}


def test_a_row_has_what_happened_to_its_model_since_its_own_last_row(tmp_path: Path) -> None:
    """Lengths, waits and switches: of the model alone, and of all since the row before."""
    now, telemetry = [0.0], Mock()
    ranks = FakeRanks(step_model=STEPPED)
    turns = turns_of(ranks, tmp_path, telemetry=telemetry, now=lambda: now[0])
    for model in "ab":
        answered(turns, CreateModel(model))
        answered(turns, Save(model, "x", "sampler_weights", files=False))
    for path in ("tinker://a/sampler_weights/x", None):
        request = SampleRequest(path, IDS, 2, SampleSettings(max_tokens=4), (0, 0), "s")
        waiting = taken(turns, request)
        now[0] += 3
        work_all(turns)
        assert waiting.result(0)
    waiting = taken(turns, _gradient("a"))
    now[0] += 1
    turns.work()
    for model in "aba":
        answered(turns, _gradient(model))
        answered(turns, OptimStep(model, 0.1, 0.9, 0.95, 1e-8, 0.0, 0.0))
    first, second, third = (call.args[1] for call in telemetry.log.call_args_list)
    assert _of("a", first) == {
        "loss": 0.0, "grad_norm": 2.0, "switches": 2.0, "response_tokens_mean": 1.0,
        "wait_s": pytest.approx(1 / 5), "sample_wait_s": 3.0,
    }  # fmt: skip
    assert (first["switches"], first["sample_wait_s"]) == (3.0, 3.0)
    assert first["wait_s"] == pytest.approx(1 / 7)
    assert (first["train_tokens"], second["train_tokens"]) == (6.0, 3.0)
    assert not _of("b", first)
    nothing = {"loss": 0.0, "grad_norm": 2.0, "switches": 0.0, "wait_s": 0.0}
    assert (_of("b", second), _of("a", third)) == (nothing, nothing)


def test_only_models_that_exist_have_a_window(tmp_path: Path) -> None:
    """The base has none, and neither has an unloaded model whose checkpoint is sampled from."""
    turns = turns_of(FakeRanks(step_model=STEPPED), tmp_path)
    for model in "ab":
        answered(turns, CreateModel(model))
    answered(turns, Save("a", "x", "sampler_weights"))
    answered(turns, Unload("a"))
    for path in ("tinker://a/sampler_weights/x", None):
        answered(turns, SampleRequest(path, IDS, 2, SampleSettings(max_tokens=4), (0, 0), "s"))
    assert turns.history._of.keys() == {"b"}
    assert turns.history._all.metrics()["switches"] == 2


def _gradient(model: str) -> ForwardBackward:
    return ForwardBackward(model, (DATUM,), "cross_entropy", {}, True)


def _of(model: str, row: dict[str, float]) -> dict[str, float]:
    """The metrics of a row that are a model's, by their names without it."""
    return {k.removesuffix(f"/{model}"): v for k, v in row.items() if k.endswith(f"/{model}")}
