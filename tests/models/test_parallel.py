"""Layouts that a model takes, and those that it is refused, with what is allowed."""

from contextlib import nullcontext

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Olmo2Config,
    OPTConfig,
    PhiConfig,
    PhiForCausalLM,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybridrl.config import ConfigError, LoraConfig, PipelineSchedule, TrainLayoutConfig
from hybridrl.config.layout import RolloutLayoutConfig
from hybridrl.layout.owners import matrices_of
from hybridrl.layout.parameters import BOTH, FIRST, LAST
from hybridrl.models.adapters import check_lora
from hybridrl.models.parallel import (
    check_gen_layout,
    check_train_layout,
    kv_heads_of_rank,
    model_parameters,
)
from hybridrl.models.tensor_parallel import pad_vocabulary

SIZES = {
    "vocab_size": 41, "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 3,
    "head_dim": 4,
}  # fmt: skip


def qwen3(heads: int, kv_heads: int, **sizes: object) -> PretrainedConfig:
    heads_settings = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return Qwen3Config(**SIZES, **heads_settings, **sizes)


def qwen3_moe() -> PretrainedConfig:
    heads_settings = {"num_attention_heads": 6, "num_key_value_heads": 6}
    experts = {"num_experts": 4, "moe_intermediate_size": 10}
    return Qwen3MoeConfig(**SIZES, **heads_settings, **experts)


def mixture(heads: int = 6, width: int = 16, **settings: object) -> PretrainedConfig:
    return Qwen3MoeConfig(
        vocab_size=41,
        hidden_size=24,
        intermediate_size=48,
        moe_intermediate_size=width,
        num_experts=6,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        **settings,
    )


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
        (GPT2Config(), {"tp": 2}, "1 (transformers has no tensor-parallel plan for model type gpt"),
        (GPT2Config(), {"pp": 2}, "1 (transformers has no pipeline plan for model type gpt2)"),
        (Olmo2Config(**SIZES), {"tp": 2, "sequence_parallel": True}, "false: model type olmo2 is"),
        (qwen3(6, 2), {"ep": 2}, "trainer.layout.ep=2: wanted 1 (model type qwen3 has no experts)"),
        (mixture(), {"ep": 4}, "ep=4: wanted one of 1, 2, 3, 6 (it must divide the 6 experts)"),
    ],
)
def test_training_refuses(config: PretrainedConfig, layout: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_train_layout(config, TrainLayoutConfig(**layout))
    assert message in str(error.value)


@pytest.mark.parametrize(("version", "halves"), [("2.12.1+cu130", False), ("2.13.0", True)])
def test_backward_passes_in_halves_need_a_torch_that_computes_them(
    version: str, halves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    sizes = SIZES | {"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2}
    config, kind = Qwen3Config(**sizes), PipelineSchedule.zero_bubble
    refused = pytest.raises(ConfigError, match="schedule=zero_bubble: wanted one_f_one_b or inter")
    with nullcontext() if halves else refused:
        check_train_layout(config, TrainLayoutConfig(pp=2, schedule=kind))
    check_train_layout(config, TrainLayoutConfig(schedule=kind))  # without a pipeline it is none


@pytest.mark.parametrize(
    ("config", "pp", "tp", "message"),
    [
        (qwen3(6, 2), 1, 4, "rollout.layout.tp=4: wanted one of 1, 2, 6 (it must divide the 6"),
        (qwen3(12, 4), 1, 6, "one of 1, 2, 4, 12 (it must divide the 4 key-value heads or be a mu"),
        (qwen3(6, 2), 4, 1, "rollout.layout.pp=4: wanted at most 3 (3 layers)"),
        (GPT2Config(), 1, 2, "1 (transformers has no tensor-parallel plan for model type gpt2)"),
        (qwen3_moe(), 1, 3, "one of 1, 2 (it must divide moe_intermediate_size=10)"),
        (
            DeepseekV2Config(),
            1,
            2,
            "1 (deepseek_v2: layers.*.self_attn.kv_a_proj_with_mqa is mla_kv_a_proj, and computed",
        ),
    ],
)
def test_generation_refuses(config: PretrainedConfig, pp: int, tp: int, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_gen_layout(config, pp, tp)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "tp", "ep", "message"),
    [
        (qwen3(6, 2), 2, 2, "rollout.layout.ep=2: wanted 1 (model type qwen3 has no experts)"),
        (mixture(8), 4, 4, "rollout.layout.ep=4: wanted one of 1, 2, 3, 6 (it must divide the 6"),
        (
            mixture(8, 15),
            2,
            1,
            "rollout.layout.tp=2: wanted one of 1 (it must divide moe_intermediate_size=15)",
        ),
    ],
)
def test_generation_refuses_experts(
    config: PretrainedConfig, tp: int, ep: int, message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_gen_layout(config, 1, tp, ep=ep)
    assert message in str(error.value)


def test_sizes_that_ep_does_not_divide_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.layout\.ep=4: wanted a divisor of fsdp x tp = 3"
    ):
        TrainLayoutConfig(fsdp=3, tp=2, ep=4).check(6)
    with pytest.raises(
        ConfigError, match=r"rollout\.layout\.ep=2: wanted 1, or rollout\.layout\.tp=4"
    ):
        RolloutLayoutConfig(tp=4, ep=2).check(8)


def test_what_fits_passes() -> None:
    check_train_layout(mixture(), TrainLayoutConfig(ep=3, tp=2))
    check_gen_layout(mixture(2, 15), 1, 2, ep=2)  # whole experts, of any width
    TrainLayoutConfig(fsdp=3, tp=2, ep=6).check(6)
    check_train_layout(GptOssConfig(), TrainLayoutConfig(ep=4))  # by its plan for experts alone
    check_train_layout(qwen3(6, 2), TrainLayoutConfig(pp=3, tp=2))
    check_train_layout(GPT2Config(), TrainLayoutConfig(replicas=2, fsdp=4))
    check_gen_layout(qwen3(8, 2), 1, 8)  # two ranks and more share a key-value head


def test_experts_are_parameters_of_their_own() -> None:
    config = mixture(mlp_only_layers=[1])
    by_name = {p.name.removeprefix("model.layers."): p for p in model_parameters(config)}
    experts = {n: (p.shape, p.tp_dim, p.blocks) for n, p in by_name.items() if p.experts == 6}
    assert experts == {
        "0.mlp.experts.gate_up_proj": ((6, 32, 24), 1, 2),
        "0.mlp.experts.down_proj": ((6, 24, 16), 2, 1),
    }
    assert not any(p.experts for n, p in by_name.items() if n not in experts)
    assert (by_name["0.mlp.gate.weight"].tp_dim, by_name["1.mlp.up_proj.weight"].tp_dim) == (
        None,
        0,
    )


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


def test_experts_are_parameters_by_their_own_names() -> None:
    by_name = {p.name: p for p in model_parameters(qwen3_moe())}
    gate_up = by_name["model.layers.1.mlp.experts.gate_up_proj"]
    assert (gate_up.shape, gate_up.tp_dim, gate_up.blocks) == ((4, 20, 24), 1, 2)
    down = by_name["model.layers.1.mlp.experts.down_proj"]
    assert (down.shape, down.tp_dim, down.blocks) == ((4, 24, 10), 2, 1)
    assert by_name["model.layers.1.mlp.gate.weight"].tp_dim is None


def test_heads_that_are_gathered_are_on_every_rank() -> None:
    """Their norm is over all heads, so attention has them all, and so has the cache."""
    olmo2 = Olmo2Config(**SIZES, num_attention_heads=6, num_key_value_heads=6)
    query = {p.name: p for p in model_parameters(olmo2)}["model.layers.0.self_attn.q_proj.weight"]
    assert (query.tp_dim, query.units) == (0, 0)
    assert kv_heads_of_rank(olmo2, 2) == 6
    assert kv_heads_of_rank(qwen3(6, 2), 2) == 1


def test_modules_by_the_pipeline_plan() -> None:
    config = GPTNeoXConfig(
        vocab_size=41, hidden_size=24, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=8, tie_word_embeddings=False,
    )  # fmt: skip
    layers = {p.name: p.layer for p in model_parameters(config)}
    assert layers["gpt_neox.embed_in.weight"] == FIRST
    assert layers["gpt_neox.final_layer_norm.weight"] == LAST
    (head,) = layers.keys() & {"embed_out.weight", "lm_head.weight"}  # by transformers' version
    assert layers[head] == LAST
    assert layers["gpt_neox.layers.2.mlp.dense_h_to_4h.weight"] == 2


@pytest.mark.parametrize(
    ("config", "layers", "matrices"),
    [(GPT2Config(), "transformer.h", 4), (OPTConfig(), "model.decoder.layers", 6)],
    ids=["gpt2", "opt"],
)
def test_layers_by_any_name(config: PretrainedConfig, layers: str, matrices: int) -> None:
    """Their matrices are those that Muon takes: of GPT-2 they are [inputs, outputs]."""
    parameters = model_parameters(config)
    in_layers = {p.name: p.layer for p in parameters if p.name.startswith(layers)}
    numbers = {n: int(n.removeprefix(f"{layers}.").partition(".")[0]) for n in in_layers}
    assert in_layers == numbers
    assert set(numbers.values()) == set(range(12))
    assert all(p.layer < 0 for p in parameters if p.name not in in_layers)
    of_layers = [name for name in in_layers if name.endswith("weight") and "norm" not in name]
    wanted = [name for name in of_layers if ".ln_" not in name]
    assert matrices_of(parameters) == wanted
    assert len(wanted) == 12 * matrices


def test_adapters_need_linear_layers() -> None:
    with pytest.raises(ConfigError) as refused:
        check_lora(GPT2Config(), LoraConfig(rank=8), "actor.lora")
    wanted = "0 (adapters are for torch.nn.Linear, of which gpt2 has none)"
    assert str(refused.value) == f"actor.lora.rank=8: wanted {wanted}"
    check_lora(GPT2Config(), LoraConfig(rank=0), "actor.lora")
    check_lora(OPTConfig(), LoraConfig(rank=8), "actor.lora")


def test_adapters_that_peft_puts_on_experts_are_refused() -> None:
    """Dense layers of a mixture have linear layers with the names that experts had."""
    config = Qwen3MoeConfig(**SIZES, num_experts=4, mlp_only_layers=[1])
    with pytest.raises(ConfigError) as refused:
        check_lora(config, LoraConfig(rank=8), "actor.lora")
    layers, others = "k_proj, o_proj, q_proj, v_proj", "down_proj, gate_proj, up_proj"
    wanted = f"{layers} (peft puts {others} on the experts)"
    assert str(refused.value) == f"actor.lora.target_modules=all-linear: wanted {wanted}"
    check_lora(config, LoraConfig(rank=8, target_modules=layers.split(", ")), "actor.lora")
    check_lora(qwen3_moe(), LoraConfig(rank=8), "actor.lora")
