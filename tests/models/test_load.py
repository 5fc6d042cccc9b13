import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM

from hybridrl.config import Attention, ConfigError
from hybridrl.models.load import check_supported, load_causal_lm
from hybridrl.models.packed_attention import choose_attention

SMALL = LlamaConfig(
    vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
)


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path=.*a directory with config.json"):
        load_causal_lm(str(tmp_path), "sdpa")


def test_only_safetensors(tmp_path):
    model = LlamaForCausalLM(SMALL)
    SMALL.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_causal_lm(str(tmp_path), "sdpa")


def test_missing_weights_are_an_error(tmp_path):
    model = LlamaForCausalLM(SMALL)
    weights = model.state_dict()
    del weights["model.layers.0.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match="up_proj"):
        load_causal_lm(str(tmp_path), "sdpa")


def test_families_that_would_come_out_wrong():
    with pytest.raises(ValueError, match="gemma2: final_logit_softcapping is not supported"):
        check_supported(Gemma2Config())
    recurrent = LlamaConfig(layer_types=["linear_attention"] * 32)
    with pytest.raises(ValueError, match="linear_attention is not supported"):
        check_supported(recurrent)


def test_flash_is_refused_without_a_gpu():
    with pytest.raises(ConfigError, match=r"model\.attention=flash"):
        choose_attention(Attention.flash, torch.device("cpu"))
    assert choose_attention(Attention.auto, torch.device("cpu")) is Attention.torch
