import sys
from functools import partial

import pytest
import torch
from transformers import Gemma2Config, LlamaConfig, LlamaForCausalLM, PhimoeConfig

from hybridrl.config import Attention, ConfigError
from hybridrl.models import packed_attention, paged_attention
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
    with pytest.raises(ValueError, match="phimoe: router_jitter_noise makes training random"):
        check_supported(PhimoeConfig())


@pytest.mark.parametrize(
    ("attention", "description"),
    [
        (packed_attention.packed_attention, {"packing": None}),
        (paged_attention.paged_attention, {"paged": None}),
    ],
)
def test_attention_raises_on_what_it_does_not_compute(attention, description):
    """gpt-oss hands its sinks over as `s_aux`: without them log-probabilities are off by 0.28."""
    tensors = [torch.zeros(1, 1, 2, 8)] * 3
    for keyword in ({"s_aux": torch.zeros(1)}, {"softcap": 30.0}, {"of_tomorrow": 1}):
        (name,) = keyword
        with pytest.raises(ValueError, match=f"Linear: attention with {name} is not supported"):
            attention(torch.nn.Linear(1, 1), *tensors, None, scaling=1.0, **description, **keyword)


CPU, GPU, OLD_GPU = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("package", "device", "dtype", "head_size", "obstacle"),
    [
        ("whole", GPU, torch.bfloat16, 64, None),
        ("whole", GPU, torch.float16, 256, None),
        ("whole", CPU, torch.bfloat16, 64, "there is no GPU"),
        ("whole", OLD_GPU, torch.float16, 64, "capability 8.0 and above, not 7.5"),
        ("whole", GPU, torch.float32, 64, "in bfloat16 and float16, not float32"),
        ("whole", GPU, torch.bfloat16, 288, "heads of 8 to 256 in steps of 8, not 288"),
        ("whole", GPU, torch.bfloat16, 36, "heads of 8 to 256 in steps of 8, not 36"),
        ("none", GPU, torch.bfloat16, 64, "cannot be imported: import of flash_attn halted"),
        ("other torch", GPU, torch.bfloat16, 64, "cannot be imported: undefined symbol: _ZN3c10"),
        ("flash-attn-4", GPU, torch.bfloat16, 64, "cannot be imported: cannot import name"),
    ],
)
def test_flash_runs_where_its_kernels_can(
    package, device, dtype, head_size, obstacle, tmp_path, monkeypatch, caplog
):
    """`auto` falls back and logs the reason; `flash` is refused with it."""
    code = {
        "whole": "def flash_attn_varlen_func(): ...",
        "other torch": "raise ImportError('undefined symbol: _ZN3c10')",
        "flash-attn-4": "",
    }
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    if package == "none":
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    else:
        (tmp_path / "flash_attn").mkdir()
        (tmp_path / "flash_attn" / "__init__.py").write_text(code[package])
        monkeypatch.syspath_prepend(tmp_path)
    capabilities = {GPU: (9, 0), OLD_GPU: (7, 5)}
    monkeypatch.setattr("torch.cuda.get_device_capability", capabilities.get)
    caplog.set_level("INFO", logger="hybridrl")
    choose = partial(choose_attention, device=device, dtype=dtype, head_size=head_size)
    assert choose(Attention.torch) is Attention.torch
    if obstacle is None:
        assert choose(Attention.auto) is choose(Attention.flash) is Attention.flash
        return
    assert choose(Attention.auto) is Attention.torch
    assert (obstacle in caplog.messages[-1]) == (device is not CPU)
    with pytest.raises(ConfigError, match=f"^model.attention=flash: wanted .*{obstacle}"):
        choose(Attention.flash)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
