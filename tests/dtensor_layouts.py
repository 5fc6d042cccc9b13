"""The layout of tensors that are distributed already, read off their DTensors."""

from collections.abc import Mapping

import numpy as np
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridrl.layout.layout import Layout, Rule, Split
from hybridrl.layout.mesh import Mesh


def layout_of(tensors: Mapping[str, DTensor]) -> Layout:
    """The layout of DTensors, from their placements; experts may have a mesh of their own.

    FSDP2 cuts the shards of tensor parallelism, though its axis comes first in the mesh: DTensor
    marks that by a strided shard. Shapes are the DTensors', a padded vocabulary included; pipeline
    stages are not in the mesh of a DTensor. Raises ValueError for no tensors, and for placements
    other than copies and shards.
    """
    if not tensors:
        raise ValueError("no tensors: wanted at least one DTensor")
    rules = {}
    for name, tensor in tensors.items():
        mesh = tensor.device_mesh
        axes = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
        ranks = np.asarray(mesh.mesh).ravel().tolist()
        sizes = tuple(zip(axes, mesh.shape, strict=True))
        splits = _splits(name, tensor, axes)
        rules[name] = Rule(splits=splits, mesh=Mesh(sizes, tuple(ranks)))
    mesh = next(iter(rules.values())).mesh
    return Layout(mesh, {n: tuple(t.shape) for n, t in tensors.items()}, rules)


def _splits(name: str, tensor: DTensor, axes: tuple[str, ...]) -> tuple[Split, ...]:
    plain, strided = [], []
    for axis, placement in zip(axes, tensor.placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        if isinstance(placement, Shard):
            plain.append(Split(axis, placement.dim))
        elif type(placement).__name__ == "_StridedShard":  # cuts what later axes have cut already
            strided.append(Split(axis, placement.dim))
        else:
            raise ValueError(f"{name}: wanted copies and shards, got {placement} along {axis}")
    return (*plain, *strided)
