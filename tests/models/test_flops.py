"""The operations of a forward pass, against torch's own count of what a model runs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybridrl.models.flops import ForwardFlops, forward_flops

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
