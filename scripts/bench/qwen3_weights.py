"""Qwen3's weights for loops that are written by hand."""

from typing import Any

import torch


def layer_weights(body: Any) -> list[dict[str, torch.Tensor]]:
    """The weights of each decoder layer of a Qwen3; products of one input are one matrix."""
    return [
        {
            "qkv": torch.cat([getattr(layer.self_attn, f"{x}_proj").weight for x in "qkv"]),
            "q_norm": layer.self_attn.q_norm.weight,
            "k_norm": layer.self_attn.k_norm.weight,
            "out": layer.self_attn.o_proj.weight,
            "gate_up": torch.cat([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]),
            "down": layer.mlp.down_proj.weight,
            "norm1": layer.input_layernorm.weight,
            "norm2": layer.post_attention_layernorm.weight,
        }
        for layer in body.layers
    ]
