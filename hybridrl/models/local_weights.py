"""Fills a rank's part of a model with its boxes of the stored weights; no others are read."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.layout.box import Box
from hybridrl.layout.layout import Layout
from hybridrl.layout.local import LocalTensor
from hybridrl.models.buffers import persistent_buffers
from hybridrl.models.parallel import meta_model
from hybridrl.models.shard import GenParallel, instance_layout
from hybridrl.models.stored_weights import StoredWeights


def load_local(
    model: PreTrainedModel,
    path: str,
    config: PretrainedConfig,
    parallel: GenParallel,
    *,
    classifier: bool = False,
    key: str = "model.path",
) -> None:
    """Fill `model` (`shard.local_model` of `config`) with its shards of the weights at `path`.

    Padded rows of a vocabulary become zeros. Raises as `StoredWeights`.
    """
    layout = instance_layout(config, parallel.pp, parallel.tp, classifier, parallel.ep)
    with StoredWeights(path, config, classifier=classifier, key=key) as weights:
        fill_parameters(weights, model.named_parameters(), layout, parallel.instance_rank)
        weights.fill_buffers(model)


@torch.no_grad()
def take_local(
    model: PreTrainedModel,
    weights: Iterable[tuple[str, torch.Tensor]],
    config: PretrainedConfig,
    parallel: GenParallel,
) -> None:
    """Fill `model` (`shard.local_model` of `config`) from whole parameters and buffers, by name.

    They come one after the other, so no rank holds them all. Padding of a vocabulary stays as it
    is.
    """
    layout = instance_layout(config, parallel.pp, parallel.tp, False, parallel.ep)
    parameters, buffers = dict(model.named_parameters()), persistent_buffers(model)
    for name, tensor in weights:
        if name in parameters:
            held = LocalTensor(layout.local(name, parallel.instance_rank))
            copy_boxes(tensor, parameters[name].data, held)
        elif name in buffers:
            buffers[name].copy_(tensor)


def copy_boxes(whole: torch.Tensor, local: torch.Tensor, held: LocalTensor) -> None:
    """Copy the boxes `held` of a `whole` parameter to `local`; padding stays as it is."""
    for box in held.boxes:
        unpadded = box.intersect(Box.whole(tuple(whole.shape)))
        if unpadded is not None:
            local[held.slices(unpadded)].copy_(whole[unpadded.slices()])


def load_buffers(
    model: PreTrainedModel, path: str, config: PretrainedConfig, classifier: bool = False
) -> None:
    """Fill the persistent buffers of `model`, a part of the one at `path`; others stay."""
    if persistent_buffers(model):
        with StoredWeights(path, config, classifier=classifier) as weights:
            weights.fill_buffers(model)


def stored_buffers(path: str, config: PretrainedConfig) -> dict[str, torch.Tensor]:
    """The persistent buffers that a causal language model has at `path`, by name."""
    if not persistent_buffers(meta_model(config)):
        return {}
    with StoredWeights(path, config) as weights:
        return weights.buffers()


def fill_parameters(
    weights: StoredWeights,
    parameters: Iterable[tuple[str, nn.Parameter]],
    layout: Layout,
    rank: int,
) -> None:
    """Fill the parameters of `layout` with the boxes of `rank`; others, such as adapters, stay.

    A tied head has the embedding's name, on stages without an embedding too.
    """
    for name, parameter in parameters:
        if name in weights:
            data = parameter.detach()
            local = data.to_local() if isinstance(data, DTensor) else data
            weights.fill(local, name, LocalTensor(layout.local(name, rank)))
