"""Supervised training on whole conversations: the loss is that of the assistant's tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import TinyModelConfig
from hybridrl.models.tiny import make_tiny_model

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{% else %}{{ m.role[0] }}:{{ m.content }}>{% endif %}{% endfor %}"
)
NUM, HELD_OUT = 6, 1


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has a chat template with marks."""
    path = tmp_path_factory.mktemp("models") / "chat"
    shape = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    make_tiny_model(path, TinyModelConfig(hidden_size=32, intermediate_size=64, **shape), seed=0)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def conversation(n: int) -> list[dict[str, str]]:
    words = ["sun", "moon", "star", "tree", "leaf", "root"]
    return [
        {"role": "user", "content": words[n]},
        {"role": "assistant", "content": words[n][::-1]},
        {"role": "tool", "content": "right" * (n % 2)},
        {"role": "user", "content": words[-n]},
        {"role": "assistant", "content": words[-n][::-1]},
    ]


@pytest.mark.layouts
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_is_that_of_transformers_on_the_assistants_tokens(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    chat_model: Path,
    tmp_path: Path,
    ranks: int,
) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"chat": conversation(n)}) for n in range(NUM)))
    changed = ("recipe", "model", "trainer.prompts", "data", "reward")
    run = train_here(
        tmp_path / "run", *[x for x in tiny_run if not x.startswith(changed)],
        "recipe=sft", f"model.path={chat_model}", "data=jsonl", f"data.sources.main.name={file}",
        "data.sources.main.messages_column=chat", "data.chat=true", f"data.eval_size={HELD_OUT}",
        "trainer.steps=1", f"trainer.prompts_per_step={NUM - HELD_OUT}", f"cluster.ranks={ranks}",
        "eval.sets.main.every=null",
    )  # fmt: skip
    (line,) = run.metrics
    # The conversations that were trained on, by the texts of the record.
    prompts = [f"u:{conversation(n)[0]['content']}>" for n in range(NUM)]
    records = map(json.loads, (run.dir / "samples.jsonl").read_text().splitlines())
    trained = {record["prompt"] for record in records if record["phase"] == "rl"}
    assert len(trained) == NUM - HELD_OUT
    # Labels as transformers and TRL make them: by the template's mask.
    model = AutoModelForCausalLM.from_pretrained(chat_model).double()
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    losses, num_tokens = torch.zeros((), dtype=torch.float64), 0
    for n in range(NUM):
        if prompts[n] not in trained:
            continue
        encoded = tokenizer.apply_chat_template(
            conversation(n), return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = torch.tensor(encoded["input_ids"]), torch.tensor(encoded["assistant_masks"])
        labels = ids.masked_fill(mask == 0, -100)
        count = int((labels[1:] != -100).sum())
        losses += model(ids[None], labels=labels[None]).loss.detach() * count
        num_tokens += count
    assert line["tokens"] == num_tokens
    assert line["loss"] == pytest.approx(losses.item() / num_tokens, abs=1e-5)
