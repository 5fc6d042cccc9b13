"""What `schedule=auto` is in a run: what acts there, or serial."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config import Config, ConfigError
from hybridrl.config.schedule import EarlyBackward, FusedScheduleConfig, SerialScheduleConfig
from hybridrl.driver.checkpoints import changed_settings
from hybridrl.preflight.prepare import prepare

SHORT = ["schedule=auto", "trainer.steps=1", "warm_start.steps=0", "cluster=processes"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.ranks=2"], "fused: the last samples move between 2 instances; no early"),
        (["cluster.ranks=2", "trainer.layout.replicas=2"], "2 instances; early backward"),
        (
            ["cluster.ranks=2", "trainer.layout.replicas=2", "recipe=ppo"],
            "no early backward: the update of the actor is not the only one",
        ),
        (
            ["cluster.ranks=2", "trainer.layout.replicas=2", "recipe=dapo"],
            "may ask for another round, which every rank generates",
        ),
        (
            ["cluster.ranks=2", "trainer.layout.replicas=2", "trainer.mini_batches=2"],
            "has 2 optimizer steps (epochs x mini-batches)",
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
    tmp_path: Path,
    overrides: list[str],
    said: str,
) -> None:
    if "reward=function" in overrides:
        judge = tmp_path / "judge.py"
        judge.write_text("def score(response, **_):\n    return float(len(response) % 2)\n")
        overrides = [*overrides, f"reward.function={judge}:score"]
    config = make_config(*SHORT, *overrides, f"run.dir={tmp_path / 'run'}")
    line = prepare(config).schedule
    assert line.startswith("schedule=auto is ")
    assert said in line
    if "fused" in line:
        assert isinstance(config.schedule, FusedScheduleConfig)
        early = config.schedule.early_backward is EarlyBackward.auto
        assert early == ("early backward where" in line)
    else:
        assert isinstance(config.schedule, SerialScheduleConfig)


def test_a_schedule_that_is_named_stays(make_config: Callable[..., Config], tmp_path: Path) -> None:
    config = make_config(*SHORT, "schedule=serial", "cluster.ranks=2", f"run.dir={tmp_path}")
    assert prepare(config).schedule == ""
    assert isinstance(config.schedule, SerialScheduleConfig)


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
