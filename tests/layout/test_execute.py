"""The weight switch against `full_tensor()`."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hybridrl.layout.execute import switch_to_replica

SHAPES = {"a.weight": (7, 5), "b.weight": (2, 3, 4), "c.bias": (1,), "d.weight": (64, 33)}


def switch(dtypes, bucket_bytes):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    source = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in full.items()}
    destination = {
        name: torch.full(shape, torch.nan, dtype=dtypes[i % len(dtypes)])
        for i, (name, shape) in enumerate(SHAPES.items())
    }
    stats = switch_to_replica(source, destination, dist.group.WORLD, bucket_bytes)
    for name, tensor in destination.items():
        assert torch.equal(tensor, source[name].full_tensor().to(tensor.dtype)), name
    return stats.bytes_received


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("bucket_bytes", [1, 1000, 2**24])
def test_bit_exact_whatever_the_bucket(ranks, size, bucket_bytes):
    if bucket_bytes == 1 and size == 3:
        bucket_bytes = 64  # one element a bucket is 800 gathers; twice is enough
    for received in ranks(size, switch, [torch.float32, torch.bfloat16], bucket_bytes):
        chunks = {
            name: -(-shape[0] // size) * torch.Size(shape[1:]).numel()
            for name, shape in SHAPES.items()
        }
        width = dict(zip(SHAPES, [4, 2, 4, 2], strict=True))
        wire = sum(chunks[name] * width[name] for name in SHAPES)
        assert received == (size - 1) * wire


def switch_fsdp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.Linear(5, 11))
    replica = {name: torch.empty_like(p) for name, p in model.state_dict().items()}
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    shards = dict(model.named_parameters())
    # A fused destination: the second and third tensor are views of one, and a tied name is free.
    fused = torch.empty(6, 6)
    replica["1.weight"] = fused[:5]
    replica["tied"] = replica["0.weight"]
    switch_to_replica(shards, replica, dist.group.WORLD)
    for name, shard in shards.items():
        assert torch.equal(replica[name], shard.full_tensor().detach()), name
    assert torch.equal(fused[:5], replica["1.weight"])


def test_fsdp_shards_into_views(ranks):
    ranks(2, switch_fsdp)


def refuse():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="no parameter of that name"):
        switch_to_replica({"a": shard}, {}, group)
    with pytest.raises(ValueError, match="no trained parameter fills it"):
        switch_to_replica({"a": shard}, {"a": torch.ones(4, 2), "b": torch.ones(1)}, group)
    with pytest.raises(ValueError, match=r"trained \(4, 2\), generated \(2, 4\)"):
        switch_to_replica({"a": shard}, {"a": torch.ones(2, 4)}, group)
    with pytest.raises(ValueError, match="must be contiguous"):
        switch_to_replica({"a": shard}, {"a": torch.ones(2, 4).T}, group)
    whole = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
    with pytest.raises(ValueError, match="sharded on dim 0"):
        switch_to_replica({"a": whole}, {"a": torch.ones(4, 2)}, group)


def test_what_does_not_fit_is_refused(ranks):
    ranks(2, refuse)
