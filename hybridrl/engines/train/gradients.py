"""Gradients of a model with sharded and replicated parameters."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from hybridrl.engines.train.build import TrainDims
from hybridrl.models.stages import Chunk, modules_before


def sum_tied(chunks: Sequence[Chunk], dims: TrainDims) -> None:
    """Add the gradients of a tied embedding, which first and last chunk hold as two copies."""
    copies = [grad.to_local() for grad, first in _gradients(chunks, dims) if first is not None]
    if not copies:
        return
    if len(copies) == 2:  # both chunks are here
        total = copies[0] + copies[1]
    else:
        (gradient,) = copies
        group, peer = dims.mesh.get_group("pp"), dims.axes.pp - 1 - dims.rank("pp")
        other = torch.empty_like(gradient)
        work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, gradient, group=group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=group, group_peer=peer),
            ]
        )
        for request in work:
            request.wait()
        total = gradient + other
    for gradient in copies:
        gradient.copy_(total)


def local_gradients(
    chunks: Sequence[Chunk], dims: TrainDims, factor: float = 1.0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """This rank's shards, and its share of the squared norm: each element of the model counts once.

    The shards are multiplied by `factor` first. The sum of the shares over all ranks is the square
    of the full gradient's norm [] float64.
    """
    gradients, shares = [], []
    for gradient, first in _gradients(chunks, dims):
        gradients.append(gradient.to_local())
        shares.append(0.0 if first is False else 1 / _num_copies(gradient, dims))
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    squares = torch.stack(torch._foreach_norm(gradients)).double().square()
    return gradients, (squares * squares.new_tensor(shares)).sum()


def _gradients(chunks: Sequence[Chunk], dims: TrainDims) -> Iterator[tuple[DTensor, bool | None]]:
    """Gradients; and for the copies of a tied embedding, whether it is the first chunk's."""
    for chunk in chunks:
        tied = chunk.model.config.tie_word_embeddings and dims.num_chunks > 1
        embedding = f"{modules_before(chunk.model.config)[0]}.weight"
        for name, parameter in chunk.named_parameters():
            if isinstance(parameter.grad, DTensor):
                yield parameter.grad, chunk.first if tied and name.endswith(embedding) else None


def _num_copies(gradient: DTensor, dims: TrainDims) -> int:
    """Ranks that hold the same shard."""
    names = gradient.device_mesh.mesh_dim_names or ()
    replicated_on_tp = any(
        name == "tp" and isinstance(placement, Replicate)
        for name, placement in zip(names, gradient.placements, strict=True)
    )
    return dims.axes.replicas * (dims.axes.tp if replicated_on_tp else 1)
