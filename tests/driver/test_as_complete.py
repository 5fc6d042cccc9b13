"""Steps that train groups as they complete, in real runs: versions, log-probabilities, resumes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver.test_async import (
    LAYOUTS,
    PROMPTS,
    STRICT,
    check_log_probs,
    different,
    start,
    weights,
    write_settings,
)

from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.long

AS_COMPLETE = [
    "schedule=async", "schedule.max_staleness=2", "schedule.batches=as_complete",
    "rollout.decode_steps=2",
]  # fmt: skip
IN_FLIGHT = "schedule.new_weights=in_flight"
FREE = "schedule.new_weights=when_free"


def check(run: Any, staleness: int, updates: int = 1) -> None:
    """A step trains as many groups as it wants, each once, and no token is older than allowed."""
    reached, seen = 0, list[Any]()
    for number, (step, line) in enumerate(zip(run.steps, run.metrics, strict=True)):
        ids = [sample.id for sample in step.samples]
        assert ids == sorted(ids)
        assert len({id.prompt for id in ids}) == PROMPTS
        seen += ids
        spans = [span for sample in step.samples for span in sample.spans if span.trained]
        ages = [number - span.version // updates for span in spans]
        assert 0 <= min(ages) <= max(ages) <= staleness
        assert line["samples/staleness"] == max(ages)
        reached = max(reached, *ages)
    assert len({*seen}) == len(seen)
    assert reached > 0
    record = read_lines(run.dir / "versions.jsonl")
    trained = [{tuple(id) for id, _ in line["samples"]} for line in record]
    assert trained == [{tuple(s.id) for s in step.samples} for step in run.steps]


@pytest.mark.parametrize(
    ("weights_come", "layout"),
    [
        (FREE, "1 + 1"),
        pytest.param(IN_FLIGHT, "1 + 1", marks=pytest.mark.layouts),
        pytest.param(FREE, "conversations", marks=pytest.mark.layouts),
        pytest.param(IN_FLIGHT, "conversations, two instances", marks=pytest.mark.layouts),
        pytest.param(FREE, "one trains, three generate", marks=pytest.mark.layouts),
        pytest.param(FREE, "2 + 2", marks=pytest.mark.layouts),
        pytest.param(IN_FLIGHT, "fsdp 2, tp 2", marks=pytest.mark.layouts),
        pytest.param(FREE, "adapters", marks=pytest.mark.layouts),
        pytest.param(IN_FLIGHT, "adapters", marks=pytest.mark.layouts),
    ],
)
def test_groups_are_trained_as_they_complete(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    weights_come: str,
    layout: str,
) -> None:
    run = start(
        train_here, long_tail, tmp_path / "run", *AS_COMPLETE, weights_come, *LAYOUTS[layout]
    )
    check(run, 2)
    check_log_probs(run)
    if weights_come == FREE:
        for sample in (sample for step in run.steps for sample in step.samples):
            assert len({span.version for span in sample.spans if span.trained}) == 1


@pytest.mark.wide
@pytest.mark.vllm
@pytest.mark.parametrize("weights_come", [FREE, IN_FLIGHT])
def test_groups_of_vllm_are_trained_as_they_complete(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, weights_come: str
) -> None:
    vllm = ["rollout=vllm", "model.tiny.head_dim=32"]  # its attention has no smaller ones
    run = start(train_here, long_tail, tmp_path / "run", *AS_COMPLETE, weights_come, *vllm)
    check(run, 2)
    check_log_probs(run)


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("weights_come", [FREE, IN_FLIGHT])
def test_a_record_is_followed_bit_for_bit(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, weights_come: str
) -> None:
    """By two instances in place of one, and resumed."""
    own = [*STRICT, *AS_COMPLETE, weights_come]
    first = start(train_here, long_tail, tmp_path / "first", *own)
    check(first, 2, updates=2)
    write_settings(first, long_tail, *own)
    own += [f"schedule.follow={first.dir}", "cluster.ranks=3", "cluster.pools.rollout=2"]
    again = start(train_here, long_tail, tmp_path / "again", *own)
    assert different(first, again) == []
    point = again.dir / "checkpoints" / "step_000002"
    resumed = start(train_here, long_tail, tmp_path / "resumed", *own, f"trainer.resume={point}")
    a, b = weights(first), weights(resumed)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.layouts
@pytest.mark.parametrize("weights_come", [pytest.param(FREE, marks=pytest.mark.wide), IN_FLIGHT])
def test_a_resumed_run_trains_each_group_once(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path, weights_come: str
) -> None:
    """With what the checkpoint had of unfinished samples, under the weights that made it."""
    whole = start(train_here, long_tail, tmp_path / "whole", *AS_COMPLETE, weights_come)
    point = whole.dir / "checkpoints" / "step_000002"
    own = [*AS_COMPLETE, weights_come, f"trainer.resume={point}"]
    rest = start(train_here, long_tail, tmp_path / "rest", *own)
    prompts = [s.id.prompt for step in [*whole.steps[:2], *rest.steps] for s in step.samples]
    assert len({*prompts}) * 4 == len(prompts)
    assert len({*prompts}) == 5 * PROMPTS


def test_dapo_trains_groups_that_its_filter_keeps(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """A group without a spread of rewards frees its place: steps are as full as they can be."""
    own = [setting for setting in tiny_run if not setting.startswith(("recipe", "reward"))]
    own += [
        "recipe=dapo", "recipe.max_rounds=3", "recipe.group_size=2",
        "reward=regex", "reward.pattern='(?s)[a-m].*'", "reward.extract=null",
        "schedule=async", "schedule.max_staleness=2",
        "schedule.batches=as_complete", "cluster.ranks=2", "cluster.pools.rollout=1",
        "trainer.steps=4", "trainer.prompts_per_step=4", "eval.sets.main.every=null",
    ]  # fmt: skip
    run = train_here(tmp_path / "run", *own)
    per_step = 4
    seen = [{s.id.prompt for s in step.dispatched} for step in run.steps]
    kept = [{s.id.prompt for s in step.samples} for step in run.steps]
    for of_step, trained in zip(seen, kept, strict=True):
        assert len(trained) == per_step or len(of_step) == 3 * per_step
    assert sum(map(len, seen)) == len(set().union(*seen))
    assert any(len(of_step) > per_step for of_step in seen)
    assert max(line["samples/staleness"] for line in run.metrics) > 0
