"""Whole runs of families that a probe admits: with experts, with tensor parallelism, with PPO."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hybridrl.config import TinyModelConfig
from hybridrl.models.tiny import make_char_tokenizer

COMMAND = Path(sys.executable).with_name("hybridrl")


def model_of(family: str, folder: Path) -> Path:
    """A random model with a tokenizer, in a directory as one would download it."""
    tokenizer = make_char_tokenizer(TinyModelConfig().alphabet, 128)
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    torch.manual_seed(0)
    if family == "olmo2":
        model = Olmo2ForCausalLM(Olmo2Config(**settings))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings, **experts, head_dim=16))
    model.save_pretrained(folder / family)
    tokenizer.save_pretrained(folder / family)
    return folder / family


@pytest.mark.models
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        (
            "qwen3_moe",
            ["recipe.kl_coef=0.1", "trainer.layout.ep=2", "rollout.layout.tp=2"],
        ),
        ("olmo2", ["recipe=ppo", "trainer.layout.tp=2", "roles.critic.layout.tp=2"]),
    ],
)
def test_a_run(family: str, options: list[str], tmp_path: Path) -> None:
    """PPO has a critic and a reference of the family besides the actor, GRPO a reference."""
    run = tmp_path / "run"
    path = model_of(family, tmp_path)
    common = ["trainer.steps=2", "warm_start.steps=4", "cluster.ranks=2", f"run.dir={run}"]
    arguments = ["train", "experiment=spell_tiny", f"model.path={path}", *common, *options]
    done = subprocess.run(
        [COMMAND, *arguments], capture_output=True, text=True, check=False, timeout=800
    )
    assert done.returncode == 0, done.stderr[-2000:]
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [s["loss"] for s in steps if s["phase"] == "warm_start" and "loss" in s]
    assert losses[-1] < losses[0]
    final, info = AutoModelForCausalLM.from_pretrained(run / "final", output_loading_info=True)
    assert final.config.model_type == family
    assert not any(info.values()), info
