"""Whole runs of conversations: what the ranks train on is what the environment has answered."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.controller.episodes import EnvironmentFailed
from hybridrl.telemetry.records import read_lines

HERE = Path(__file__).parents[1] / "talking.py"
TALKING = [
    "environment=function", f"environment.path={HERE}:talk", "environment.max_turn_tokens=3",
    "environment.max_failed_share=1", "rollout.max_new_tokens=16", "trainer.steps=2",
    "warm_start.steps=0", "telemetry.samples_per_step=64",
]  # fmt: skip


@pytest.fixture(scope="module")
def settings(tiny_run: list[str]) -> list[str]:
    """Overrides of a run of seconds, whose reward is what the turns earn."""
    kept = [x for x in tiny_run if not x.startswith(("reward", "rollout.max_new", "warm_start"))]
    return [*kept, "reward=environment", *TALKING]


@pytest.mark.layouts
@pytest.mark.parametrize("schedule", ["fused", "packed"])
def test_every_schedule_trains_on_the_conversations_of_serial(
    train_here: Callable[..., Any], settings: list[str], tmp_path: Path, schedule: str
) -> None:
    """Two ranks, replies in any order, some episodes that fail. Packed may order them otherwise."""
    serial, other = (
        train_here(tmp_path / name, *settings, f"schedule={name}") for name in ("serial", schedule)
    )
    texts = [
        {record["id"]: (record["response"], record["reward"]) for record in first_step(run.dir)}
        for run in (serial, other)
    ]
    assert len(texts[0]) > 8
    common = texts[0].keys() & texts[1].keys()
    assert common == texts[0].keys() or schedule == "packed"
    assert {id: texts[0][id] for id in common} == {id: texts[1][id] for id in common}
    metrics = serial.metrics[0]
    assert metrics["environment/failed"] >= metrics["aborted"] > 0  # evaluations have more
    assert metrics["environment/turns"] > metrics["environment/episodes"] >= len(texts[0])
    assert metrics["environment/reply_tokens"] > 0


def first_step(run: Path) -> list[dict[str, Any]]:
    """The records of its first step's samples."""
    lines = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] == 1 and line["phase"] == "rl"]


@pytest.mark.layouts
def test_a_run_whose_episodes_fail_ends_and_says_why(
    train_here: Callable[..., Any], settings: list[str], tmp_path: Path
) -> None:
    kept = [x for x in settings if not x.startswith(("environment.path", "environment.max_failed"))]
    with pytest.raises(EnvironmentFailed) as caught:
        train_here(tmp_path / "run", *kept, f"environment.path={HERE}:mute")
    message = str(caught.value)
    assert "talking.py:mute" in message
    assert "nothing to say" in message
    assert "environment.max_failed_share=0.5" in message
    assert not any("loss" in line for line in read_lines(tmp_path / "run" / "metrics.jsonl"))
