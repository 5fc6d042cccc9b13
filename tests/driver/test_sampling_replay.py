"""Whole runs with truncated sampling: the distribution that is drawn from is the one trained."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.config import Config, ConfigError

TOP = ["rollout.top_k=6", "rollout.top_p=0.9"]
RECIPE = """
import json
from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe

def tell(tokens, *scores):
    return json.dumps((tokens.tolist(), *(x.tolist() for x in scores)))

@recipe("told")
def told(flow, cfg):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    samples = flow.reference.log_probs(flow.actor.log_probs(samples))
    fields = ("tokens", "log_probs", "old_log_probs", "reference_log_probs")
    samples = samples.map(tell, fields, scalars=("told",))
    samples = samples.by_group(advantages.group_relative)
    flow.actor.update(samples, loss=losses.ClippedLoss(kl_coef=0.2, entropy_coef=0.01))
"""
Train = Callable[..., Any]


@pytest.fixture(scope="module")
def run_of(
    train_here: Train, long_tail: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """Three steps on two ranks, of a recipe with the passes of the old policy and a reference."""
    recipe = tmp_path_factory.mktemp("recipe") / "told.py"
    recipe.write_text(RECIPE)

    @functools.cache
    def run(*settings: str) -> Any:
        own = [*long_tail, f"recipe={{target: '{recipe}:told'}}", *settings]
        return train_here(tmp_path_factory.mktemp("run"), *own)

    return run


def scores_of(sample: Any) -> list[torch.Tensor]:
    """Log-probabilities of a response: as recorded, of the old policy, of the reference."""
    _, *scores = json.loads(sample.scalars["told"])
    return [torch.tensor(values) for values in scores]


LAYOUTS = {
    "one rank each": [],
    "generation tp": ["rollout.layout.tp=2"],
    "training tp": ["trainer.layout.tp=2", "trainer.layout.fsdp=1"],
    "training pp": ["trainer.layout.pp=2", "trainer.layout.fsdp=1"],
    "chunks": ["trainer.chunk_tokens=16", "trainer.max_tokens_per_micro_batch=16"],
    "ranks that generate alone": ["schedule=periodic", "cluster.pools.rollout=1"],
    "drafts": ["rollout.speculate=3"],
}


@pytest.mark.layouts
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_ratios_are_one_at_a_learning_rate_of_zero(
    run_of: Callable[..., Any], layout: list[str]
) -> None:
    """The old policy's pass, a reference with the actor's weights and the trainer agree."""
    run = run_of("trainer.optim.lr=1e-30", "trainer.steps=2", *TOP, *layout)
    assert len(run.steps) == 2
    for line, step in zip(run.metrics, run.steps, strict=True):
        assert line["mismatch/max"] < 1e-5
        assert line["ratio"] == pytest.approx(1, abs=1e-5)
        assert line["kl"] == pytest.approx(0, abs=1e-8)
        # Of six tokens at most.
        assert 0 < line["entropy"] < 1.8
        for sample in step.samples:
            assert "kept_ids" in sample.tensors
            recorded, *others = scores_of(sample)
            assert all((recorded - other).abs().max() < 1e-5 for other in others)


@pytest.mark.layouts
def test_without_replay_the_distribution_is_whole(run_of: Callable[..., Any]) -> None:
    """Tokens are equal, each is less probable, and nothing is recorded."""
    settings = ["trainer.optim.lr=1e-30", "trainer.steps=2", *TOP]
    replayed, whole = run_of(*settings), run_of(*settings, "rollout.sampling_replay=off")
    gained = []
    for one, other in zip(replayed.steps, whole.steps, strict=True):
        for a, b in zip(one.samples, other.samples, strict=True):
            assert "kept_ids" not in b.tensors
            assert json.loads(a.scalars["told"])[0] == json.loads(b.scalars["told"])[0]
            gained.append(scores_of(a)[0] - scores_of(b)[0])
    gains = torch.cat(gained)
    assert gains.min() > -1e-5
    assert gains.mean() > 0.1
    assert all(
        x["entropy"] < y["entropy"] for x, y in zip(replayed.metrics, whole.metrics, strict=True)
    )


@pytest.mark.layouts
def test_nothing_is_recorded_where_nothing_is_truncated(run_of: Callable[..., Any]) -> None:
    run = run_of("trainer.steps=1", "rollout.repetition_penalty=1.1")
    assert not any("kept_ids" in sample.tensors for sample in run.steps[0].samples)


@pytest.mark.wide
@pytest.mark.layouts
@pytest.mark.parametrize("migration", ["recompute", "kv"])
def test_fused_trains_on_what_serial_trains_on(
    run_of: Callable[..., Any], check_same: Callable[..., None], migration: str
) -> None:
    """Samples migrate in the middle of their making and to the passes, and kept ids with them."""
    fused = ["schedule=fused", "schedule.migration_threshold=12", f"schedule.migration={migration}"]
    serial, moved = run_of(*TOP, "schedule=serial"), run_of(*TOP, *fused)
    check_same(serial, moved)
    assert all(line["samples/migrated"] > 0 for line in moved.metrics)


@pytest.mark.slow
def test_a_resumed_run_has_what_parked_samples_had(
    train_here: Train, long_tail: list[str], tmp_path: Path
) -> None:
    """A strict run that parks samples over a checkpoint goes on bit for bit."""
    settings = [
        *[setting for setting in long_tail if not setting.startswith("recipe=")],
        "rollout.top_k=20", "rollout.min_p=0.01", "recipe.group_size=2",
        "schedule=partial", "schedule.over_provision=2", "schedule.max_staleness=2",
        "deterministic=strict", "trainer.save_every=1",
    ]  # fmt: skip
    whole = train_here(tmp_path / "whole", *settings)
    checkpoint = whole.dir / "checkpoints/step_000002"
    files = (checkpoint / "resume").glob("samples_*.pt")
    records = [record for file in files for record in torch.load(file, weights_only=True)]
    assert any(record.get("kept_ids") is not None for record in records)
    resumed = train_here(tmp_path / "resumed", *settings, f"trainer.resume={checkpoint}")
    before, (after,) = whole.metrics[-1], resumed.metrics
    assert after["samples/resumed"] > 0
    for key in ("loss", "grad_norm", "entropy", "samples/resumed"):
        assert before[key] == after[key], key


REFUSED = {
    "rollout.top_p=0.9": "rollout.top_k=0: wanted 1 to 1024 with rollout.top_p=0.9",
    "rollout.min_p=0.1": "rollout.top_k=0: wanted 1 to 1024 with rollout.min_p=0.1",
    "rollout.top_k=2000": "rollout.top_k=2000: wanted 1 to 1024 with rollout.top_k=2000",
    "rollout.top_k=5 rollout.temperature=0": "rollout.temperature=0.0: wanted above 0",
}


@pytest.mark.parametrize("settings", REFUSED)
def test_what_cannot_be_recorded(make_config: Callable[..., Config], settings: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make_config("run.dir=x", *settings.split())
    assert str(refused.value).startswith(REFUSED[settings])
    assert "rollout.sampling_replay=off" in str(refused.value)
    make_config("run.dir=x", *settings.split(), "rollout.sampling_replay=off")
