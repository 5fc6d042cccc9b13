"""Recorded fields that a replay takes instead of computing them, and the batches to take."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.driver.recorded_samples import (
    RecordedSamples,
    newest_batch,
    recorded_batch,
    recorded_scores,
)
from hybridrl.flow.graph import ComputeStage, MapStage, StageMethod
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.preflight.judges import try_judges
from hybridrl.preflight.prepare import build_recipe
from hybridrl.replay.step import ReplayRequest, _check_inputs, replay
from hybridrl.replay.step import ReplayStage as Half
from hybridrl.telemetry.records import dump

ONE = SampleId(3)
JUDGE = ComputeStage(
    name="reward", role="reward", method=StageMethod.SCORE, outputs=("reward", "reward_status")
)
MAP = MapStage(name="kl", outputs=("kl",), scalars=("kl",), function=len, returns=("kl",))
SCALARS = {"reward": 1.0, "reward_status": "ok", "kl": 0.5}


def test_maps_of_a_batch_run_again() -> None:
    """They are the recipe's formulas, of fields that are recorded; judges are not asked."""
    sample = Sample(id=ONE, scalars=SCALARS)
    batch = RecordedSamples({str(ONE): SCALARS}, Path("batch"), {ONE: sample})
    assert batch.has(JUDGE, [sample])
    assert not batch.has(MAP, [sample])
    assert not batch.has(JUDGE, [Sample(id=SampleId(4))])


def test_whether_all_scores_are_recorded(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "fields": {}, "updates": {}, "samples": {"1.0": {}}},
        {"step": 2, "fields": {}, "updates": {}, "samples": {"3.0": SCALARS}},
    ]
    (tmp_path / "digests.jsonl").write_text("".join(dump(line) + "\n" for line in lines))
    assert recorded_scores(tmp_path, [2]).covers(JUDGE)
    assert not recorded_scores(tmp_path, [1, 2]).covers(JUDGE)
    assert not recorded_scores(tmp_path, [7]).covers(JUDGE)
    with pytest.raises(ConfigError, match=r"a run with telemetry\.digests=true, which"):
        recorded_scores(tmp_path / "none", [2])


@pytest.mark.long
def test_judges_that_are_not_asked_are_not_tried(
    make_config: Callable[..., Any], tmp_path: Path
) -> None:
    """Nothing listens at the endpoint."""
    config = make_config(
        "reward=chat",
        "reward.endpoint.url=http://127.0.0.1:1/v1",
        "reward.endpoint.model=m",
        f"run.dir={tmp_path}",
    )
    graph = build_recipe(config.recipe)
    try_judges(config, graph, (), lambda stage: True)
    with pytest.raises(ConfigError, match="an endpoint that answers"):
        try_judges(config, graph, (), lambda stage: False)


def test_the_newest_batch_with_the_runs_settings(tmp_path: Path) -> None:
    """A replay with other settings has another batch, which is taken by name alone."""
    replays = tmp_path / "replays"
    names = ("step_000004", "step_000004-2", "step_000004-3", "step_000005")
    for age, name in enumerate(names):
        file = replays / name / "batch" / "samples.json"
        file.parent.mkdir(parents=True)
        file.write_text('{"samples": []}')
        os.utime(file, (age, age))
    others = {replays / "step_000004-3"}
    newest = newest_batch(tmp_path, 4, lambda directory: directory not in others)
    assert newest == replays / "step_000004-2" / "batch"
    named = rf"first hybridrl replay .* --stage generate; --batch={replays}/step_000004-3 takes"
    with pytest.raises(ConfigError, match=named):
        newest_batch(tmp_path, 4, lambda directory: False)
    with pytest.raises(ConfigError, match=r"^--stage=train: .* --stage generate$"):
        newest_batch(tmp_path, 6, lambda directory: True)
    for directory in (newest, newest.parent):
        assert recorded_batch(directory).folder == newest
    with pytest.raises(ConfigError, match=rf"^--batch={tmp_path}: wanted a replay's directory"):
        recorded_batch(tmp_path)


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    request = ReplayRequest(run_dir=tmp_path, step=1, stage=Half.generate, saves=True)
    with pytest.raises(ConfigError, match=r"^--save with --stage=generate: wanted no stage, or"):
        replay(request)
    with pytest.raises(ConfigError, match=r"^--batch=x: wanted an option of --stage train"):
        replay(ReplayRequest(run_dir=tmp_path, step=1, batch=Path("x")))


def test_a_run_without_its_environment_is_not_checked(tmp_path: Path) -> None:
    """Or with metrics that end before the step."""
    request, nothing = ReplayRequest(run_dir=tmp_path, step=2), Any
    (note,) = _check_inputs(request, nothing, nothing)  # type: ignore[arg-type]
    assert note.endswith("has no digests of its data and code: they are not checked")
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "time": 5.0, "step_s": 1.0}\n{"step')
    assert _check_inputs(request, nothing, nothing) == [note]  # type: ignore[arg-type]
