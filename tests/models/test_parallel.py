"""Layouts that a model takes, and those that it is refused, with what is allowed."""

import pytest
import torch
from transformers import GPT2Config, PhiConfig, PhiForCausalLM, PretrainedConfig, Qwen3Config

from hybridrl.config import ConfigError, PipelineSchedule, TrainLayoutConfig
from hybridrl.layout.parameters import BOTH, FIRST, LAST
from hybridrl.models.parallel import (
    check_gen_layout,
    check_train_layout,
    model_parameters,
    tp_style,
)
from hybridrl.models.tensor_parallel import pad_vocabulary


def qwen3(heads: int, kv_heads: int, **sizes: object) -> PretrainedConfig:
    settings = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 4}
    heads_settings = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return Qwen3Config(vocab_size=41, **settings, **heads_settings, **sizes)


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (qwen3(6, 6), {"tp": 4}, "trainer.layout.tp=4: wanted one of 1, 2, 3, 6 (it must divide"),
        (qwen3(6, 2), {"tp": 3}, "one of 1, 2 (it must divide the 2 key-value heads)"),
        (qwen3(5, 5), {"tp": 5}, "one of 1 (it must divide intermediate_size=48)"),
        (qwen3(6, 2), {"pp": 4}, "trainer.layout.pp=4: wanted at most 3 (3 layers)"),
        (
            qwen3(6, 2),
            {"pp": 2, "schedule": PipelineSchedule.zero_bubble},
            "at most 1 (3 layers, 2 chunks a rank)",
        ),
        (GPT2Config(), {"tp": 2}, "1 (model type gpt2 runs under FSDP alone"),
        (GPT2Config(), {"pp": 2}, "1 (model type gpt2 runs under FSDP alone"),
    ],
)
def test_training_refuses(config: PretrainedConfig, layout: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_train_layout(config, TrainLayoutConfig(**layout))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "pp", "tp", "message"),
    [
        (qwen3(6, 2), 1, 4, "rollout.layout.tp=4: wanted one of 1, 2, 6 (it must divide the 6"),
        (qwen3(12, 4), 1, 6, "one of 1, 2, 4, 12 (it must divide the 4 key-value heads or be a mu"),
        (qwen3(6, 2), 4, 1, "rollout.layout.pp=4: wanted at most 3 (3 layers)"),
        (GPT2Config(), 1, 2, "1 (model type gpt2 runs under FSDP alone"),
    ],
)
def test_generation_refuses(config: PretrainedConfig, pp: int, tp: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_gen_layout(config, pp, tp)
    assert message in str(error.value)


def test_what_fits_passes() -> None:
    check_train_layout(qwen3(6, 2), TrainLayoutConfig(pp=3, tp=2))
    check_train_layout(GPT2Config(), TrainLayoutConfig(replicas=2, fsdp=4))
    check_gen_layout(qwen3(8, 2), 1, 8)  # two ranks and more share a key-value head


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_a_model(tied: bool) -> None:
    by_name = {p.name: p for p in model_parameters(qwen3(6, 2, tie_word_embeddings=tied))}
    assert len(by_name) == 3 * 11 + (2 if tied else 3)
    embedding = by_name["model.embed_tokens.weight"]
    assert (embedding.layer, embedding.tp_dim) == (BOTH if tied else FIRST, 0)
    assert ("lm_head.weight" in by_name) is not tied
    assert by_name["model.norm.weight"].layer == LAST
    layer = {n.removeprefix("model.layers.2."): p for n, p in by_name.items() if "layers.2." in n}
    assert all(p.layer == 2 for p in layer.values())
    dims = {name: (p.tp_dim, p.units) for name, p in layer.items() if p.tp_dim is not None}
    assert dims == {
        "self_attn.q_proj.weight": (0, 6),
        "self_attn.k_proj.weight": (0, 2),
        "self_attn.v_proj.weight": (0, 2),
        "self_attn.o_proj.weight": (1, 6),
        "mlp.gate_proj.weight": (0, 0),
        "mlp.up_proj.weight": (0, 0),
        "mlp.down_proj.weight": (1, 0),
    }


def test_a_heads_bias_is_cut_along_the_vocabulary() -> None:
    config = PhiConfig(
        vocab_size=41, hidden_size=24, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, resid_pdrop=0.0,
    )  # fmt: skip
    by_name = {parameter.name: parameter for parameter in model_parameters(config)}
    bias = by_name["lm_head.bias"]
    assert (bias.shape, bias.layer, bias.tp_dim) == ((41,), LAST, 0)
    assert not any("lm_head" in p.name for p in model_parameters(config, classifier=True))
    model = PhiForCausalLM(config)
    torch.nn.init.ones_(model.lm_head.bias)
    pad_vocabulary(model, 4)
    assert len(model.lm_head.weight) == len(model.lm_head.bias) == 44
    assert model.lm_head.bias.sum() == 41


def test_a_style_that_is_not_known_is_refused() -> None:
    config = qwen3(6, 2)
    config.base_model_tp_plan = {"layers.*.mlp.up_proj": "moe_tp_experts"}
    with pytest.raises(
        ValueError, match=r"layers\.0\.mlp\.up_proj has the tensor-parallel style moe"
    ):
        tp_style(config, "layers.0.mlp.up_proj")
