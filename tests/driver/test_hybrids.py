"""Whole runs of a model with recurrent layers: the equalities that runs of dense models have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from resumed_runs import check_same, ended
from safetensors.torch import load_file

HYBRID = ["model=tiny_hybrid", "model.tiny.num_layers=2", "model.tiny.attention_interval=2"]
STRICT = [
    *HYBRID, "deterministic=strict", "trainer.optim.lr=1e-2", "trainer.optim.eps=1e-8",
    "cluster.ranks=2",
]  # fmt: skip


def hybrid(settings: list[str], *overrides: str) -> list[str]:
    """The settings without those that `overrides` and the model set."""
    own = {x.partition("=")[0] for x in (*STRICT, *overrides)}
    return [*(x for x in settings if x.partition("=")[0] not in own), *STRICT, *overrides]


@pytest.mark.layouts
def test_fused_is_serial_with_states_that_move(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """Each sample's tokens and log-probabilities, and every weight, bit for bit."""
    moves = ["schedule=fused", "schedule.migration_threshold=12", "schedule.migration=kv"]
    steps = "trainer.steps=2"
    serial = train_here(tmp_path / "serial", *hybrid(long_tail, steps))
    fused = train_here(tmp_path / "fused", *hybrid(long_tail, steps, *moves))
    assert all(line["samples/migrated"] > 0 for line in fused.metrics)
    a, b = (load_file(run.dir / "final" / "model.safetensors") for run in (serial, fused))
    assert any("linear_attn" in name for name in a)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    for mine, others in zip(serial.steps, fused.steps, strict=True):
        assert [x.scalars for x in mine.samples] == [x.scalars for x in others.samples]


@pytest.mark.wide
@pytest.mark.layouts
def test_a_resumed_run_is_the_whole_one(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """Samples are carried over to later steps; Muon has the mixers' matrices."""
    partial = ["schedule=partial", "schedule.over_provision=2", "schedule.max_staleness=2"]
    saved = ["trainer.steps=4", "trainer.save_every=2", "trainer.optim.name=muon"]
    settings = hybrid(tiny_run, *partial, *saved, "eval.sets.main.num_prompts=2")
    train_here(tmp_path / "run", *settings)
    copy = ended(tmp_path / "run", tmp_path / "copy", 2)
    assert len(train_here(copy, *settings, "trainer.resume=auto").steps) == 2
    check_same(tmp_path / "run", copy, tmp_path)
