"""Decoder layers whose whole call is computed again in the backward pass."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_layers(layers: Iterable[nn.Module], **settings: Any) -> None:
    """Let `layers` keep their inputs alone; `settings` go to torch's `checkpoint`.

    A call is computed again with its hooks, which hand over what belongs to it (`router_hooks`).
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
