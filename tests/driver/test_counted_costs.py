"""Counted seconds of a run: none where nothing is countable, and nothing there ends a run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import TinyModelConfig, compose
from hybridrl.costs.instance import Costs
from hybridrl.driver import counted_costs as module
from hybridrl.driver.counted_costs import counted_costs
from hybridrl.flow.graph import UpdateStage
from hybridrl.models.tiny import make_tiny_model
from hybridrl.plan.mapping_options import read_scales
from hybridrl.preflight.prepare import build_recipe
from hybridrl.system.node_info import read_node_info
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.report import predicted
from hybridrl.telemetry.rundata import load


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, TinyModelConfig(), seed=0)
    return str(folder)


def counted(model: str, *settings: str, trains: bool = True) -> Costs | None:
    compose.register()
    config = compose.check(["recipe=grpo", "cluster.device=cpu", "cluster.ranks=2", *settings])
    config.resolve_device(0, "this machine")
    graph = build_recipe(config.recipe)
    if not trains:
        for name in [n for n, s in graph.stages.items() if isinstance(s, UpdateStage)]:
            del graph.stages[name]
    return counted_costs(config, graph, model, [read_node_info()])


def test_operations_are_counted(model: str) -> None:
    costs = counted(model)
    assert costs is not None
    assert costs.step_s > 0
    assert costs.train_token_s > 0


def test_epochs_are_counted(model: str) -> None:
    """A measured update has all of them; what it takes once, as to come to the device, is once."""
    once, twice = counted(model), counted(model, "trainer.epochs=2")
    assert once is not None
    assert twice is not None
    assert twice.train_token_s == pytest.approx(2 * once.train_token_s, rel=0.01)


def test_a_recipe_that_does_not_train_the_actor_has_none(model: str) -> None:
    assert counted(model, trains=False) is None


def test_what_fails_here_ends_no_run(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise KeyError("actor")

    monkeypatch.setattr(module, "mapping_of", fails)
    with caplog.at_level("WARNING"):
        assert counted(model) is None
    (record,) = caplog.records
    assert record.getMessage() == "seconds are learned without counted ones"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


@pytest.mark.long
def test_a_run_writes_predicted_beside_measured_seconds(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """The report's table and `plan auto` read what the run's own calls have taken."""
    run = train_here(
        tmp_path / "run", *tiny_run, "cluster.ranks=1", "trainer.steps=3", "rollout.decode_steps=1"
    ).dir
    record = json.loads((run / "costs.json").read_text())
    lines = [line for line in read_lines(run / "metrics.jsonl") if "update_actor_s" in line]
    shown = predicted(load(run))
    assert shown is not None
    rows = {kind: (calls, counted, taken) for kind, calls, counted, taken, _ in shown["rows"]}
    assert {"decode", "train", "switch"} <= set(rows)
    calls, counted, taken = rows["train"]
    assert calls == len(lines) == 3
    spans = sum(line["update_actor_s"] for line in lines)
    assert spans <= taken * 1.05
    assert taken <= spans + 0.02 * calls  # with what is between the calls, on a loaded machine
    assert 0 < counted < 10 * taken
    assert read_scales(str(run), "cpu", "native").to_json() == record["scales"]
