"""What `schedule=auto` is in a run: what acts there, or serial."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config import Config, ConfigError, TinyModelConfig
from hybridrl.config.schedule import EarlyBackward, FusedScheduleConfig, SerialScheduleConfig
from hybridrl.driver.origin import changed_settings
from hybridrl.flow.judgements import with_parts
from hybridrl.models.load import load_config
from hybridrl.models.tiny import make_tiny_model
from hybridrl.preflight.prepare import build_recipe, prepare
from hybridrl.preflight.schedule_choice import decide_schedule


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tiny_model(folder, TinyModelConfig(), seed=0)
    return str(folder)


SHORT = ["schedule=auto", "trainer.steps=1", "warm_start.steps=0", "cluster=processes"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["cluster.ranks=2"],
            "fused: prompts are dealt to 2 instances by their expected lengths; ",
        ),
        (
            ["cluster.ranks=2"],
            "no early backward: an instance's ranks are no whole training replica",
        ),
        (
            ["cluster.ranks=2", "recipe.kl_coef=0.05"],
            "fused: the last samples move between 2 instances; no early backward",
        ),
        (
            ["cluster.ranks=2", "trainer.layout.replicas=2"],
            "fused: the last samples move between 2 instances; early backward",
        ),
        (
            ["cluster.ranks=2", "trainer.layout.replicas=2", "recipe=ppo"],
            "no early backward: update_actor shares its ranks with the update update_critic",
        ),
        (
            ["cluster.ranks=2", "trainer.layout.replicas=2", "recipe=dapo"],
            "may ask for another round, which every rank generates",
        ),
        (
            ["cluster.ranks=2", "trainer.layout.replicas=2", "trainer.mini_batches=2"],
            "has 2 optimizer steps (epochs x mini-batches)",
        ),
        (
            ["cluster.ranks=2", "trainer.layout.replicas=2", "rollout=vllm"],
            "fused: the last samples move between 2 instances; early backward",
        ),
        (["cluster.ranks=1"], "serial: nothing can begin before the batch is complete"),
        (["cluster.ranks=2", "rollout.layout.tp=2"], "serial: nothing can begin before"),
        (["cluster.ranks=2", "rollout.ignore_eos=true"], "serial: nothing can begin before"),
        (["cluster.ranks=1", "recipe=sft"], "serial: nothing can begin before"),
        (["cluster.ranks=1", "reward=function"], "fused: reward during generation; no early"),
        (
            ["cluster.ranks=2", "deterministic=strict"],
            "no early backward: deterministic=strict sums gradients in the order of",
        ),
    ],
    ids=str,
)
def test_what_acts_is_chosen_and_said(
    make_config: Callable[..., Config],
    model: str,
    tmp_path: Path,
    overrides: list[str],
    said: str,
) -> None:
    if "reward=function" in overrides:
        judge = tmp_path / "judge.py"
        judge.write_text("def score(response, **_):\n    return float(len(response) % 2)\n")
        overrides = [*overrides, f"reward.function={judge}:score"]
    config = make_config(*SHORT, *overrides, f"run.dir={tmp_path / 'run'}")
    graph = with_parts(build_recipe(config.recipe), config)
    line = decide_schedule(config, graph, load_config(model))
    assert line.startswith("schedule=auto is ")
    assert said in line
    if "fused" in line:
        assert isinstance(config.schedule, FusedScheduleConfig)
        early = config.schedule.early_backward is EarlyBackward.auto
        assert early == ("early backward where" in line)
    else:
        assert isinstance(config.schedule, SerialScheduleConfig)


@pytest.mark.long
def test_a_schedule_that_is_named_stays(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config(*SHORT, "schedule=serial", "cluster.ranks=2", f"run.dir={tmp_path}")
    assert prepare(config).schedule == ""
    assert isinstance(config.schedule, SerialScheduleConfig)


@pytest.mark.long
def test_a_width_of_the_tail_needs_a_tail(
    make_config: Callable[..., Config], tmp_path: Path
) -> None:
    wide = ["cluster.ranks=2", "rollout.ignore_eos=true", "rollout.tail_tp=2"]
    config = make_config(*SHORT, *wide, f"run.dir={tmp_path}")
    with pytest.raises(ConfigError, match=r"rollout.tail_tp=.*wanted off with schedule=serial"):
        prepare(config)


@pytest.mark.parametrize(
    ("before", "now"), [("auto", "auto"), ("auto", "serial"), ("fused", "auto")]
)
def test_a_run_resumes_with_auto(before: str, now: str) -> None:
    assert changed_settings({"schedule.kind": before}, {"schedule.kind": now}) == []


def test_a_run_of_another_batch_does_not() -> None:
    kinds = {"schedule.kind": "partial"}, {"schedule.kind": "auto"}
    assert changed_settings(*kinds) == ["schedule.kind"]
