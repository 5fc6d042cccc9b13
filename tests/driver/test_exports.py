"""What a run leaves behind stops, renders and opens elsewhere as it did in the run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hybridrl.config import ConfigError, TinyModelConfig
from hybridrl.models.tiny import make_tiny_model
from hybridrl.telemetry.records import read_lines

MOST = 24
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}V{% endif %}{% endfor %}"
)
"""A turn of the assistant's ends with V, which the tokenizer's eos is not."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often writes V and K; its generation_config.json cannot be saved again."""
    path = tmp_path_factory.mktemp("exports") / "model"
    tiny = TinyModelConfig(
        hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, head_dim=32
    )
    make_tiny_model(path, tiny, seed=3)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for weights in model.parameters():
            noise = torch.randn(weights.shape, generator=torch.Generator().manual_seed(1))
            weights.add_(0.5 * noise)
    model.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["V"]})
    tokenizer.save_pretrained(path)
    file = path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "temperature": 0.6}))
    with pytest.raises(ValueError, match="temperature"):
        GenerationConfig.from_pretrained(path).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    template = model.parent / "template.jinja"
    template.write_text(TEMPLATE)
    directory = tmp_path_factory.mktemp("exports") / "run"
    train_here(
        directory, *tiny_run, "cluster.ranks=1", f"model.path={model}", "data.chat=true",
        f"data.chat_template={template}", "rollout.stop=[K]", f"rollout.max_new_tokens={MOST}",
        "actor.lora.rank=2", "trainer.optim.lr=1e-12", "trainer.steps=1", "trainer.save_every=1",
    )  # fmt: skip
    return directory


def evaluated(run: Path) -> dict[str, int]:
    """Tokens of the responses of the run's last evaluation, by prompt."""
    lines = [line for line in read_lines(run / "samples.jsonl") if line["phase"] == "evaluation"]
    last = max(line["step"] for line in lines)
    return {line["prompt"]: line["tokens"] for line in lines if line["step"] == last}


def lengths_in_transformers(model: Any, tokenizer: Any, prompts: list[str]) -> dict[str, int]:
    lengths = {}
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        whole = model.generate(**ids, do_sample=False, max_new_tokens=MOST)
        lengths[prompt] = whole.shape[1] - ids["input_ids"].shape[1]
    return lengths


@pytest.mark.long
def test_transformers_stops_where_the_run_did(run: Path, model: Path) -> None:
    of_run = evaluated(run)
    assert len(set(of_run.values())) > 2, "responses end at several places"
    assert min(of_run.values()) < MOST
    final = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert lengths_in_transformers(final, tokenizer, list(of_run)) == of_run
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert set(lengths_in_transformers(base, tokenizer, list(of_run)).values()) == {MOST}


IN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

engine = LLM(
    sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256,
    kv_cache_memory_bytes=2**26, disable_log_stats=True,
)
prompts = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
sampling = SamplingParams(max_tokens=int(sys.argv[3]), temperature=0)
outputs = engine.generate(prompts, sampling, use_tqdm=False)
print("answer", json.dumps([len(output.outputs[0].token_ids) for output in outputs]))
"""


@pytest.mark.vllm
def test_vllm_stops_where_the_run_did(run: Path) -> None:
    of_run = evaluated(run)
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    ids = json.dumps(tokenizer(list(of_run), add_special_tokens=False)["input_ids"])
    command = [sys.executable, "-c", IN_VLLM, str(run / "final"), ids, str(MOST)]
    alone = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    assert json.loads(line.removeprefix("answer ")) == list(of_run.values())


@pytest.mark.parametrize("folder", ["final", "final/adapter"])
def test_weights_and_adapters_have_the_ends_and_the_template(run: Path, folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run / folder)
    assert tokenizer.chat_template == TEMPLATE
    settings = GenerationConfig.from_pretrained(run / folder)
    ends = tokenizer.convert_ids_to_tokens(settings.eos_token_id)
    assert ends[0] == "V", "the end that is trained comes first: transformers pads with it"
    assert set(ends) == {"V", "K", tokenizer.eos_token}
    assert settings.temperature == 0.6, "what the user's file says stays"


def test_the_adapter_opens_in_peft_with_its_template(run: Path, model: Path) -> None:
    from peft import AutoPeftModelForCausalLM

    adapted = AutoPeftModelForCausalLM.from_pretrained(run / "final" / "adapter")
    rows = adapted.get_input_embeddings().weight.shape[0]
    assert rows == AutoModelForCausalLM.from_pretrained(model).config.vocab_size


def test_a_template_that_cannot_be_read_is_refused(make_config: Callable[..., Any]) -> None:
    from hybridrl.data.chat import template_text

    missing = make_config("data.chat=true", "data.chat_template=missing.jinja").data
    with pytest.raises(ConfigError, match=r"chat_template=missing.jinja.*No such file"):
        template_text(missing)
    unused = make_config("data.chat_template=missing.jinja").data
    with pytest.raises(ConfigError, match=r"null with data.chat=false"):
        template_text(unused)
    text = make_config("data.chat=true", "data.chat_template='{{ messages }}'").data
    assert template_text(text) == "{{ messages }}"
