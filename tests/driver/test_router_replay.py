"""Whole runs that replay experts: of the same batches under every schedule, and refused in time."""

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.config import Config, ConfigError
from hybridrl.config.rollout import ENGINES, Engine

MOE = [
    "model.tiny.num_experts=4", "model.tiny.experts_per_token=2",
    "model.tiny.moe_intermediate_size=32", "trainer.router_replay=rollout",
]  # fmt: skip
LAYERS, K = 2, 2
RECIPE = """
import json
from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe

def tell(tokens, sampled, trained):
    return json.dumps((tokens.tolist(), sampled.tolist(), trained.tolist()))

@recipe("told")
def told(flow, cfg):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    samples = flow.actor.log_probs(samples)
    samples = samples.map(tell, ("tokens", "log_probs", "old_log_probs"), scalars=("told",))
    flow.actor.update(samples.by_group(advantages.group_relative), loss=losses.ClippedLoss())
"""
FUSED = ["schedule=fused", "schedule.migration_threshold=12"]
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def run_of(
    train_here: Train, long_tail: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Three steps on two ranks, of a recipe with the old policy's pass."""
    recipe = tmp_path_factory.mktemp("recipe") / "told.py"
    recipe.write_text(RECIPE)

    @functools.cache
    def run(*settings: str) -> Any:
        own = [*long_tail, *MOE, f"recipe={{target: '{recipe}:told'}}", *settings]
        return train_here(tmp_path_factory.mktemp("run"), *own)

    return run


@pytest.mark.layouts
@pytest.mark.parametrize("migration", ["recompute", pytest.param("kv", marks=pytest.mark.slow)])
def test_fused_trains_on_what_serial_trains_on(
    run_of: Callable[..., Any], check_same: Callable[..., None], migration: str
) -> None:
    """Samples migrate in the middle of their making and to the pass, and experts with them."""
    serial, fused = run_of(), run_of(*FUSED, f"schedule.migration={migration}")
    check_same(serial, fused)
    assert all(line["samples/migrated"] > 0 for line in fused.metrics)
    for run in (serial, fused):
        for step, line in zip(run.steps, run.metrics, strict=True):
            tokens = sum(sample.tokens - 1 for sample in step.samples)
            assert line["routed_experts_bytes"] == tokens * LAYERS * K
            assert all("routed_experts" in sample.tensors for sample in step.samples)


@pytest.mark.layouts
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_of_the_old_policys_pass(run_of: Callable[..., Any], dtype: str) -> None:
    """On the generation instance, or with weights of another format by the train engine."""
    settings = ["trainer.router_replay=trainer", f"rollout.dtype={dtype}", "trainer.steps=1"]
    run = run_of(*settings)
    (line,), (step,) = run.metrics, run.steps
    assert line["routed_experts_bytes"] == sum(s.tokens - 1 for s in step.samples) * LAYERS * K
    for sample in step.samples:
        _, sampled, trained = json.loads(sample.scalars["told"])
        assert sampled == pytest.approx(trained, abs=1e-4 if dtype == "float32" else 0.5)


@pytest.mark.layouts
def test_generation_in_another_format_trains_closer_with_its_experts(
    run_of: Callable[..., Any],
) -> None:
    """What router replay is for: bfloat16 against float32, the same samples.

    Among 32 experts many tokens meet another one, whatever this processor's bfloat16 rounds to.
    """
    settings = ["rollout.dtype=bfloat16", "trainer.steps=1", "model.tiny.num_experts=32"]
    with_replay, without = run_of(*settings), run_of(*settings, "trainer.router_replay=off")
    gaps = [run.metrics[0]["mismatch/kl"] for run in (with_replay, without)]
    assert gaps[0] < gaps[1]


@pytest.mark.slow
def test_a_resumed_run_replays_what_parked_samples_had(
    train_here: Train, long_tail: list[str], tmp_path: Path
) -> None:
    """A strict run that parks samples over a checkpoint goes on bit for bit."""
    settings = [
        *[setting for setting in long_tail if not setting.startswith("recipe=")], *MOE,
        "schedule=partial", "schedule.over_provision=2", "schedule.max_staleness=2",
        "deterministic=strict", "trainer.save_every=1",
    ]  # fmt: skip
    whole = train_here(tmp_path / "whole", *settings)
    checkpoint = whole.dir / "checkpoints/step_000002"
    files = (checkpoint / "resume").glob("samples_*.pt")
    records = [record for file in files for record in torch.load(file, weights_only=True)]
    assert any(record.get("routed_experts") is not None for record in records)
    resumed = train_here(tmp_path / "resumed", *settings, f"trainer.resume={checkpoint}")
    before, (after,) = whole.metrics[-1], resumed.metrics
    assert after["samples/resumed"] > 0
    for key in ("loss", "grad_norm", "routed_experts_bytes", "samples/resumed"):
        assert before[key] == after[key], key


def test_an_engine_that_returns_no_experts(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = replace(ENGINES[Engine.native], records_experts=False)
    monkeypatch.setitem(ENGINES, Engine.native, features)
    make_config(*MOE, "run.dir=x", "trainer.router_replay=trainer")
    with pytest.raises(ConfigError) as refused:
        make_config(*MOE, "run.dir=x")
    allowed = "off or trainer with rollout.engine=native"
    assert str(refused.value) == f"trainer.router_replay=rollout: wanted {allowed}"
