"""Activations that families add: scores as a tensor, a sink's feature, a capped head."""

import pytest
import torch
from transformers import AutoConfig

from hybridrl.config import Attention
from hybridrl.models.activations import head_activations, layer_activations

TOKENS, HEADS, VOCAB, SCORED = 256, 4, 43, 100
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def _layer(attention, model_type="gemma2", dtype=torch.float32, **changes):
    config = AutoConfig.for_model(model_type, **{**SHAPE, **changes})
    return layer_activations(config, TOKENS, dtype=dtype, attention=attention)


def _head(**changes):
    config = AutoConfig.for_model(**{"model_type": "gemma2", **SHAPE, **changes})
    return head_activations(config, SCORED, dtype=torch.float32, triton=False)


def test_capped_scores_are_a_tensor_in_torch():
    scores = 4 * HEADS * TOKENS**2
    free, capped = (_layer(Attention.torch, attn_logit_softcapping=cap) for cap in (None, 50.0))
    assert capped.kept - free.kept >= 2 * scores  # the tangents and the weights
    assert capped.scoring >= 2 * scores > free.scoring
    assert _layer(Attention.flash) == _layer(Attention.flash, attn_logit_softcapping=None)


def test_a_sink_needs_no_scores():
    """A feature more in each query, key and value, and a token more."""
    kept = _layer(Attention.torch, "gpt_oss", torch.bfloat16, num_local_experts=4).kept
    fused = _layer(Attention.flash, "gpt_oss", torch.bfloat16, num_local_experts=4).kept
    assert 0 < kept - fused < 2 * HEADS * TOKENS**2


def test_a_capped_head_keeps_the_slopes_of_a_chunk():
    free, capped = (_head(final_logit_softcapping=cap) for cap in (None, 30.0))
    assert capped.backward == free.backward + 4 * SCORED * VOCAB
    assert capped.kept == free.kept


def test_a_heads_bias_has_a_gradient():
    """The head of Phi has a bias, that of Llama none."""
    without, with_bias = (_head(model_type=name, head_dim=None) for name in ("llama", "phi"))
    assert with_bias.backward - without.backward == 4 * VOCAB


def test_the_same_layer_is_counted_once(monkeypatch):
    want = _layer(Attention.torch)
    monkeypatch.setattr("hybridrl.models.activations._count", None)
    assert _layer(Attention.torch) is want
    with pytest.raises(TypeError):
        _layer(Attention.torch, hidden_size=64)
