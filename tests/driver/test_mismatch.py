"""On real ranks: the mismatch is recorded each step, and a correction weighs the update."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FIGURES = [f"mismatch/{name}" for name in ("mean", "max", "kl", "ess_token", "ess_sequence")]


@pytest.mark.layouts
def test_the_recorded_mismatch_is_that_of_the_samples(
    train_here: Callable[..., Any], tiny_run: list[str], user_code: Path, tmp_path: Path
) -> None:
    """A rollout engine in bfloat16; `gap` is each sample's largest, by a pass of the trainer."""
    run = train_here(
        tmp_path / "run",
        *tiny_run,
        f"recipe={{target: '{user_code}:probe'}}",
        "cluster.ranks=2",
        "rollout.dtype=bfloat16",
        "trainer.steps=2",
        "trainer.optim.lr=0.05",
        "warm_start.steps=1",
    )
    supervised, *steps = run.metrics
    assert not [name for name in supervised if name in FIGURES]
    for line, step in zip(steps, run.steps[-2:], strict=True):
        gaps = [float(sample.scalars["gap"]) for sample in step.samples]
        assert line["mismatch/max"] == pytest.approx(max(gaps), abs=1e-5)
        assert 1e-4 < line["mismatch/mean"] < line["mismatch/max"] < 0.1
        assert 0 < line["mismatch/kl"] < line["mismatch/max"] ** 2
        assert 0.9 < line["mismatch/ess_sequence"] < line["mismatch/ess_token"] < 1
        assert not [name for name in line if name.startswith("staleness/")]


@pytest.mark.layouts
def test_a_correction_weighs_the_update(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    run = train_here(
        tmp_path / "run",
        *tiny_run,
        "schedule=fused",
        "cluster.ranks=2",
        "rollout.dtype=bfloat16",
        "trainer.steps=2",
        "trainer.mini_batches=2",
        "recipe.correction.old_log_probs=trainer",
        "recipe.correction.weights=mask",
        "recipe.correction.level=sequence",
        "recipe.correction.bound=1.0003",
    )
    for line in run.metrics:
        assert set(FIGURES) <= line.keys()
        assert 0 < line["correction_cut"] < 1
        # What is kept is within the bound of 1.
        assert line["correction_weight"] == pytest.approx(1 - line["correction_cut"], abs=0.003)
    assert run.stored == [0, 0]


@pytest.mark.layouts
def test_older_tokens_are_counted_apart(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """Where responses go on under newer weights, `mismatch` is still that of equal weights.

    With VCPO's baseline and its factor of the learning rate, which is that of the worst batch.
    """
    partial = ["schedule=partial", "schedule.over_provision=2", "schedule.max_staleness=2"]
    vcpo = ["recipe=grpo", "recipe.group_size=4", "recipe.correction.old_log_probs=trainer"]
    vcpo += ["recipe.correction.weights=truncate", "recipe.correction.step_scale=sqrt"]
    vcpo += ["recipe.baseline=minimum_variance", "recipe.std_normalize=false"]
    ours = ("schedule", "rollout.over", "rollout.max_st", "trainer.steps", "cluster", "recipe")
    kept = [setting for setting in long_tail if not setting.startswith(ours)]
    run = train_here(tmp_path / "run", *kept, *partial, *vcpo, "trainer.steps=4", "cluster.ranks=2")
    apart = 0
    for line, step in zip(run.metrics, run.steps, strict=True):
        present = max(span.version for sample in step.samples for span in sample.spans)
        fresh = [all(s.version == present for s in sample.spans) for sample in step.samples]
        assert ("mismatch/max" in line) == any(fresh)
        assert ("staleness/max" in line) == (not all(fresh))
        if "mismatch/max" in line:
            assert line["mismatch/max"] < 1e-4  # the native engine in the trainer's own format
        if not any(fresh):
            assert line["effective_share"] == pytest.approx(line["staleness/ess_sequence"])
        assert line["lr_scale"] == pytest.approx(line["effective_share"] ** 0.5)
        weighed = False
        for group in {sample.id.prompt for sample in step.samples}:
            mine = [s.scalars for s in step.samples if s.id.prompt == group]
            weights = [s["ratio"] ** 2 * s["length"] for s in mine]
            mean = sum(w * s["reward"] for w, s in zip(weights, mine, strict=True)) / sum(weights)
            for scalars in mine:
                advantage = scalars["advantage"]
                assert advantage == pytest.approx(scalars["reward"] - mean, rel=1e-4, abs=1e-6)
            weighed |= max(weights) > 1.01 * min(weights)
        assert weighed
        if "staleness/max" in line:
            apart += 1
            assert line["staleness/max"] > 1e-3
    assert apart
