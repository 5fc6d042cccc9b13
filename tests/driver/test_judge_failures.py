"""A judge that fails on some responses: what is trained, recorded, replayed and resumed."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.driver.evaluate import evaluation_graphs
from hybridrl.driver.judges import JudgeFailures
from hybridrl.driver.run import _judge_failures
from hybridrl.flow.executor import Computed
from hybridrl.flow.graph import CollectStage, JudgedStage
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.preflight.prepare import build_recipe
from hybridrl.replay.step import Promise, ReplayRequest, replay
from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.long

FUNCTION = """
from pathlib import Path


def score(prompt, response, answer, item):
    if sum(map(ord, response)) % 4 == 0 and Path(__file__).with_name("down").exists():
        raise ConnectionError("the judge is down")
    return -(sum(map(ord, response)) % 7) / 6
"""


@pytest.fixture(scope="module")
def run(make_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A strict run of three steps, whose judge fails on a quarter of the responses, then is up."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "judge.py").write_text(FUNCTION)
    (folder / "down").touch()
    reward = [f"reward.function={folder}/judge.py:score", "reward.max_failed_share=1"]
    directory = make_run(folder / "run", *reward, "cluster.ranks=1", "trainer.steps=3")
    (folder / "down").unlink()
    return directory


def test_no_value_is_invented(run: Path) -> None:
    """A failed sample has no advantage, no reward and a reason; the others are its group."""
    lines = [x for x in read_lines(run / "samples.jsonl") if x["phase"] == "rl"]
    failed = [line for line in lines if line["status"] != "ok"]
    assert 3 < len(failed) < len(lines) / 2
    for line in lines:
        fails = sum(map(ord, line["response"])) % 4 == 0
        assert (line["status"] == "error: ConnectionError: the judge is down") == fails
        assert (line["reward"], line["advantage"]) == (None, None) or not fails
        assert (line["drop_reason"] == "judge") == fails
    groups: dict[str, list[float]] = {}
    for line in lines:
        if line["drop_reason"] is None:
            groups.setdefault(line["id"].split(".")[0], []).append(line["advantage"])
    assert {len(group) for group in groups.values()} >= {3, 4}
    for group in groups.values():
        assert sum(group) == pytest.approx(0, abs=1e-6)
    for metrics in (x for x in read_lines(run / "metrics.jsonl") if "reward_error" in x):
        mine = [line for line in lines if line["step"] == metrics["step"]]
        ok = [line["reward"] for line in mine if line["status"] == "ok"]
        assert metrics["reward_mean"] == pytest.approx(sum(ok) / len(ok))
        assert metrics["reward_error"] == metrics["samples/judge_dropped"] == len(mine) - len(ok)


def test_a_replay_fails_where_the_run_has(run: Path) -> None:
    """Though the judge is up by now."""
    report = replay(ReplayRequest(run_dir=run, step=3))
    assert report.promise is Promise.bits
    assert [c.name for c in report.comparisons if c.differing] == []
    recorded = read_lines(run / "judges" / "failures.jsonl")
    ours = read_lines(report.directory / "judges" / "failures.jsonl")
    assert ours == []  # they are the run's
    assert Counter(line["step"] for line in recorded)[3] > 0


def failed_event(*ids: SampleId, status: str = "ok") -> Computed:
    scalars: dict[str, Any] = {"reward": (2.0,) * len(ids), "reward_status": (status,) * len(ids)}
    return Computed("reward", ids, scalars, (), seconds=1.0)


def test_what_stands_when_a_run_goes_on(tmp_path: Path) -> None:
    """All of whole steps; none after the step that it goes back to; none where it begins anew."""
    samples = [Sample(id=SampleId(k), scalars={"reward_status": "ok"}) for k in range(3)]
    first = JudgeFailures(tmp_path)
    first.record(1, samples)
    assert not first.path.exists()
    for step in (1, 2):
        samples[step].scalars["reward_status"] = f"error: {step}"
        first.record(step, [samples[step]])

    def resumed(point: bool, goes_back: bool = False, resumes: bool = True) -> tuple[Any, ...]:
        origin: Any = SimpleNamespace(
            point=SimpleNamespace(state={"step": 1}) if point else None,
            continues=lambda run_dir: point,
            goes_back=goes_back,
        )
        config: Any = SimpleNamespace(
            run=SimpleNamespace(dir=tmp_path),
            trainer=SimpleNamespace(resumes=resumes),
            schedule=None,
        )
        failures = _judge_failures(config, origin)
        event = failures.followed(failed_event(*(sample.id for sample in samples)))
        assert isinstance(event, Computed)
        return (*event.scalars["reward_status"], *event.scalars["reward"])

    assert resumed(point=True) == ("ok", "error: 1", "error: 2", 2.0, 0.0, 0.0)
    assert resumed(point=False, resumes=False) == ("ok", "ok", "ok", 2.0, 2.0, 2.0)
    assert resumed(point=True, goes_back=True) == ("ok", "error: 1", "ok", 2.0, 0.0, 2.0)
    assert resumed(point=True) == ("ok", "error: 1", "ok", 2.0, 0.0, 2.0)
    assert resumed(point=False) == ("ok", "ok", "ok", 2.0, 2.0, 2.0)
    assert resumed(point=True) == ("ok", "ok", "ok", 2.0, 2.0, 2.0)


@pytest.mark.parametrize(("rule", "leaves"), [("drop", True), ("stop", True), ("zero", False)])
def test_evaluation_has_the_rule_of_its_judge(
    make_config: Callable[..., Any], rule: str, leaves: bool
) -> None:
    config = make_config(f"reward.on_failure={rule}")
    (graph,) = evaluation_graphs(config, build_recipe(config.recipe)).values()
    stages = list(graph.stages.values())
    assert isinstance(stages[-1], CollectStage)
    assert isinstance(stages[-2], JudgedStage) == leaves
