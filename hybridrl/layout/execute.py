"""The weight switch: from training shards to a whole replica on every rank."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

# torch 2.13 renamed it and warns under the old name, which older versions alone know.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

BUCKET_BYTES = 16 * 2**20
"""Default size of a bucket: one per rank is gathered at a time."""


@dataclass(frozen=True, slots=True)
class SwitchStats:
    """What one switch cost this rank: bytes that came from other ranks (padding included)."""

    bytes_received: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Piece:
    """Elements [start, stop) of one parameter's chunk, at `offset` in the bucket."""

    name: str
    start: int
    stop: int
    offset: int


def switch_to_replica(
    source: Mapping[str, torch.Tensor],
    destination: Mapping[str, torch.Tensor],
    group: dist.ProcessGroup,
    bucket_bytes: int = BUCKET_BYTES,
) -> SwitchStats:
    """Fill every tensor of `destination` from the shards in `source`, on all ranks of `group`.

    Names are those of the Hugging Face state dict. `source` holds DTensors that are sharded on
    dim 0 over `group` (FSDP2's layout), or tensors that every rank has whole. Values are cast to
    the destination's dtype before the wire and travel in buckets of a fixed size, so the extra
    memory is one bucket and its gathered copy, and a parameter may span buckets. A tied tensor
    stands in `source` once; its second name in `destination` must share the storage.

    Afterwards each destination equals `full_tensor().to(dtype)` bit for bit. Raises ValueError
    where names or shapes differ, or a layout is not one of the above.
    """
    begun = time.perf_counter()
    _check(source, destination)
    num_ranks, received = dist.get_world_size(group), 0
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in source.items():
        if isinstance(tensor, DTensor) and num_ranks > 1:
            by_dtype.setdefault(destination[name].dtype, []).append(name)
        else:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            destination[name].copy_(local.detach())
    for dtype, names in by_dtype.items():
        chunks = {name: _chunk_elements(source[name], num_ranks) for name in names}
        capacity = max(1, bucket_bytes // dtype.itemsize)
        device = destination[names[0]].device
        bucket = torch.zeros(min(capacity, sum(chunks.values())), dtype=dtype, device=device)
        gathered = bucket.new_empty(num_ranks, len(bucket))
        for pieces in _buckets(chunks, len(bucket)):
            size = pieces[-1].offset + pieces[-1].stop - pieces[-1].start
            _fill(bucket, pieces, source)
            out = gathered.view(-1)[: num_ranks * size].view(num_ranks, size)
            _all_gather(out, bucket[None, :size], group=group)
            _unpack(out, pieces, chunks, destination)
            received += (num_ranks - 1) * size * dtype.itemsize
    return SwitchStats(received, time.perf_counter() - begun)


def _check(source: Mapping[str, torch.Tensor], destination: Mapping[str, torch.Tensor]) -> None:
    filled = {destination[name].data_ptr() for name in source if name in destination}
    for name in source:
        if name not in destination:
            raise ValueError(f"{name} is trained, but generation has no parameter of that name")
        want, got = destination[name], source[name]
        if want.shape != got.shape:
            raise ValueError(f"{name}: trained {tuple(got.shape)}, generated {tuple(want.shape)}")
        if not want.is_contiguous():
            raise ValueError(f"{name}: the destination must be contiguous")
        if isinstance(got, DTensor) and tuple(got.placements) != (Shard(0),):
            raise ValueError(f"{name}: wanted one axis sharded on dim 0, got {got.placements}")
    for name, tensor in destination.items():
        if name not in source and tensor.data_ptr() not in filled:
            raise ValueError(f"{name} is generated with, but no trained parameter fills it")


def _chunk_elements(tensor: torch.Tensor, num_ranks: int) -> int:
    """Elements of every rank's chunk of a Shard(0) tensor, the last ones padded."""
    rows = -(-tensor.shape[0] // num_ranks)
    return rows * tensor.shape[1:].numel()


def _buckets(chunks: Mapping[str, int], capacity: int) -> Iterator[list[_Piece]]:
    """Cut the row of chunks into buckets of `capacity` elements."""
    pieces: list[_Piece] = []
    filled = 0
    for name, size in chunks.items():
        start = 0
        while start < size:
            taken = min(size - start, capacity - filled)
            pieces.append(_Piece(name, start, start + taken, filled))
            start, filled = start + taken, filled + taken
            if filled == capacity:
                yield pieces
                pieces, filled = [], 0
    if pieces:
        yield pieces


def _fill(bucket: torch.Tensor, pieces: list[_Piece], source: Mapping[str, torch.Tensor]) -> None:
    for piece in pieces:
        tensor = source[piece.name]
        assert isinstance(tensor, DTensor)
        own = tensor.to_local().detach().reshape(-1)[piece.start : piece.stop]
        bucket[piece.offset : piece.offset + len(own)].copy_(own)  # casts


def _unpack(
    gathered: torch.Tensor,
    pieces: list[_Piece],
    chunks: Mapping[str, int],
    destination: Mapping[str, torch.Tensor],
) -> None:
    """Rank r's chunk is rows [r, r + 1) * chunk of the flat parameter; padding is left out."""
    for piece in pieces:
        flat, chunk = destination[piece.name].detach().view(-1), chunks[piece.name]
        for rank, row in enumerate(gathered):
            start = min(rank * chunk + piece.start, len(flat))
            stop = min(rank * chunk + piece.stop, len(flat))
            flat[start:stop].copy_(row[piece.offset : piece.offset + stop - start])
