"""A small model whose elements are all different, and what ranks of a layout have of it."""

import torch

from hybridrl.layout.layout import Layout
from hybridrl.layout.parameters import BOTH, LAST, Parameter

NUM_LAYERS = 3


def parameters() -> list[Parameter]:
    """An odd vocabulary, tied at both ends; an odd number of layers; norms."""
    model_parameters = [Parameter("model.embed_tokens.weight", (37, 8), BOTH, 0)]
    for layer in range(NUM_LAYERS):
        at = f"model.layers.{layer}"
        model_parameters += [
            Parameter(f"{at}.q_proj.weight", (16, 8), layer, 0, units=4),
            Parameter(f"{at}.o_proj.weight", (8, 16), layer, 1, units=4),
            Parameter(f"{at}.norm.weight", (8,), layer),
        ]
    return [*model_parameters, Parameter("model.norm.weight", (8,), LAST)]


def numbered(layout: Layout) -> dict[str, torch.Tensor]:
    """The parameters, each element with a value of its own; padding is nan."""
    full, start = {}, 1
    for name, shape in layout.shapes.items():
        size = torch.Size(shape).numel()
        full[name] = torch.full(layout.rules[name].padded or shape, torch.nan)
        full[name][tuple(map(slice, shape))] = torch.arange(start, start + size).view(shape) * 1.0
        start += size
    return full


def own(layout: Layout, full: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """What a rank's tensors of the layout have."""
    boxes = {name: layout.local(name, rank) for name in layout.rules}
    return {name: full[name][held[0].slices()] for name, held in boxes.items() if held}
