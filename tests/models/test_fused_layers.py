"""Which modules of a family are fused, and that nothing else changes."""

import sys

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.models.fused_layers import fuse_layers

LAYERS = 2
SHAPE = {
    "vocab_size": 43, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": None,
}  # fmt: skip
HALF_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
HALF_ROTATED["rope_parameters"] |= {"partial_rotary_factor": 0.5}


def make(family, device="cpu", **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **changes})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    ("family", "norms", "rotations", "activations"),
    [
        ("llama", 2, 1, 1),
        ("qwen3", 4, 1, 1),
        ("gemma2", 4, 1, 1),
        ("gemma3_text", 6, 1, 1),
        ("qwen3_moe", 4, 1, 0),
        ("glm4_moe", 2, 1, 1),
        ("glm4", 4, 0, 0),  # pairs are rotated, gate and up are one product
        ("phi3", 2, 1, 0),
        ("gpt_oss", 2, 0, 0),
    ],
)
def test_modules_of_a_family(family, norms, rotations, activations):
    """In each layer, and one norm at the end. Another model of the family stays as it was."""
    model, other = make(family, "meta"), make(family, "meta")
    file = sys.modules[type(model).__module__]
    rotate = getattr(file, "apply_rotary_pos_emb", None)
    fused = fuse_layers(model)
    assert fused.norms == norms * LAYERS + 1
    assert (fused.rotations, fused.activations) == (rotations * LAYERS, activations * LAYERS)
    assert fused.number == sum("forward" in vars(module) for module in model.modules())
    assert not any("forward" in vars(module) for module in other.modules())
    assert getattr(file, "apply_rotary_pos_emb", None) is rotate


@pytest.mark.parametrize("family", ["gpt2", "opt", "cohere"])
def test_other_norms_stay(family):
    assert fuse_layers(make(family, "meta")).norms == 0


class Centered(nn.Module):
    """A norm with a constant and a weight that is no RMSNorm."""

    variance_epsilon = 1e-6

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return torch.nn.functional.layer_norm(x, (32,), self.weight, eps=self.variance_epsilon)


def test_a_module_that_computes_another_formula_stays():
    model = make("llama", "meta")
    model.model.norm = Centered()
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    fused = fuse_layers(model)
    assert (fused.norms, fused.activations) == (2 * LAYERS, LAYERS - 1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("qwen3", {"hidden_act": "gelu_pytorch_tanh"}),
        ("glm4_moe", {**HALF_ROTATED, "n_routed_experts": 4, "num_experts_per_tok": 2}),
        ("phi3", HALF_ROTATED),
    ],
    ids=str,
)
def test_a_fused_model_computes_the_same(family, changes):
    """Logits and every gradient; heads may be rotated in part."""
    ids, results = torch.randint(0, 43, (1, 19)), []
    for fuses in (False, True):
        model = make(family, **changes)
        if fuses:
            assert fuse_layers(model).rotations == LAYERS
        logits = model(ids).logits
        logits.square().sum().backward()
        results.append([logits.detach(), *(p.grad for p in model.parameters())])
    for got, wanted in zip(*reversed(results), strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            bound = 1e-5 * (1 + float(wanted.abs().max()))
            torch.testing.assert_close(got, wanted, rtol=0, atol=bound)
