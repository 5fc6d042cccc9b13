"""Evaluation sets in whole runs, and the checkpoints of a run that are evaluated afterwards."""

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from hybridrl import driver
from hybridrl.config import Config, ConfigError
from hybridrl.config.compose import check, composed, register
from hybridrl.config.stored_run import overrides_of
from hybridrl.driver.episodes import EnvironmentFailed
from hybridrl.driver.evaluate import HeldOutEvaluation, evaluation_graphs
from hybridrl.flow.sample import SampleId
from hybridrl.preflight.prepare import build_recipe
from hybridrl.schedule.lost_samples import InstanceDied
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.rundata import checkpoints_of

DRAWN = "drawn: {num_samples: 4, every: 2, num_prompts: 3}"


@pytest.fixture(scope="module")
def settings(tiny_run: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides of a run on one rank with two further sets, one with prompts and a judge."""
    file = tmp_path_factory.mktemp("sets") / "own.jsonl"
    file.write_text("".join(f'{{"prompt": "{x}#", "answer": "{x}"}}\n' for x in "abc"))
    source = f"source: {{kind: jsonl, name: '{file}'}}, prompt_template: '{{question}}'"
    judge = 'reward: {kind: regex, pattern: ".*"}, every: null'
    return [
        *tiny_run, f"+eval.sets={{{DRAWN}, own: {{{source}, {judge}}}}}", "cluster.ranks=1",
        "eval.sets.main.every=3", "trainer.steps=4", "trainer.save_every=2", "warm_start.steps=1",
        "trainer.optim.lr=0.05", "telemetry.report=true",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(
    train_here: Callable[..., Any],
    settings: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    run_dir = tmp_path_factory.mktemp("run") / "run"
    return train_here(run_dir, *settings).dir


def store(run_dir: Path, settings: list[str], **changed: Any) -> None:
    """Write the composed settings into the run directory, as the command line does."""
    register()
    values: Any = OmegaConf.to_container(composed(settings), enum_to_str=True)
    (run_dir / ".hydra").mkdir()
    OmegaConf.save(values | changed, run_dir / ".hydra" / "config.yaml")


def evaluated(run: Path, name: str) -> list[int]:
    """The steps at which a set was evaluated."""
    lines = read_lines(run / "metrics.jsonl")
    return [line["step"] for line in lines if any(k.startswith(f"eval/{name}/") for k in line)]


@pytest.mark.layouts
def test_each_set_has_its_own_steps_samples_and_judge(run: Path) -> None:
    assert evaluated(run, "main") == [1, 4, 5]  # the recipe begins after step 1 and ends at 5
    assert evaluated(run, "drawn") == [1, 3, 5]
    assert evaluated(run, "own") == [1, 5]
    last: dict[str, Any] = {}
    for line in read_lines(run / "metrics.jsonl"):
        last |= line
    assert last["eval/own/avg@1"] == 1, "its judge takes any response"
    assert last["eval_accuracy"] == last["eval/main/avg@1"]
    drawn = [key.removeprefix("eval/drawn/") for key in last if key.startswith("eval/drawn/")]
    estimates = [f"{key}{end}" for key in ("avg@4", "pass@2", "maj@2", "pass@4", "maj@4")
                 for end in ("", "/low", "/high")]  # fmt: skip
    assert drawn == [*estimates, "reward", "response_tokens"]
    samples = [s for s in read_lines(run / "samples.jsonl") if s["phase"] == "evaluation"]
    assert {s["set"] for s in samples} == {"main", "drawn", "own"}
    assert {s["prompt"] for s in samples if s["set"] == "own"} == {"a#", "b#", "c#"}
    # with the sources' mixture nothing of it is trained
    assert not {s["prompt"] for s in samples if s["set"] == "own"} & {
        s["prompt"] for s in read_lines(run / "samples.jsonl") if s["phase"] == "rl"
    }


@pytest.mark.layouts
def test_checkpoints_are_listed_by_step(run: Path) -> None:
    everything = checkpoints_of(run, "all")
    assert list(everything) == [1, 3, 5]
    assert everything[5] == run / "final"
    assert checkpoints_of(run, "final") == {5: run / "final"}
    assert checkpoints_of(run, "3,1") == {1: everything[1], 3: everything[3]}
    with pytest.raises(ConfigError, match=r"^--checkpoints=2: wanted all, final, or steps among"):
        checkpoints_of(run, "1,2")


def test_a_checkpoint_whose_event_is_cut_off_is_listed(tmp_path: Path) -> None:
    """A run that goes on from it cuts all later records; one without a state has its event."""
    warm_start, first = tmp_path / "warm_start", tmp_path / "checkpoints" / "step_000003"
    again, final = tmp_path / "checkpoints" / "step_000005", tmp_path / "final"
    for folder, step in ((warm_start, 1), (first, 3), (again, 5), (final, None)):
        (folder / "resume").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        if step is not None:
            (folder / "resume" / "state.json").write_text(json.dumps({"step": step}))
    event = {"kind": "checkpoint", "step": 5, "path": str(final)}
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert checkpoints_of(tmp_path, "all") == {1: warm_start, 3: first, 5: final}
    (final / "resume" / "state.json").write_text(json.dumps({"step": 7}))
    assert checkpoints_of(tmp_path, "5,7") == {5: again, 7: final}


@pytest.mark.wide
@pytest.mark.layouts
def test_a_set_can_be_evaluated_on_every_checkpoint_later(run: Path, settings: list[str]) -> None:
    """A greedy set that the run had as well has the same accuracy from the checkpoints."""
    store(run, settings)
    file = run / ".hydra" / "config.yaml"
    stored = OmegaConf.load(file)
    stored.environment.partial = "timed"  # a key that is gone, which training alone followed
    OmegaConf.save(stored, file)
    before = (run / "metrics.jsonl").read_text()
    more = ["~eval.sets.drawn", "~eval.sets.own", "+eval.sets={late: {every: null}}"]
    command = [sys.executable, "-m", "hybridrl.cli", "eval", str(run), "--checkpoints", "all"]
    settings = [*more, "cluster=processes", "cluster.ranks=1"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["steps"] == [1, 3, 5]
    assert result["run"] == str(run)
    after = (run / "metrics.jsonl").read_text()
    assert after.startswith(before)
    added = {line["step"]: line for line in map(json.loads, after[len(before) :].splitlines())}
    assert list(added) == [1, 3, 5]
    own = {x["step"]: x["eval_accuracy"] for x in read_lines(run / "metrics.jsonl")
           if "eval_accuracy" in x and "eval/late/avg@1" not in x}  # fmt: skip
    for step in (1, 5):
        assert added[step]["eval_accuracy"] == added[step]["eval/late/avg@1"] == own[step]
    (records,) = (run / "evaluations").iterdir()
    texts: dict[int, list[str]] = {}
    for sample in read_lines(records / "samples.jsonl"):
        texts.setdefault(sample["step"], []).append(sample["response"])
    assert len({tuple(responses) for responses in texts.values()}) == 3, "three different models"
    assert "eval/late" in (run / "report.html").read_text()


def test_the_state_of_a_checkpoint_before_there_were_sets() -> None:
    evaluation = HeldOutEvaluation.__new__(HeldOutEvaluation)
    evaluation.load_state([7, {"eval_accuracy": 0.5}])
    assert evaluation.last == {"main": (7, {"eval_accuracy": 0.5})}
    evaluation.load_state(evaluation.state())
    assert evaluation.last == {"main": (7, {"eval_accuracy": 0.5})}
    evaluation.load_state([])
    assert evaluation.last == {}


def test_an_evaluation_that_begins_again_checks_its_second_attempt(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samples are on record by then, and its environment is to blame before its judge."""
    calls, config = Mock(), make_config("run.dir=out")
    graph = evaluation_graphs(config, build_recipe(config.recipe))["main"]
    judged = Mock(id=SampleId(0), scalars={"reward_status": "failed: no answer"})
    result = Mock(samples=(), dropped={}, dispatched=[judged])
    calls.schedule.run_step.side_effect = [InstanceDied("rank 1"), result]
    calls.executor.apart.return_value = nullcontext()
    calls.executor.episodes.check.side_effect = EnvironmentFailed("3 of 4")
    monkeypatch.setattr(driver.evaluate, "make_schedule", lambda *parts: calls.schedule)
    with pytest.raises(EnvironmentFailed, match="3 of 4"):
        driver.evaluate.evaluate(config, "main", graph, calls.executor, [], 1, calls.record)
    names = [name for name, *_ in calls.mock_calls]
    assert names == [
        "executor.apart", "schedule.run_step", "executor.discard", "schedule.release",
        "executor.episodes.forget", "executor.apart", "schedule.run_step", "record",
        "executor.episodes.check",
    ]  # fmt: skip


@pytest.mark.long
def test_settings_under_old_names_are_read(tmp_path: Path) -> None:
    settings = ["schedule=fused", "recipe=ppo", "recipe.num_samples=3", "run.dir=before"]
    store(tmp_path, settings, eval={"every": 7, "num_prompts": 5})
    config = check([*overrides_of(tmp_path), "eval.sets.main.num_prompts=6"])
    assert (config.eval.sets["main"].every, config.eval.sets["main"].num_prompts) == (7, 6)
    assert config.schedule.kind.value == "fused"
    assert config.recipe["num_samples"] == 3
    with pytest.raises(ConfigError, match=r"^run=.*none: wanted a run directory"):
        overrides_of(tmp_path / "none")
