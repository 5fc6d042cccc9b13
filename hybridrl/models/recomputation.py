"""Recomputed activations: all of a decoder layer's, or those that cost little to compute again."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from hybridrl.config import ActivationMode
from hybridrl.models.blocks import decoder_layers

COUNTED_ATTENTION = "hybridrl::counted_attention"
"""The operation that stands for a fused attention kernel where no kernel runs."""

KEPT = frozenset(
    {
        # Products of matrices, and of the matrices of experts. Those of scores of attention, `bmm`,
        # are not here: they have the square of the tokens.
        "aten::mm",
        "aten::addmm",
        "aten::_grouped_mm",
        # Attention: torch's kernels for GPUs and CPUs, and flash-attn's.
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
        COUNTED_ATTENTION,
    }
)
"""Operations whose results `selective` keeps: nearly all of a layer's computation."""


def recompute_layers(model: PreTrainedModel, mode: ActivationMode) -> None:
    """Have each decoder layer compute its activations again in the backward pass.

    `recompute` computes all of them from the layer's input. `selective` keeps the results of
    products of matrices and of attention, and computes norms, activation functions and rotations
    again (Korthikanti et al., arXiv 2205.05198, keep and recompute by cost as well).
    """
    settings = {"context_fn": _contexts} if mode is ActivationMode.selective else {}
    checkpoint_layers(decoder_layers(model), **settings)


def checkpoint_layers(layers: Iterable[nn.Module], **settings: Any) -> None:
    """Let `layers` keep their inputs alone; `settings` go to torch's `checkpoint`.

    A call is computed again with its hooks, which hand over what belongs to it (`hook_routers`).
    transformers' own way leaves them out in its newer versions.
    """
    for layer in layers:
        layer.__class__ = _checkpointed(type(layer), settings)


def _checkpointed(layer_class: Any, settings: dict[str, Any]) -> type[nn.Module]:
    """The class of a layer, whose calls are checkpointed: torch looks there for `__call__`."""

    class Checkpointed(layer_class):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            compute = super().__call__
            if not self.training or not torch.is_grad_enabled():
                return compute(*args, **kwargs)
            return checkpoint(partial(compute, **kwargs), *args, use_reentrant=False, **settings)

    Checkpointed.__name__ = layer_class.__name__
    return Checkpointed


def _contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a layer's forward pass, and of its second one."""
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
    contexts = create_selective_checkpoint_contexts(_policy)
    return contexts


def _policy(
    context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    kept = operation.name() in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
