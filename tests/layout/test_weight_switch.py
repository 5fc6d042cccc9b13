"""The weight switch on real processes, against slices of the whole parameters."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hybridrl.config.layout import Grouping
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layout import Layout, Rule, Split
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import BOTH, LAST, Parameter
from hybridrl.layout.plan import Plan, plan
from hybridrl.layout.switching import plan_switch
from hybridrl.layout.weight_switch import SwitchStats, WeightSwitch

Ranks = Callable[..., list[Any]]
NUM_LAYERS = 4


def awkward_model(kv_heads: int) -> list[Parameter]:
    """An odd vocabulary, tied at both ends; few key heads; two blocks in one; odd norms."""
    parameters = [Parameter("embed", (37, 6), BOTH, 0), Parameter("norm", (7,), LAST)]
    for layer in range(NUM_LAYERS):
        parameters += [
            Parameter(f"{layer}.q", (24, 6), layer, 0, units=8),
            Parameter(f"{layer}.k", (3 * kv_heads, 6), layer, 0, units=kv_heads),
            Parameter(f"{layer}.o", (6, 24), layer, 1, units=8),
            Parameter(f"{layer}.experts", (3, 16, 5), layer, 1, blocks=2),
            Parameter(f"{layer}.gate_up", (4, 16, 5), layer, 1, blocks=2, experts=4),
            Parameter(f"{layer}.down", (4, 6, 8), layer, 2, experts=4),
            Parameter(f"{layer}.norm", (5,), layer),
        ]
    return parameters


def whole(layout: Layout) -> dict[str, torch.Tensor]:
    """The parameters, each element with a value of its own; padding is nan."""
    full, start = {}, 0
    for name, shape in layout.shapes.items():
        size = torch.Size(shape).numel()
        values = torch.arange(start, start + size).float().view(shape) * (1 + 2**-12)
        full[name] = torch.full(layout.rules[name].padded or shape, torch.nan)
        full[name][tuple(map(slice, shape))] = values
        start += size
    return full


def local_shard(
    layout: Layout, full: Mapping[str, torch.Tensor], name: str, rank: int
) -> torch.Tensor:
    """What a rank's tensor of the layout has."""
    boxes = layout.local(name, rank)
    split = [split.dim for split in layout.rules[name].splits if split.blocks > 1]
    parts = [full[name][box.slices()] for box in boxes]
    return torch.cat(parts, split[0] if split else 0) if parts else torch.empty(0)


def run(there: Plan, dtype: torch.dtype, bucket: int, least_gather: int = 3) -> SwitchStats:
    """Two switches, into views of larger tensors; every destination compared."""
    rank = dist.get_rank()
    before, after = whole(there.src), whole(there.dst)
    source = {name: local_shard(there.src, before, name, rank) for name in there.src.rules}
    destination = {}
    for name in there.dst.rules:
        shape = local_shard(there.dst, after, name, rank).shape
        fused = torch.full((*shape[:-1], shape[-1] + 3), torch.nan, dtype=dtype)
        destination[name] = fused[..., 1:-2]
    destination["head"] = destination["embed"]  # tied
    switch = WeightSwitch(there, rank, dtype, bucket, least_gather=least_gather)
    for factor in (1, -2):
        stats = switch.switch({n: t * factor for n, t in source.items()}, destination)
        for name in there.dst.rules:
            wanted = (local_shard(there.dst, after, name, rank) * factor).to(dtype)
            same = (wanted == destination[name]) | (wanted.isnan() & destination[name].isnan())
            assert same.all(), (name, rank, factor)
    return stats


def random_switches(num_ranks: int, count: int) -> list[tuple[Any, ...]]:
    """Training axes, generation pp, tp and ep, order, dtype, bucket and group size."""
    draw = random.Random(num_ranks)
    sizes = [size for size in (1, 2, 4, 8) if size <= num_ranks]
    axes = [TrainAxes(*s) for s in product(sizes, repeat=4) if TrainAxes(*s).ranks == num_ranks]
    axes = [a for a in axes if a.pp <= NUM_LAYERS]
    pairs = [
        (a, pp, tp)
        for a, pp, tp in product(axes, sizes, sizes)
        if num_ranks % (pp * tp) == 0 and pp <= NUM_LAYERS
    ]
    orders = [Grouping.strided, Grouping.vanilla]
    chosen = draw.sample(pairs, min(count, len(pairs)))
    eps = [size for size in (1, 2, 4) if size <= num_ranks]
    return [
        (
            replace(a, ep=draw.choice([ep for ep in eps if a.fsdp * a.tp % ep == 0])),
            pp,
            tp,
            draw.choice([1, tp] if tp <= 4 else [1]),
            draw.choice(orders),
            draw.choice([torch.float32, torch.bfloat16]),
            draw.choice([64, 400, 2**24]),
            draw.choice([2, 3, 99]),
        )
        for a, pp, tp in chosen
    ]


def many(cases: list[tuple[Any, ...]]) -> list[SwitchStats]:
    errors = []
    for axes, pp, tp, ep, grouping, dtype, bucket, least_gather in cases:
        model = awkward_model(max(2, axes.tp))
        there = plan_switch(model, axes, pp, tp, grouping, gen_ep=ep).plan
        errors.append(run(there, dtype, bucket, least_gather))
    return errors


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("size", "count"),
    [
        (2, 10),
        (4, 8),
        (8, 4),
        pytest.param(4, 20, marks=pytest.mark.slow),
        pytest.param(8, 8, marks=pytest.mark.slow),
    ],
)
def test_random_layouts_are_bit_exact(ranks: Ranks, size: int, count: int) -> None:
    """The received bytes are the plan's, too, with no more scratch than two buckets."""
    cases = random_switches(size, count)
    results = ranks(size, many, cases)
    paths = set()
    for i, (axes, pp, tp, ep, grouping, dtype, bucket, _) in enumerate(cases):
        model = awkward_model(max(2, axes.tp))
        there = plan_switch(model, axes, pp, tp, grouping, gen_ep=ep).plan
        received = there.traffic.received * dtype.itemsize
        for rank in range(size):
            stats = results[rank][i]
            paths.add(stats.path)
            assert stats.bytes_received == received[rank], cases[i]
            assert stats.bytes_theory == there.least[rank] * dtype.itemsize
            # A group of n needs room for n + 1 elements at least.
            assert stats.scratch_bytes <= 2 * max(bucket, (1 + size) * dtype.itemsize), cases[i]
            assert stats.seconds >= stats.seconds_pack + stats.seconds_wait + stats.seconds_copy
    assert {"exchange", "local"} <= paths
    assert size == 2 or "gather+exchange" in paths


def nested(least_gather: int) -> SwitchStats:
    parameters = [Parameter(f"{i}.up", (64, 48), i, 0) for i in range(NUM_LAYERS)]
    parameters += [Parameter("embed", (64, 48), BOTH, 0)]
    there = plan_switch(parameters, TrainAxes(fsdp=4), 1, 1).plan
    return run(there, torch.bfloat16, 1000, least_gather)  # a parameter is 6 buckets


@pytest.mark.long
def test_gather_and_exchange_receive_the_same(ranks: Ranks) -> None:
    for gathered, exchanged in zip(ranks(4, nested, 3), ranks(4, nested, 99), strict=True):
        assert (gathered.path, exchanged.path) == ("gather", "exchange")
        assert gathered.bytes_received == gathered.bytes_theory == exchanged.bytes_received
        assert gathered.bytes_received == (NUM_LAYERS + 1) * 64 * 48 * 2 * 3 // 4
        assert max(gathered.scratch_bytes, exchanged.scratch_bytes) <= 2000


def to_others() -> tuple[int, int]:
    """Ranks 0 and 1 train, 2 and 3 generate: some hold nothing before, some nothing after."""
    rank, shapes = dist.get_rank(), {"embed": (9, 4)}
    src = Layout(Mesh((("fsdp", 2),)), shapes, {"embed": Rule(splits=(Split("fsdp", 0),))})
    dst = Layout(Mesh((("tp", 2),), (2, 3)), shapes, {"embed": Rule(splits=(Split("tp", 1),))})
    full = torch.arange(36.0).view(9, 4)
    source = {"embed": full[:5] if rank == 0 else full[5:]} if rank < 2 else {}
    destination = {"embed": torch.empty(9, 2)} if rank > 1 else {}
    stats = WeightSwitch(plan(src, dst), rank, torch.float32).switch(source, destination)
    if rank > 1:
        assert torch.equal(destination["embed"], full[:, 2 * rank - 4 : 2 * rank - 2])
    return stats.bytes_received, stats.bytes_theory


def test_weights_go_to_ranks_that_do_not_train(ranks: Ranks) -> None:
    assert ranks(4, to_others) == [(0, 0), (0, 0), (72, 72), (72, 72)]


def subgroup() -> None:
    """Ranks of the plan are those of the group."""
    shapes = {"embed": (8, 4)}
    mesh = Mesh((("fsdp", 3),))
    src = Layout(mesh, shapes, {"embed": Rule(splits=(Split("fsdp", 0),))})
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return
    rank = dist.get_rank(group)
    full = torch.arange(32.0).view(8, 4)
    destination = {"embed": torch.empty(8, 4)}
    switch_plan = plan(src, Layout(mesh, shapes, {"embed": Rule()}))
    switch = WeightSwitch(switch_plan, rank, torch.float32, group=group)
    switch.switch({"embed": full[3 * rank : 3 * rank + 3]}, destination)
    assert torch.equal(destination["embed"], full)


def test_a_group_of_its_own(ranks: Ranks) -> None:
    ranks(4, subgroup)


def refuse() -> None:
    mesh, shapes = Mesh((("fsdp", 2),)), {"a": (4, 2)}
    src = Layout(mesh, shapes, {"a": Rule(splits=(Split("fsdp", 0),))})
    switch_plan = plan(src, Layout(mesh, shapes, {"a": Rule()}))
    switch = WeightSwitch(switch_plan, dist.get_rank(), torch.float32)
    shard, replica = {"a": torch.ones(2, 2)}, {"a": torch.ones(4, 2)}
    for source, destination, message in [
        ({}, replica, r"a: no trained tensor of that name; wanted \(2, 2\)"),
        (shard, {}, r"a: no generated tensor of that name; wanted \(4, 2\)"),
        ({"a": torch.ones(4, 2)}, replica, r"a: trained \(4, 2\), the layout says \(2, 2\)"),
        (shard, {"a": torch.ones(2, 4)}, r"a: generated \(2, 4\), the layout says \(4, 2\)"),
        (shard, {"a": torch.ones(4, 2).bfloat16()}, "a: generated in torch.bfloat16, the wire"),
        (shard, replica | {"b": torch.ones(1)}, "b is generated with, but no trained parameter"),
        (shard | {"b": torch.ones(1)}, replica, "b is trained, but generation has no parameter"),
    ]:
        with pytest.raises(ValueError, match=message):
            switch.switch(source, destination)
    switch.switch(shard, replica)  # nothing was sent before


def test_what_does_not_fit_is_refused(ranks: Ranks) -> None:
    ranks(2, refuse)


def fsdp_to_replica() -> None:
    """Shards as FSDP2 makes them, the last one of an odd vocabulary smaller."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 5), nn.Linear(5, 11))
    replica = {name: torch.empty_like(p) for name, p in model.state_dict().items()}
    size = dist.get_world_size()
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    shards = dict(model.named_parameters())
    mesh, shapes = Mesh((("fsdp", size),)), {n: tuple(p.shape) for n, p in shards.items()}
    src = Layout(mesh, shapes, dict.fromkeys(shapes, Rule(splits=(Split("fsdp", 0),))))
    switch_plan = plan(src, Layout(mesh, shapes, dict.fromkeys(shapes, Rule())))
    WeightSwitch(switch_plan, dist.get_rank(), torch.float32).switch(shards, replica)
    for name, shard in shards.items():
        assert torch.equal(replica[name], shard.full_tensor().detach()), name


@pytest.mark.parametrize("size", [1, 3])
def test_fsdp_shards_to_a_replica(ranks: Ranks, size: int) -> None:
    ranks(size, fsdp_to_replica)
