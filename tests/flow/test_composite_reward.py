"""A reward of several parts: a verifier, a function that fails, a reward model, weighed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.flow.judgements import WeightedSum
from hybridrl.preflight.prepare import prepare
from hybridrl.telemetry.records import read_lines


def parts(user_rewards: Path, model: str) -> list[str]:
    exact = "exact: {kind: exact, weight: 0}"
    shape = (
        f"shape: {{kind: function, function: '{user_rewards}:troubled', timeout_s: 1.5, weight: 2}}"
    )
    liked = f"liked: {{kind: model, model: '{model}', weight: -0.5}}"
    parts = f"+reward.parts={{{exact}, {shape}, {liked}}}"
    return ["reward=sum", parts, "reward.max_failed_share=1"]


@pytest.fixture(scope="module")
def runs(
    train_here: Callable[..., Any],
    long_tail: list[str],
    user_rewards: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    (model,) = [s.partition("=")[2] for s in long_tail if s.startswith("reward.model=")]
    kept = [setting for setting in long_tail if not setting.startswith(("reward", "recipe"))]
    settings = [*kept, *parts(user_rewards, model), "recipe.group_size=4", "trainer.steps=2"]
    fused = ["schedule=fused", "schedule.migration_threshold=12"]
    folder = tmp_path_factory.mktemp("parts")
    return {
        "serial": train_here(folder / "serial", *settings),
        "fused": train_here(folder / "fused", *settings, *fused),
    }


@pytest.mark.layouts
def test_the_reward_is_the_weighted_sum(runs: dict[str, Any]) -> None:
    """Whatever the schedule; each part is in the records and a metric."""
    responses = {}
    for name, run in runs.items():
        lines = [x for x in read_lines(run.dir / "samples.jsonl") if x["phase"] == "rl"]
        assert len(lines) == 2 * 16
        for line in lines:
            kind = sum(map(ord, line["response"])) % 8
            assert line["reward_exact"] == 0
            assert (line["drop_reason"] == "judge") == (kind <= 1)
            if kind > 1:
                assert line["reward_shape"] == kind / 7
                wanted = 2 * line["reward_shape"] - 0.5 * line["reward_liked"]
                assert line["reward"] == pytest.approx(wanted, abs=1e-9)
            else:  # a part that fails is no score, and the sum none
                assert (line["reward_shape"], line["reward"]) == (None, None)
            told = {0: "error: shape: ValueError: no such", 1: "timeout: shape: no reward within"}
            assert line["status"].startswith(told.get(kind, "ok"))
        assert len({line["reward_liked"] for line in lines}) > 20
        for step, metrics in enumerate(run.metrics, 1):
            mine = [line["reward_liked"] for line in lines if line["step"] == step]
            assert metrics["reward_liked_mean"] == pytest.approx(sum(mine) / 16)
            assert metrics["reward_timeout"] == sum(
                line["status"].startswith("timeout") for line in lines if line["step"] == step
            )
        assert run.stored == [0, 0]
        responses[name] = [(line["id"], line["response"]) for line in lines]
    assert responses["serial"][:16] == responses["fused"][:16]


def test_the_first_part_that_fails_is_told() -> None:
    total = WeightedSum((("a", 2.0), ("b", -1.0)))
    assert total(1.0, "ok", 3.0, "ok") == (-1.0, "ok")
    assert total(1.0, "ok", 0.0, "error: exit 1") == (2.0, "error: b: exit 1")
    assert total(0.0, "timeout", 1.0, "error: x") == (-1.0, "timeout: a")
    recorded = WeightedSum((("a", 0.0), ("b", -1.0)))
    assert recorded(0.0, "timeout", 1.0, "ok") == (-1.0, "ok")  # nothing follows from its score
    read = WeightedSum((("a", 0.0), ("b", -1.0)), reads=("a", "b"))
    assert read(0.0, "timeout", 1.0, "ok") == (-1.0, "timeout: a")


ONE = "a: {kind: exact}"
REFUSED = {
    "no part": ("reward=sum", "", r"^reward.parts=\[\]: wanted parts with reward.kind=sum, and"),
    "no sum": ("reward=exact", ONE, r"^reward.parts=\['a'\]: wanted parts with reward.kind=sum"),
    "a name": ("reward=sum", "B: {kind: exact}", "^reward.parts=B: wanted names of lower-case"),
    "a sum": ("reward=sum", "a: {kind: sum}", "^reward.parts.a.kind=sum: wanted another kind"),
    "a value": ("reward=sum", "a: {kind: regex}", "^reward.parts.a.pattern=null: wanted a value"),
    "processes": (
        "reward=sum reward.num_processes=8",
        ONE,
        r"^reward.num_processes=8: wanted it in reward.parts.NAME.num_processes: each part",
    ),
    "a call": ("reward=sum reward.call=group", ONE, "^reward.call=group: wanted "),
    "limits": (
        "reward=sum reward.limits.seconds=1",
        ONE,
        "^reward.limits.seconds=1.0: wanted it in",
    ),
    "a score": (
        "recipe=gdpo recipe.parts={b:{weight:1}} reward=sum",
        ONE,
        r"^reward.parts=\['a'\]: wanted b among them: the recipe reads its score",
    ),
    "text": ("recipe=ttrl reward=sum", ONE, "^reward.kind=sum: wanted one verifier: the recipe"),
    "a function": (
        "reward=sum",
        "a: {kind: function, function: 'nowhere:f'}",
        "^reward.parts.a.function=nowhere:f: wanted a function that can be imported",
    ),
    "a model": (
        "reward=sum",
        "a: {kind: model, model: ./nowhere}",
        "^reward.parts.a.model=./nowhere: wanted a directory that exists",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_parts(name: str, make_config: Callable[..., Any], tmp_path: Path) -> None:
    settings, parts, message = REFUSED[name]
    small = ["data.size=20", "data.eval_size=4", f"run.dir={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=message):
        prepare(make_config(*settings.split(), f"+reward.parts={{{parts}}}", *small))
