"""Runs with adapters: what is refused before a process starts, and that the weights learn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridrl.config import Config, ConfigError
from hybridrl.driver import train as controller_train
from hybridrl.preflight.prepare import prepare
from hybridrl.telemetry.records import read_lines

REFUSED = {
    "actor.lora.rank=-1": r"^actor\.lora\.rank=-1: wanted 0 \(all weights are trained\) or above",
    "actor.lora.alpha=0": r"^actor\.lora\.alpha=0: wanted 1 or more",
    "roles.critic.lora.dropout=1.0": r"^roles\.critic\.lora\.dropout=1\.0: wanted 0 to below 1",
    "actor.lora.rank=4 actor.lora.dropout=0.1 trainer.layout.tp=2 cluster.ranks=2": (
        r"^actor\.lora\.dropout=0\.1: wanted 0 with tensor parallelism \(tp=2\)"
    ),
    "actor.lora.target_modules=[]": r"^actor\.lora\.target_modules=\[\]: wanted \[all-linear\], or",
    "actor.lora.rank=4 actor.lora.target_modules=[q_proj,qproj]": (
        r"^actor\.lora\.target_modules=qproj: wanted all-linear, or linear layers of a block: "
        r"down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$"
    ),
    "recipe=ppo roles.critic.lora.rank=4 roles.critic.lora.target_modules=[lm_head]": (
        r"^roles\.critic\.lora\.target_modules=lm_head: wanted all-linear, or linear layers of a "
        r"block: "
    ),
    "recipe=grpo recipe.correction.old_log_probs=ewma actor.lora.rank=4": (
        r"^actor\.lora\.rank=4: wanted 0: the recipe keeps a moving average \(\w+\), which adapters"
    ),
}


@pytest.mark.parametrize(
    "settings",
    [pytest.param(x, marks=pytest.mark.slow if "ppo" in x else ()) for x in REFUSED],
)
def test_what_cannot_be_is_one_line(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path, settings: str
) -> None:
    kept = [s for s in tiny_run if not s.startswith("recipe") or "recipe" not in settings]
    with pytest.raises(ConfigError, match=REFUSED[settings]) as caught:
        prepare(make_config(*kept, f"run.dir={tmp_path / 'run'}", *settings.split()))
    assert "\n" not in str(caught.value)


@pytest.mark.layouts
def test_a_short_run_trains_adapters_of_actor_and_critic(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path
) -> None:
    """On one rank, in this process."""
    kept = [setting for setting in tiny_run if not setting.startswith("recipe")]
    controller_train.train(
        make_config(
            *kept, "recipe=ppo", "recipe.num_samples=4", "actor.lora.rank=2",
            "roles.critic.lora.rank=2",
            "roles.critic.optim.lr=0.01", "trainer.steps=2", "eval.sets.main.num_prompts=2",
            "eval.sets.main.every=null",
            "cluster=processes", "cluster.ranks=1", f"run.dir={tmp_path}",
        )
    )  # fmt: skip
    start, final = (load_file(tmp_path / f / "model.safetensors") for f in ("start", "final"))
    moved = {name for name in start if not torch.equal(start[name], final[name])}
    assert moved == {name for name in start if name.endswith("proj.weight")}
    critic = load_file(tmp_path / "final/critic/adapter/adapter_model.safetensors")
    assert critic["base_model.model.score.weight"].any()
    assert any(tensor.any() for name, tensor in critic.items() if "lora_B" in name)


def switched(run: Any) -> list[dict[str, Any]]:
    return [event for event in read_lines(run.dir / "events.jsonl") if event["kind"] == "switch"]


@pytest.mark.slow
def test_a_run_with_adapters(
    train: Callable[..., Any],
    long_tail: list[str],
    check_same: Callable[..., None],
    tmp_path: Path,
) -> None:
    """It learns, samples that move learn the same, and after the first switch adapters move."""
    lora = ["actor.lora.rank=4", "actor.lora.alpha=8", "cluster.ranks=2"]
    serial = train(tmp_path / "serial", *long_tail, *lora)
    fused = train(
        tmp_path / "fused", *long_tail, *lora, "schedule=fused", "schedule.migration_threshold=12"
    )
    check_same(serial, fused)
    assert all(line["samples/migrated"] > 0 for line in fused.metrics)
    start, final = (load_file(serial.dir / f / "model.safetensors") for f in ("start", "final"))
    linear = [name for name in start if name.endswith("proj.weight")]
    assert {name for name in start if not torch.equal(start[name], final[name])} == set(linear)
    first, *later = switched(serial)
    adapters = 4 * 4 * sum(sum(start[name].shape) for name in linear)
    assert len(later) >= 3
    assert {event["bytes"] for event in later} == {adapters}
    assert all(event["bytes_theory"] == event["bytes"] for event in later)
    weights = 4 * sum(tensor.numel() for tensor in start.values())
    assert weights + adapters <= first["bytes"] < 1.05 * weights + adapters
    (event,) = [e for e in read_lines(serial.dir / "events.jsonl") if e["kind"] == "ranks"]
    assert event["trained_parameters"] == adapters // 4
    merged = AutoModelForCausalLM.from_pretrained(serial.dir / "final")
    base = AutoModelForCausalLM.from_pretrained(serial.dir / "start")
    peft = PeftModel.from_pretrained(base, serial.dir / "final" / "adapter")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, peft(ids).logits, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_critics_and_reward_models_with_adapters(
    train: Callable[..., Any], long_tail: list[str], tiny_run: list[str], tmp_path: Path
) -> None:
    """Beside an actor with adapters, after a warm start, and a reward model on its own."""
    kept = [setting for setting in long_tail if not setting.startswith("recipe")]
    ppo = ["recipe=ppo", "recipe.num_samples=4", "actor.lora.rank=2", "roles.critic.lora.rank=2"]
    run = train(
        tmp_path / "ppo", *kept, *ppo, "warm_start.steps=1", "roles.critic.optim.lr=0.01",
        "cluster.ranks=2", "trainer.steps=2",
    )  # fmt: skip
    for folder in ("final", "final/critic"):
        adapter = load_file(run.dir / folder / "adapter" / "adapter_model.safetensors")
        moved = {name for name, tensor in adapter.items() if "lora_B" in name and tensor.any()}
        assert len(moved) == 2 * 7
    rm = [s for s in tiny_run if not s.startswith(("recipe", "reward"))]
    run = train(tmp_path / "rm", *rm, "recipe=rm", "roles.reward.lora.rank=2", "trainer.steps=2")
    reward = AutoModelForSequenceClassification.from_pretrained(run.dir / "final" / "reward")
    assert reward.config.num_labels == 1
    assert (run.dir / "final" / "reward" / "adapter" / "adapter_config.json").is_file()
