"""On real ranks, guessed tokens change no batch of a schedule that counts decode steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PARTIAL = ["schedule=partial", "schedule.over_provision=2"]
PACKED = ["schedule=packed", "schedule.limit_tokens=24"]


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("schedule", "speculate"),
    [(["schedule=serial"], "3"), (["schedule=serial"], "auto"), (PARTIAL, "3"), (PACKED, "3")],
    ids=["serial", "auto", "partial", "packed"],
)
def test_steps_are_those_without_drafts(
    train_here: Callable[..., Any], long_tail: list[str], check_same: Callable[..., None],
    tmp_path: Path, schedule: list[str], speculate: str,
) -> None:  # fmt: skip
    """Samples are parked and resumed between guesses, under new weights."""
    settings = [*long_tail, "cluster.ranks=2", *schedule]
    plain = train_here(tmp_path / "plain", *settings)
    drafted = train_here(tmp_path / "drafted", *settings, f"rollout.speculate={speculate}")
    check_same(plain, drafted)
    assert all("samples/drafted_tokens" not in line for line in plain.metrics)
    if speculate != "auto":  # it may find that guesses cost more than they save
        assert sum(line["samples/drafted_tokens"] for line in drafted.metrics) > 0
    assert not counts_of(plain, 1)
    for line in drafted.metrics[:-1]:  # the last step's name is on those of the evaluation, too
        counts = counts_of(drafted, line["step"])
        assert sum(right for right, _ in counts) == line.get("samples/accepted_tokens", 0)
        assert sum(tried for _, tried in counts) == line.get("samples/drafted_tokens", 0)


def counts_of(run: Any, step: int) -> list[tuple[int, int]]:
    """Right guesses and all of each of a step's calls that the trace names `verify 5/8`."""
    names = [s.name for s in run.spans if s.step == step and s.name.startswith("verify ")]
    counts = [name.removeprefix("verify ").split("/") for name in names]
    return [(int(right), int(tried)) for right, tried in counts]
