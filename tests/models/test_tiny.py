"""The made model is an ordinary Hugging Face directory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.config import ConfigError, ModelConfig, TinyModelConfig
from hybridrl.models.tiny import make_tiny_model

SMALL = TinyModelConfig(
    hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model", SMALL, seed=3)
    return tmp_path / "model"


def test_opens_as_an_ordinary_checkpoint(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert model.config.model_type == "qwen3"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) == len(SMALL.alphabet) + 3
    assert model.config.max_position_embeddings == SMALL.max_positions
    special = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    assert len(special) == 3
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert list(model_dir.glob("*.safetensors"))
    ids = torch.tensor([tokenizer("abc:")["input_ids"]])
    assert torch.isfinite(model(ids).logits).all()


def test_text_survives_the_tokenizer(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for text in (SMALL.alphabet, "12,8:4,8>4,4#4", "a  b . c , d ?", " x ", ""):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text
    assert tokenizer("aÄ\n")["input_ids"][1:] == [tokenizer.unk_token_id] * 2
    assert tokenizer.decode([5, tokenizer.eos_token_id], skip_special_tokens=True) == "c"


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    untouched = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, SMALL, seed)
    assert torch.equal(torch.get_rng_state(), untouched)
    read = {name: _bytes(tmp_path / name) for name in "abc"}
    assert read["a"] == read["b"]
    assert read["a"] != read["c"]


def test_a_repeated_character_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.tiny\.alphabet=abca.*repeated: a"):
        make_tiny_model(tmp_path, TinyModelConfig(alphabet="abca"), 0)


def _bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def test_a_mixture_of_experts(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, replace(SMALL, num_experts=4, moe_intermediate_size=16), seed=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (model.config.model_type, model.config.num_experts_per_tok) == ("qwen3_moe", 2)
    assert model.model.layers[1].mlp.experts.gate_up_proj.shape == (4, 32, 32)
    with pytest.raises(ConfigError, match=r"experts_per_token=5: wanted at most .*num_experts=4"):
        ModelConfig(tiny=replace(SMALL, num_experts=4, experts_per_token=5)).check()


def test_a_small_hybrid(tmp_path: Path) -> None:
    """Every second layer attends."""
    make_tiny_model(tmp_path, replace(SMALL, attention_interval=2), seed=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "qwen3_5_text"
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    assert torch.isfinite(model(torch.tensor([[3, 4, 5]])).logits).all()
    config = ModelConfig(tiny=replace(SMALL, attention_interval=2, num_experts=4))
    with pytest.raises(ConfigError, match=r"num_experts=4: wanted 0 with model.tiny.attention_int"):
        config.check()
    config = ModelConfig(tiny=replace(SMALL, num_layers=3, attention_interval=4))
    with pytest.raises(ConfigError, match=r"attention_interval=4: wanted at most .*num_layers=3"):
        config.check()
