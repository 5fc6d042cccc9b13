"""What `schedule=auto` is in a run: what acts there, or serial."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.config import Config
from hybridrl.config.schedule import EarlyBackward, FusedScheduleConfig, SerialScheduleConfig
from hybridrl.preflight.prepare import prepare

SHORT = ["schedule=auto", "trainer.steps=1", "warm_start.steps=0", "cluster=processes"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["cluster.ranks=2"], "fused: the last samples move between 2 instances; no early"),
        (["cluster.ranks=2", "trainer.layout.replicas=2"], "2 instances; early backward"),
        (["cluster.ranks=1"], "serial: nothing can begin before the whole batch is there"),
        (["cluster.ranks=2", "rollout.layout.tp=2"], "serial: nothing can begin before"),
        (["cluster.ranks=2", "rollout.ignore_eos=true"], "serial: nothing can begin before"),
        (["cluster.ranks=1", "recipe=sft"], "serial: nothing can begin before"),
        (["cluster.ranks=1", "reward=function"], "fused: reward beside generation; no early"),
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
