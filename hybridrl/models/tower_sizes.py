"""The bytes of an image tower, and of what it makes, counted without memory for its weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from transformers import AttentionInterface, PretrainedConfig

from hybridrl.models.activations import Activations, PeakMemory, count_once
from hybridrl.models.counted_modules import FusedAttention
from hybridrl.models.image_text import meta_tower

_ATTENTION = "hybridrl_counted_tower"


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """As SDPA, from [1, heads, patches, dim] to [1, patches, heads, dim]; its kernels write so."""
    out: torch.Tensor = FusedAttention.apply(*(x.transpose(1, 2) for x in (query, key, value)))
    return out, None


AttentionInterface.register(_ATTENTION, _attend)


@dataclass(frozen=True, slots=True)
class TowerSizes:
    """A tower's elements: its `parameters`, the `features` of a pad, the `pixels` of a patch.

    An image has `patches_per_pad` patches for each pad.
    """

    parameters: int
    features: int
    patches_per_pad: int
    pixels: int


@count_once
def tower_sizes(config: PretrainedConfig) -> TowerSizes:
    """Return the sizes of the tower that belongs to the text part of this `config`."""
    tower: Any = meta_tower(config)
    deep = len(getattr(tower, "deepstack_merger_list", ()))
    return TowerSizes(
        parameters=sum(parameter.numel() for parameter in tower.parameters()),
        features=(1 + deep) * config.hidden_size,
        patches_per_pad=tower.config.spatial_merge_size**2,
        pixels=_patch_width(tower.config),
    )


def _patch_width(sizes: Any) -> int:
    """Elements of a patch: channels x frames x side x side."""
    return int(sizes.in_channels * sizes.temporal_patch_size * sizes.patch_size**2)


@count_once
def tower_activations(
    config: PretrainedConfig, patches: int, *, dtype: torch.dtype, on_cpu: bool
) -> int:
    """The most bytes that the tower takes for an image: pixels, activations and features.

    The image has so many `patches`. Its pixels are read in float32, on a CPU where the tower is.
    """
    tower, memory, before = _counted_tower(config, dtype)
    with memory, torch.no_grad():
        _features(tower, patches, torch.float32 if on_cpu else dtype)
        return memory.peak("meta") - before


@count_once
def trained_tower_activations(
    config: PretrainedConfig, patches: int, *, dtype: torch.dtype, on_cpu: bool
) -> Activations:
    """Count an image of so many `patches` in a tower that trains, besides its features."""
    tower, memory, before = _counted_tower(config, dtype)
    with memory:
        features = _features(tower, patches, torch.float32 if on_cpu else dtype)
        edge, gradient = get_gradient_edge(features), torch.empty_like(features)
        del features
        kept = memory.allocated("meta") - gradient.nbytes
        memory.restart()
        torch.autograd.backward(edge, gradient)
        backward = memory.peak("meta")
    return Activations(kept - before, backward - before)


def _counted_tower(config: PretrainedConfig, dtype: torch.dtype) -> tuple[Any, PeakMemory, int]:
    """A tower, what counts its memory, and the bytes of its weights."""
    tower: Any = meta_tower(config).to(dtype)
    tower.set_attn_implementation(_ATTENTION)
    memory = PeakMemory()
    memory.track_external(tower)
    return tower, memory, memory.allocated("meta")


def _features(tower: Any, patches: int, read_dtype: torch.dtype) -> torch.Tensor:
    """Features of an image as `images.tower_features` makes them; its grid has no values here."""
    sizes, dtype = tower.config, tower.dtype
    head_dim = sizes.hidden_size // sizes.num_heads
    ends = torch.tensor([0, patches], dtype=torch.int32)
    deep_layers = getattr(sizes, "deepstack_visual_indexes", ())
    read = torch.empty(patches, _patch_width(sizes), dtype=read_dtype, device="meta")
    pixels = read.to(dtype)
    # Places are interpolated between four of a square.
    nearest = torch.empty(4, patches, dtype=torch.long, device="meta")
    shares = torch.empty(4, patches, 1, device="meta")
    hidden = tower.patch_embed(pixels)
    places = (tower.pos_embed(nearest) * shares).sum(0)
    hidden = hidden + places.to(dtype)
    angles = torch.empty(patches, head_dim // 2, device="meta")
    both = torch.cat([angles, angles], -1)
    turns = both.cos(), both.sin()
    deep: list[torch.Tensor] = []
    for layer, block in enumerate(tower.blocks):
        hidden = block(hidden, cu_seqlens=ends, position_embeddings=turns)
        if layer in deep_layers:
            deep.append(tower.deepstack_merger_list[len(deep)](hidden))
    return torch.stack([tower.merger(hidden), *deep], 1)
