"""Decoder layers that torch compiles (`trainer.compile`)."""

import torch
from transformers import AttentionInterface, PreTrainedModel

from hybridrl.models.blocks import decoder_layers
from hybridrl.models.packed_attention import NAME, packed_attention


def compile_layers(model: PreTrainedModel) -> None:
    """Have each decoder layer run as graphs of `torch.compile`, for rows of any number of tokens.

    Call it before FSDP shards the layers, whose hooks then stay outside of the graphs. Packed
    attention stays a call between two graphs: its calls follow the lengths of a row's sequences,
    and each new row would be compiled anew.
    """
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)
