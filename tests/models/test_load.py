import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PhimoeConfig,
    T5Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybridrl.config import (
    ConfigError,
    ModelConfig,
    RolloutLayoutConfig,
    RouterReplay,
    TinyModelConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.models import packed_attention, paged_attention
from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.blocks import decoder_layers
from hybridrl.models.buffers import fill_buffers
from hybridrl.models.config_json import (
    check_config_json,
    check_has_experts,
    check_layouts,
    check_value_layout,
    wrong_experts,
)
from hybridrl.models.load import check_supported, empty_causal_lm, load_config
from hybridrl.models.mixers import recurrent_modules
from hybridrl.models.recomputation import checkpoint_layers
from hybridrl.models.shrink import shrink
from hybridrl.models.stored_weights import StoredWeights

SMALL = LlamaConfig(
    vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
)


def test_what_is_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"model.path=.*a directory with config.json"):
        empty_causal_lm(str(tmp_path), "sdpa")


def test_only_safetensors(tmp_path):
    model = LlamaForCausalLM(SMALL)
    SMALL.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        StoredWeights(str(tmp_path), SMALL)


def test_missing_weights_are_an_error(tmp_path):
    model = LlamaForCausalLM(SMALL)
    weights = model.state_dict()
    del weights["model.layers.0.mlp.up_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ConfigError, match="up_proj"):
        StoredWeights(str(tmp_path), SMALL)


def test_logits_that_would_come_out_wrong() -> None:
    scaled = LlamaConfig(logits_scaling=8.0)  # Granite divides by it, HyperCLOVA X multiplies
    with pytest.raises(ValueError, match="llama: logits_scaling is not supported"):
        check_supported(scaled)
    with pytest.raises(ValueError, match="llama: lm_head_multiplier is not supported"):
        check_supported(LlamaConfig(lm_head_multiplier=0.5))


def test_layers_that_no_engine_computes() -> None:
    with pytest.raises(ValueError, match="chunked_attention is not supported"):
        check_supported(LlamaConfig(layer_types=["chunked_attention"] * 32))
    for family in ("zamba", "zamba2"):  # their attention is shared by layers
        with pytest.raises(ValueError, match=f"{family}: hybrid is not supported"):
            check_supported(AutoConfig.for_model(family))
    check_supported(AutoConfig.for_model("falcon_h1"))
    with pytest.raises(ValueError, match="an encoder is not supported"):
        check_supported(T5Config())


@pytest.mark.parametrize(
    ("settings", "component"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder"),
        ({"model_type": "mamba2", "state_size": 128}, "mamba"),
        ({"model_type": "nemotron_h", "ssm_state_size": 128}, "mamba"),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, "chunked attention"),
        ({"model_type": "gemma3", "vision_config": {"depth": 1}}, "images"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "attention to later"),
        ({"model_type": "gpt_oss", "quantization_config": {"bits": 4}}, "weights quantized by"),
        ({"model_type": "x", "layer_types": ["full_attention", "gla"]}, "gla"),
        ({"model_type": "zamba2", "layers_block_type": ["mamba", "hybrid"]}, "hybrid"),
    ],
)
def test_what_config_json_alone_rules_out(tmp_path, settings, component):
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(
        ConfigError, match=f"^teacher.path=.*{settings['model_type']} has {component}"
    ):
        check_config_json(str(tmp_path), "teacher.path")


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        ({"num_experts": 8, "num_experts_per_tok": 9}, "with num_experts_per_tok of 1 to num_exp"),
        ({"n_routed_experts": 8, "num_experts_per_tok": 0}, "with num_experts_per_tok of 1 to n_r"),
        ({"num_local_experts": "eight"}, "with a whole number of num_local_experts, not 'eight'"),
    ],
)
def test_experts_that_cannot_be_chosen(tmp_path, settings, wrong):
    """A probe has few of them, and would not see it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", **settings}))
    with pytest.raises(ConfigError, match=f"^model.path=.*: wanted a config.json {wrong}"):
        check_config_json(str(tmp_path), "model.path")


def test_every_family_has_experts_that_can_be_chosen():
    """By its own defaults: the check refuses none of them."""
    without_defaults = []  # musicgen, musicgen_melody, and in newer versions one that refuses them
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(family)
        except Exception:  # each has its own
            without_defaults.append(family)
            continue
        assert wrong_experts(config.to_dict()) is None, family
    assert len(without_defaults) <= 3


def test_what_config_json_leaves_to_other_checks(tmp_path):
    LlamaConfig(layer_types=["sliding_attention"] * 32).save_pretrained(tmp_path)
    check_config_json(str(tmp_path), "model.path")
    (tmp_path / "config.json").write_text("{")
    check_config_json(str(tmp_path), "model.path")
    check_config_json("a/hub-name", "model.path")


def test_a_dense_model_has_no_experts_to_replay_or_balance(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    replays = TrainerConfig(router_replay=RouterReplay.rollout)
    balances = TrainerConfig(router_aux_loss_coef=0.1)
    check_has_experts(str(tmp_path), TrainerConfig())
    wanted = r"^trainer.router_replay=rollout: wanted off \(llama has no experts\)$"
    with pytest.raises(ConfigError, match=wanted):
        check_has_experts(str(tmp_path), replays)
    wanted = r"^trainer.router_aux_loss_coef=0.1: wanted 0 \(llama has no experts\)$"
    with pytest.raises(ConfigError, match=wanted):
        check_has_experts(str(tmp_path), balances)
    MixtralConfig().save_pretrained(tmp_path)
    check_has_experts(str(tmp_path), replays)
    check_has_experts(str(tmp_path), balances)


@pytest.mark.parametrize(
    ("train", "gen", "message"),
    [
        ({"ep": 3}, {}, "trainer.layout.ep=3: wanted one of 1, 2, 4, 8 (it must divide the 8 exp"),
        ({}, {"tp": 3, "ep": 3}, "rollout.layout.ep=3: wanted one of 1, 2, 4, 8 (it must divide"),
    ],
)
def test_layouts_that_config_json_rules_out(tmp_path, train, gen, message):
    MixtralConfig().save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        check_layouts(model, TrainLayoutConfig(**train), RolloutLayoutConfig(**gen))
    assert message in str(refused.value)
    check_layouts(model, TrainLayoutConfig(ep=2), RolloutLayoutConfig(tp=2, ep=2))


def test_layouts_that_it_leaves_to_other_checks(tmp_path):
    """Other axes than ep; models that are not here."""
    LlamaConfig(hidden_size=48, num_attention_heads=6).save_pretrained(tmp_path)
    gen = RolloutLayoutConfig()
    check_layouts(ModelConfig(path=str(tmp_path)), TrainLayoutConfig(tp=4, cp=4), gen)
    check_layouts(ModelConfig(path="a/hub-name"), TrainLayoutConfig(ep=2), gen)
    wanted = r"^trainer.layout.ep=2: wanted 1 \(model type llama has no experts\)$"
    with pytest.raises(ConfigError, match=wanted):
        check_layouts(ModelConfig(path=str(tmp_path)), TrainLayoutConfig(ep=2), gen)


def test_so_do_the_sizes_of_a_model_that_is_made():
    gen, dense, mixture = RolloutLayoutConfig(), TinyModelConfig(), TinyModelConfig(num_experts=8)
    check_layouts(ModelConfig(tiny=mixture), TrainLayoutConfig(ep=2), gen)
    for tiny, layout, wanted in (
        (dense, {"ep": 2}, r"^trainer.layout.ep=2: wanted 1 \(model type qwen3 has no experts\)$"),
        (mixture, {"ep": 3}, "^trainer.layout.ep=3: wanted one of 1, 2, 4, 8 "),
    ):
        with pytest.raises(ConfigError, match=wanted):
            check_layouts(ModelConfig(tiny=tiny), TrainLayoutConfig(**layout), gen)


def test_value_models_are_checked_by_their_own_config_json(tmp_path):
    LlamaConfig(hidden_size=48, num_attention_heads=6).save_pretrained(tmp_path)
    mixture, layout = ModelConfig(tiny=TinyModelConfig(num_experts=8)), TrainLayoutConfig(ep=2)
    check_value_layout(None, mixture, layout, "roles.critic")  # the actor's
    wanted = r"^roles.critic.layout.ep=2: wanted 1 \(model type llama has no experts\)$"
    with pytest.raises(ConfigError, match=wanted):
        check_value_layout(str(tmp_path), mixture, layout, "roles.critic")


def test_nothing_is_random_in_training(tmp_path):
    """A router's jitter would train another policy than the one that generates."""
    config = PhimoeConfig(
        vocab_size=11, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    model = empty_causal_lm(str(tmp_path), "sdpa")
    model._apply(lambda x: torch.rand_like(x, device="cpu") if x.is_meta else x)
    assert model.training
    assert config.router_jitter_noise
    ids = torch.arange(1, 9)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    checkpoint_layers(decoder_layers(model))
    assert torch.equal(model(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize(
    ("attention", "description"),
    [
        (packed_attention.packed_attention, {"packing": None}),
        (paged_attention.paged_attention, {"paged": None}),
    ],
)
def test_attention_raises_on_what_it_does_not_compute(attention, description):
    """gpt-oss's sinks, when they were ignored, put log-probabilities off by 0.28."""
    tensors = [torch.zeros(1, 1, 2, 8)] * 3
    for keyword in ({"position_bias": torch.zeros(1)}, {"is_causal": False}, {"of_tomorrow": 1}):
        (name,) = keyword
        with pytest.raises(ValueError, match=f"Linear: attention with {name} is not supported"):
            attention(torch.nn.Linear(1, 1), *tensors, None, scaling=1.0, **description, **keyword)


def test_the_shape_of_attention():
    """DeepSeek-V3's config names the rotated part alone `head_dim`; GPT-2's names no kv heads."""
    deepseek = attention_shape(AutoConfig.for_model("deepseek_v3"))
    assert (deepseek.kv_heads, deepseek.key_size, deepseek.value_size) == (128, 192, 128)
    assert deepseek.head_size == 192
    gpt2 = attention_shape(AutoConfig.for_model("gpt2"))
    assert (gpt2.kv_heads, gpt2.head_size, gpt2.sinks, gpt2.capped) == (12, 64, False, False)
    assert attention_shape(AutoConfig.for_model("gemma2")).capped
    assert not attention_shape(AutoConfig.for_model("gemma3_text")).capped
    gpt_oss = attention_shape(AutoConfig.for_model("gpt_oss"))
    assert (gpt_oss.kv_heads, gpt_oss.local_kv_heads(16), gpt_oss.sinks) == (8, 1, True)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "exaone4", "sliding_window": None},  # transformers divides by zero
        {"model_type": "phi3", "rope_scaling": {"type": "su"}},
        {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}},
    ],
    ids=["arithmetic", "lookup", "code"],
)
def test_a_config_that_transformers_cannot_read_is_refused(tmp_path, settings, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question on the terminal"))
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="a Hugging Face model"):
        load_config(str(tmp_path))


def test_a_base_model_fills_what_its_layers_have() -> None:
    """Falcon-H1's factors of a mixer's widths; weights that have memory stay as they are."""
    factors = [0.5, 0.25, 2.0, 3.0, 4.0]
    model = AutoModelForCausalLM.from_config(
        shrink(AutoConfig.for_model("falcon_h1", ssm_multipliers=factors))
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.rand_like(weight))  # other values than initial ones, ones and zeros
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    for mixer in recurrent_modules(model):
        assert sorted(mixer.mup_vector.unique()) == sorted(factors)
        mixer.mup_vector = mixer.mup_vector.to("meta")
    fill_buffers(model, torch.device("cpu"))
    for mixer in recurrent_modules(model):
        assert sorted(mixer.mup_vector.unique()) == sorted(factors)
    for name, weight in model.named_parameters():
        assert weight.equal(weights[name])
