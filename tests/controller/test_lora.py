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
from hybridrl.controller.prepare import prepare
from hybridrl.telemetry.records import read_lines

REFUSED = {
    "actor.lora.rank=-1": r"^actor\.lora\.rank=-1: wanted 0 \(all weights are trained\) or above",
    "actor.lora.alpha=0": r"^actor\.lora\.alpha=0: wanted 1 or more",
    "critic.lora.dropout=1.0": r"^critic\.lora\.dropout=1\.0: wanted 0 to below 1",
    "actor.lora.rank=4 actor.lora.dropout=0.1 trainer.layout.tp=2 cluster.ranks=2": (
        r"^actor\.lora\.dropout=0\.1: wanted 0 with tensor parallelism \(tp=2\)"
    ),
    "actor.lora.target_modules=[]": r"^actor\.lora\.target_modules=\[\]: wanted \[all-linear\], or",
    "actor.lora.rank=4 actor.lora.target_modules=[q_proj,qproj]": (
        r"^actor\.lora\.target_modules=qproj: wanted all-linear, or linear layers of a block: "
        r"down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj$"
    ),
    "recipe=ppo critic.lora.rank=4 critic.lora.target_modules=[lm_head]": (
        r"^critic\.lora\.target_modules=lm_head: wanted all-linear, or linear layers of a block: "
    ),
    "recipe=grpo recipe.old_log_probs=ewma actor.lora.rank=4": (
        r"^actor\.lora\.rank=4: wanted 0: the recipe keeps a moving average \(\w+\), which adapters"
    ),
}


@pytest.mark.parametrize("settings", REFUSED, ids=str)
def test_what_cannot_be_is_one_line(
    make_config: Callable[..., Config], tiny_run: list[str], tmp_path: Path, settings: str
) -> None:
    kept = [s for s in tiny_run if not s.startswith("recipe") or "recipe" not in settings]
    with pytest.raises(ConfigError, match=REFUSED[settings]) as caught:
        prepare(make_config(*kept, f"run.dir={tmp_path / 'run'}", *settings.split()))
    assert "\n" not in str(caught.value)
