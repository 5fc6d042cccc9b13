"""PPO-EWMA's proximal policy on real ranks: an average of the actor's weights that scores."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hybridrl.config import ConfigError
from hybridrl.preflight.prepare import prepare

DECAY = 0.7
RECIPE = f"""
import json
from hybridrl.algorithms import advantages, losses
from hybridrl.flow import recipe
def tell(*fields):
    return json.dumps([field.tolist() for field in fields])
@recipe("averaged")
def averaged(flow, cfg):
    samples = flow.reward.score(flow.actor.generate(flow.prompts, num_samples=4))
    slow = flow.copy(flow.actor, update="ewma", decay={DECAY})
    samples = slow.log_probs(samples, name="old_log_probs")
    samples = samples.map(tell, ("tokens", "old_log_probs"), scalars=("told",))
    samples = samples.by_group(advantages.group_relative)
    flow.actor.update(samples, loss=losses.ClippedLoss())
"""


@pytest.mark.layouts
@pytest.mark.parametrize(
    "more",
    [
        [],
        pytest.param(
            ["schedule=fused", "rollout.layout.tp=2", "cluster.ranks=4"], marks=pytest.mark.slow
        ),
        ["schedule=periodic", "cluster.pools.rollout=1"],
        ["schedule=periodic", "cluster.pools.rollout=1", "cluster.ranks=3"],
        [
            "schedule=serial",
            "cluster.pools.rollout=1",
            "cluster.ranks=3",
            "trainer.layout.pp=2",
            "model.tiny.num_layers=2",
        ],
    ],
    ids=["", "fused, tp 2", "apart", "apart, fsdp 2", "apart, pp 2"],
)
def test_it_is_the_average_of_the_checkpoints(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path, more: list[str]
) -> None:
    """decay average + (1 - decay) weights after every step, computed by hand from what is saved."""
    file = tmp_path / "averaged.py"
    file.write_text(RECIPE)
    settings = [setting for setting in tiny_run if not setting.startswith("recipe")]
    run = train_here(
        tmp_path / "run", *settings, f"recipe={{target: '{file}:averaged'}}", "trainer.steps=4",
        "trainer.save_every=1", "trainer.keep_last=9", "trainer.optim.lr=2e-2",
        "eval.sets.main.every=null",
        "eval.sets.main.num_prompts=2", *more,
    )  # fmt: skip
    start = run.dir / "start"
    average = load_file(start / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(start)
    moved = []
    for number, step in enumerate(run.steps):
        if number:
            path = run.dir / "checkpoints" / f"step_{number:06d}" / "model.safetensors"
            for name, weights in load_file(path).items():
                average[name] = DECAY * average[name] + (1 - DECAY) * weights
        model.load_state_dict(average, strict=False)
        for sample in step.samples:
            tokens, scored = map(torch.tensor, json.loads(sample.scalars["told"]))
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, -len(scored) - 1 : -1]
            wanted = logits.log_softmax(-1).gather(-1, tokens[-len(scored) :, None])[:, 0]
            torch.testing.assert_close(scored, wanted, atol=2e-5, rtol=0)
        moved.append(abs(run.metrics[number]["approx_kl"]))
    assert moved[0] < 1e-6 < 1e-4 < moved[-1]  # the average lags behind what samples


@pytest.mark.layouts
def test_ppo_ewma_is_a_setting(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """A recipe with a ratio can take an average of its weights as the old policy.

    The weight from the rollout's policy to the average is bounded. The reference is a second
    average with its own decay.
    """
    settings = [setting for setting in tiny_run if not setting.startswith("recipe")]
    ewma = [
        "recipe=grpo",
        "recipe.correction.old_log_probs=ewma",
        "recipe.correction.ewma_decay=0.99",
    ]
    ewma += [
        "recipe.correction.weights=truncate",
        "trainer.mini_batches=2",
        "trainer.optim.lr=2e-2",
    ]
    ewma += ["recipe.kl_coef=0.01", "recipe.reference_ema_decay=0.3"]
    run = train_here(
        tmp_path / "run", *settings, *ewma, "trainer.steps=3", "eval.sets.main.every=null"
    )
    weights = [line["correction_weight"] for line in run.metrics]
    assert weights[0] == pytest.approx(1, abs=1e-5)
    assert abs(weights[-1] - 1) > 1e-3
    # Both are k3 of the tokens: the reference has followed further than the old policy.
    assert 1e-6 < run.metrics[-1]["kl"] < 0.7 * run.metrics[-1]["approx_kl"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["recipe.correction.ewma_decay=1", "recipe.correction.old_log_probs=ewma"],
            "^recipe.correction.ewma_decay=1.0: wanted ab",
        ),
        (
            ["recipe.correction.weights=mask"],
            "^recipe.correction.weights=mask: wanted none, or recipe.correction.old",
        ),
    ],
)
def test_wrong_settings(
    settings: list[str], message: str, make_config: Callable[..., Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(make_config(*settings, f"run.dir={tmp_path / 'run'}"))
