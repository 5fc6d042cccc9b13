"""Tensors of a model that are no parameters: constants of its config, and a router's bias.

The routing bias of DeepSeek and GLM is a buffer that checkpoints have: a persistent one.
"""

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

ROUTING_BIAS = "e_score_correction_bias"
"""transformers' name of the bias that a router adds to scores for the choice alone."""


def persistent_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The buffers that the model's checkpoints have, by name."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def routing_biases(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The biases of routers among the `buffers`, by name."""
    return {name: x for name, x in buffers.items() if name.rpartition(".")[2] == ROUTING_BIAS}


@torch.no_grad()
def copy_buffers(model: PreTrainedModel, buffers: Mapping[str, torch.Tensor]) -> None:
    """Fill the persistent buffers of `model`, which may be a part of the whole, by name."""
    for name, buffer in persistent_buffers(model).items():
        buffer.copy_(buffers[name])


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Give the buffers on the meta device memory on `device`, and transformers' initial values.

    Those are computed from the config, as where transformers loads a model. A persistent buffer
    may have its values in the checkpoint alone: `local_weights.load_buffers` reads them. A routing
    bias is in float32: it moves by less than bfloat16 can tell.
    """
    precise = model._keep_in_fp32_modules_strict or ()
    filled = []
    for prefix, module in model.named_modules():
        empty = [name for name, b in module.named_buffers(recurse=False) if b.is_meta]
        for name in empty:
            dtype = module._buffers[name].dtype
            is_precise = name == ROUTING_BIAS or any(word in f"{prefix}.{name}" for word in precise)
            if dtype.is_floating_point and is_precise:
                dtype = torch.float32
            shape = module._buffers[name].shape
            module._buffers[name] = torch.zeros(shape, dtype=dtype, device=device)
        if empty:
            filled.append(module)
    if filled:
        for parameter in model.parameters():
            parameter._is_hf_initialized = True  # transformers then leaves it as it is
        # The base model may fill what its layers have (Falcon-H1's `mup_vector`).
        for module in (*filled, model.base_model):
            model._init_weights(module)
