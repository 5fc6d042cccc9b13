"""`deterministic=strict` on real ranks: the same bits, whatever the schedule and the moves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

FUSED = ["schedule=fused", "schedule.migration_threshold=12"]
STRICT = "deterministic=strict"
# As users train: AdamW divides by gradients near zero, so a last bit somewhere reaches everything.
ADAM = [
    "trainer.optim.lr=1e-2", "trainer.optim.eps=1e-8", "trainer.optim.clip_grad_norm=1.0",
    "trainer.mini_batches=2",
]  # fmt: skip


@pytest.fixture
def run(train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path) -> Callable[..., Any]:
    def start(name: str, *overrides: str) -> Any:
        changed = tuple(setting.partition("=")[0] + "=" for setting in ADAM)
        kept = [setting for setting in long_tail if not setting.startswith(changed)]
        return train_here(tmp_path / name, *kept, *ADAM, "cluster.ranks=2", *overrides)

    return start


def weights(run: Any) -> dict[str, torch.Tensor]:
    return load_file(run.dir / "final" / "model.safetensors")


def different(one: Any, other: Any) -> list[str]:
    """Parameters whose bits differ, and what of the samples does."""
    a, b = weights(one), weights(other)
    differences = [name for name in a if not torch.equal(a[name], b[name])]
    for step, (mine, others) in enumerate(zip(one.steps, other.steps, strict=True)):
        for x, y in zip(mine.samples, others.samples, strict=True):
            same = {**x.scalars, "version": x.spans} == {**y.scalars, "version": y.spans}
            differences += [f"step {step}: sample {x.id}"] * (not same)
    return differences


def changed(run: Any) -> bool:
    start = load_file(run.dir / "start" / "model.safetensors")
    return all(not torch.equal(start[name], value) for name, value in weights(run).items())


@pytest.mark.layouts
def test_serial_and_fused_are_equal_bit_for_bit(run: Callable[..., Any]) -> None:
    """After three steps: every parameter, and each sample's tokens, log-probabilities, reward."""
    serial = run("serial", STRICT)
    assert changed(serial)
    fused = run("fused", STRICT, *FUSED, "schedule.migration=kv")
    assert all(line["samples/migrated"] > 0 for line in fused.metrics)
    assert different(serial, fused) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", [[], ["cluster.ranks=4", "rollout.layout.tp=2"]])
def test_moves_and_layouts(run: Callable[..., Any], layout: list[str]) -> None:
    """By recomputation, where rates are measured, and again: runs differ in timing alone."""
    serial = run("serial", STRICT, *layout)
    for name in ("recompute", "kv", "auto", "again"):
        migration = "auto" if name == "again" else name
        fused = run(name, STRICT, *FUSED, f"schedule.migration={migration}", *layout)
        assert all(line["samples/migrated"] > 0 for line in fused.metrics)
        assert different(serial, fused) == [], name
    assert different(serial, run("serial_again", STRICT, *layout)) == []


@pytest.mark.slow
def test_without_it_rounding_differs(run: Callable[..., Any]) -> None:
    """What `strict` is for: samples that ride in other batches have other last bits."""
    serial, fused = run("serial"), run("fused", *FUSED)
    assert different(serial, fused) != []
