"""The operations of a forward pass, against torch's own count of what a model runs."""

from functools import partial
from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybridrl.models.config_json import layers_with_keys
from hybridrl.models.flops import ForwardFlops, TowerFlops, forward_flops, state_flops
from hybridrl.models.image_text import language_config, meta_tower
from hybridrl.models.mixers import recurrent_modules

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 50,
}


def counted(config, tokens):
    """Operations of eager attention, which computes all pairs: twice those of a causal one."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, tokens, dtype=torch.long, device="meta"))
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model_equals_torchs_count(tied):
    config = Qwen3Config(**SIZES, tie_word_embeddings=tied)
    per_token, per_pair = forward_flops(config)
    for tokens in (10, 1000):
        want = counted(config, tokens)
        assert per_token * tokens + 2 * per_pair * tokens**2 == pytest.approx(want, rel=0.01)


def test_layers_with_a_window_pay_for_the_window():
    full, _ = forward_flops(MistralConfig(**SIZES, sliding_window=None))
    features = 4 * (16 + 16)
    assert forward_flops(MistralConfig(**SIZES, sliding_window=8)) == (
        full + 2 * 3 * 8 * features,
        0,
    )
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert forward_flops(Gemma3TextConfig(**SIZES, layer_types=kinds))[1] == features


def test_a_mixture_counts_the_experts_that_are_chosen():
    sizes = SIZES | {"moe_intermediate_size": 32, "decoder_sparse_step": 1}
    one, two = (
        forward_flops(Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=k))[0]
        for k in (1, 2)
    )
    assert two - one == 2 * 3 * 3 * 32 * 64  # layers, matrices of an expert


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "grouped heads": Qwen3Config(**SIZES),
    "tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "heads alike": Qwen3Config(**SIZES | {"num_key_value_heads": 4}),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=1),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("tokens", "scored"), [(7, 7), (40, 9), (3000, 1)])
def test_a_sequence_equals_torchs_count(name, tokens, scored):
    """What is computed counts: pairs at or before a token, the head where a token is scored.

    torch counts every pair, products alone, and all experts that eager code runs.
    """
    config = MODELS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if name == "experts":  # each token's two, computed one by one
        config = Qwen3Config(**SIZES | {"intermediate_size": 2 * 32})
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        router = 2 * tokens * 3 * 64 * 8
    else:
        router = 0
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, logits_to_keep=scored)
    pairs = 2 * 3 * 4 * (16 + 16) * (tokens**2 - tokens * (tokens + 1) // 2)
    want = counter.get_total_flops() - pairs + router
    # Norms and biases are parameters, too, and no products.
    assert ForwardFlops.of(MODELS[name])(tokens, scored) == pytest.approx(want, rel=0.01)


def test_pairs_of_a_window_by_counting_them():
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 4}, sliding_window=6, layer_types=kinds
    )
    flops = ForwardFlops.of(config)
    for tokens in (1, 5, 6, 7, 30):
        near = sum(0 <= query - key < 6 for query in range(tokens) for key in range(tokens))
        pairs = tokens * (tokens + 1) // 2
        features = 2 * 4 * (16 + 16)
        want = flops.per_token * tokens + 2 * features * (pairs + near)
        assert flops(tokens, 0) == want


# Recurrent layers


def hybrid(family, **changes):
    sizes = SIZES | {"num_hidden_layers": 4, "pad_token_id": 0, "intermediate_size": 64}
    return AutoConfig.for_model(family, **(sizes | changes))


DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
}  # fmt: skip


def products(config, tokens, scored):
    """What torch counts, without the pairs of a query and a key behind it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, logits_to_keep=scored)
    full = config.num_hidden_layers - len(recurrent_modules(model))
    behind = 2 * full * 4 * (16 + 16) * (tokens**2 - tokens * (tokens + 1) // 2)
    return counter.get_total_flops() - behind


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_next"])
def test_a_delta_rule_equals_torchs_count(family, monkeypatch):
    """transformers computes chunks of c tokens, whose products within a chunk grow with c.

    Those are no work of the model: they are left out by what two sizes of chunks differ.
    """
    experts = EXPERTS | {"shared_expert_intermediate_size": 32}
    mixture = {"mlp_only_layers": [0, 1, 2, 3], **experts} if family == "qwen3_next" else {}
    config, tokens, scored = hybrid(family, **DELTA, **mixture), 128, 20

    name = family.removesuffix("_text")
    modeling = import_module(f"transformers.models.{name}.modeling_{name}")
    rule, counts = modeling.torch_chunk_gated_delta_rule, []
    for size in (16, 32):
        own = partial(rule, chunk_size=size)
        monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", own)
        counts.append(products(config, tokens, scored))
    short, long = counts
    assert short < long
    want = 2 * short - long
    assert ForwardFlops.of(config)(tokens, scored) == pytest.approx(want, rel=0.03)
    states = tokens * state_flops(config)
    assert state_flops(config) == 3 * 6 * 4 * 32 * 24
    assert states > 0.1 * want, "states that the tolerance would hide"


def test_short_convolutions_equal_torchs_count():
    config = hybrid("lfm2", layer_types=["conv", "conv", "full_attention", "conv"])
    want = products(config, 128, 20)
    assert state_flops(config) == 0
    assert ForwardFlops.of(config)(128, 20) == pytest.approx(want, rel=0.03)


def test_mamba_adds_the_changes_of_its_states():
    """torch counts the product with a state, and not the outer product that changes it."""
    config = hybrid(
        "jamba", expert_layer_period=100, expert_layer_offset=50, num_experts=1,
        attn_layer_period=4, attn_layer_offset=3, use_mamba_kernels=False, mamba_d_state=64,
    )  # fmt: skip
    elements = 3 * 2 * 64 * 64  # layers, features, and what is kept of each
    assert state_flops(config) == 4 * elements
    want = products(config, 64, 20) + 64 * 2 * elements
    assert ForwardFlops.of(config)(64, 20) == pytest.approx(want, rel=0.03)


# Image towers


@pytest.mark.parametrize(("family", "deep"), [("qwen3_vl", [0, 1]), ("qwen3_5", None)])
@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 20, 20)])
def test_a_tower_equals_torchs_count(family, deep, grid):
    tower = {
        "depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "patch_size": 4,
        "out_hidden_size": 64, "num_position_embeddings": 256,
    }  # fmt: skip
    tower |= {} if deep is None else {"deepstack_visual_indexes": deep}
    whole = AutoConfig.for_model(family, text_config=SIZES, vision_config=tower)
    config = language_config(whole)
    model = meta_tower(config).to_empty(device="cpu")
    model.set_attn_implementation("eager")
    patches = grid[1] * grid[2]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(patches, 3 * 2 * 4 * 4), grid_thw=torch.tensor([grid]))
    assert TowerFlops.of(model)(patches) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_layers_that_attend_beside_a_mixer_count_as_both() -> None:
    """Falcon-H1's layers have pairs of tokens, and states besides."""
    sizes = {**SIZES, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8}
    config = AutoConfig.for_model("falcon_h1", **sizes)
    assert ForwardFlops.of(config).per_pair == forward_flops(Qwen3Config(**SIZES))[1] * 2
    assert layers_with_keys(config) == [True] * 3
    assert state_flops(config) == 4 * 3 * 64 * 8
