"""Pushed weights, packed and loaded in one process, against slices of the whole parameters."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numbered_layouts import NUM_LAYERS, numbered, own, parameters

from hybridrl.layout.box_copies import copy_all
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layerwise import Fill, by_layer
from hybridrl.layout.layout import Layout, stages_of_layers
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.parameters import Parameter, train_layout
from hybridrl.layout.proof import WeightsDiffer
from hybridrl.layout.push import (
    PushPlan,
    PushSource,
    PushTarget,
    WeightArray,
    WeightsDamaged,
    bytes_by_sender,
)

CASES = [
    (TrainAxes(fsdp=2), 1, 1),
    (TrainAxes(fsdp=4), 1, 2),
    (TrainAxes(fsdp=2, tp=2), 2, 1),
    (TrainAxes(pp=2, replicas=2), 1, 2),
    (TrainAxes(pp=3, fsdp=2), 2, 2),
    (TrainAxes(replicas=4), 1, 4),
]


def push_of(axes: TrainAxes, pp: int, tp: int, ep: int = 1) -> PushPlan:
    model = parameters()
    if axes.ep > 1 or ep > 1:
        model.insert(-1, Parameter("model.layers.0.experts.up", (4, 8, 6), 0, 1, experts=4))
    stages = stages_of_layers(NUM_LAYERS, axes.pp)
    src = train_layout(model, axes, stages, tp, ep)
    return PushPlan.make(src, model, pp, tp, NUM_LAYERS, vocab_multiple=4, ep=ep)


def arrays_of(push: PushPlan, full: dict[str, torch.Tensor], dtype: torch.dtype, version: int = 3):
    """The arrays of all training ranks, by place."""
    by_place: list[list[WeightArray]] = [[] for _ in range(push.num_places)]
    for rank in push.plan.src.mesh.ranks:
        source = PushSource(push, rank, dtype)
        packed = source.pack(own(push.plan.src, full, rank), version)
        for place, array in enumerate(packed):
            if array is not None:
                by_place[place].append(array)
    return by_place


class Engine:
    """Tensors of a place, filled at once or layer by layer."""

    def __init__(self, layout: Layout, rank: int, dtype: torch.dtype, by_layers: bool) -> None:
        shapes = {name: LocalTensor(layout.local(name, rank)).shape for name in layout.rules}
        self.tensors = {
            name: torch.full(shape, torch.nan, dtype=dtype)
            for name, shape in shapes.items()
            if shape is not None
        }
        self.layers = by_layer(layout.rules) if by_layers else None

    def load(self, fill: Fill) -> None:
        if self.layers is None:
            fill(self.tensors)
        else:
            for names in self.layers:
                fill({name: self.tensors[name] for name in names if name in self.tensors}, names)


@pytest.mark.parametrize(
    "case", [*CASES, (TrainAxes(fsdp=4, ep=2), 1, 2, 2), (TrainAxes(fsdp=2, tp=2, ep=2), 1, 2)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_place_gets_its_weights(case, dtype) -> None:
    """Bit for bit what a switch gives, in both ways to fill; one model is sent in all."""
    push = push_of(*case)
    before, after = numbered(push.plan.src), numbered(push.plan.dst)
    by_place = arrays_of(push, before, dtype)
    for place, arrays in enumerate(by_place):
        rank = push.plan.src.mesh.size + place
        wanted = own(push.plan.dst, after, rank)
        for by_layers in (False, True):
            engine = Engine(push.plan.dst, rank, dtype, by_layers)
            stats = PushTarget(push, place, dtype).load(arrays, 3, engine.load)
            assert engine.tensors.keys() == wanted.keys()
            for name, tensor in wanted.items():
                filled = engine.tensors[name]
                same = (filled == tensor.to(dtype)) | (filled.isnan() & tensor.isnan())
                assert same.all(), (name, place)
            assert stats.bytes_received == stats.bytes_theory
            assert stats.bytes_received == sum(array.data.nbytes for array in arrays)
    sent = sum(array.data.nbytes for arrays in by_place for array in arrays)
    assert sent == sum(bytes_by_sender(push, dtype.itemsize).values())
    elements = [push.plan.dst.elements(n, push.plan.num_ranks).sum() for n in push.plan.dst.rules]
    assert sent == sum(elements) * dtype.itemsize


def test_ranks_with_different_shards_share_the_sending() -> None:
    sent = bytes_by_sender(push_of(TrainAxes(fsdp=4), 1, 1), 4)
    assert max(sent.values()) < 1.5 * min(sent.values())


def damaged(arrays: list[WeightArray], number: int) -> list[WeightArray]:
    data = arrays[number].data.copy()
    data[len(data) // 2] ^= 1
    return [*arrays[:number], replace(arrays[number], data=data), *arrays[number + 1 :]]


def test_a_flipped_bit_another_version_and_a_missing_array_are_found() -> None:
    push = push_of(TrainAxes(fsdp=2), 1, 1)
    (arrays,) = arrays_of(push, numbered(push.plan.src), torch.float32)
    rank = push.plan.src.mesh.size
    engine = Engine(push.plan.dst, rank, torch.float32, False)
    target = PushTarget(push, 0, torch.float32)
    for wrong, version, text in (
        (damaged(arrays, 1), 3, "training rank 1: the bytes are not those that were sent"),
        (arrays, 4, "weights of version 4 from training rank 0: the array is of version 3"),
        (arrays[:1], 3, "weights of version 3 from training rank 1: none have come"),
        ([arrays[0], replace(arrays[1], data=arrays[1].data[:-4])], 3, "bytes, wanted"),
    ):
        with pytest.raises(WeightsDamaged, match=text):
            target.load(wrong, version, engine.load)
    assert all(tensor.isnan().all() for tensor in engine.tensors.values())  # nothing was loaded
    with pytest.raises(ValueError, match="left out"):
        target.load(arrays, 3, lambda fill: None)


def test_arrays_may_be_read_only() -> None:
    """As those that come out of an object store."""
    push = push_of(TrainAxes(fsdp=2), 1, 1)
    (arrays,) = arrays_of(push, numbered(push.plan.src), torch.float32)
    for array in arrays:
        array.data.flags.writeable = False
    engine = Engine(push.plan.dst, push.plan.src.mesh.size, torch.float32, False)
    PushTarget(push, 0, torch.float32).load(arrays, 3, engine.load)
    assert np.isfinite(engine.tensors["model.norm.weight"].numpy()).all()


@pytest.mark.parametrize("by_layers", [False, True])
def test_an_engine_with_other_weights_is_named(by_layers: bool) -> None:
    """One that keeps its old ones, by what it holds; one that repacks, by what it was given."""
    push = push_of(TrainAxes(fsdp=2), 1, 2)
    full = numbered(push.plan.src)
    arrays = arrays_of(push, full, torch.bfloat16)[1]
    doubled = {name: tensor * 2 for name, tensor in full.items()}
    newer = arrays_of(push, doubled, torch.bfloat16, version=4)[1]
    engine = Engine(push.plan.dst, push.plan.src.mesh.size + 1, torch.bfloat16, by_layers)
    target = PushTarget(push, 1, torch.bfloat16)
    whole = target.load(arrays, 3, engine.load, held=lambda: engine.tensors)
    assert whole.proof_bytes == 2 * whole.bytes_received
    share = target.load(arrays, 3, engine.load)
    assert share.proof_bytes < whole.proof_bytes / 10

    def ignoring(fill: Fill) -> None:
        fill({name: tensor.clone() for name, tensor in engine.tensors.items()})

    with pytest.raises(WeightsDiffer, match=r"place 1 of an instance .* training rank \d pushed"):
        target.load(newer, 4, ignoring, held=lambda: engine.tensors)

    def changed(fill: Fill) -> None:
        engine.load(fill)
        engine.tensors["model.norm.weight"].view(torch.int16)[3] ^= 1

    fresh = PushTarget(push, 1, torch.bfloat16)
    with pytest.raises(WeightsDiffer, match=r"other values of model\.norm\.weight than training"):
        fresh.load(arrays, 3, changed, held=lambda: engine.tensors)


def test_an_array_that_was_packed_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    push = push_of(TrainAxes(fsdp=2), 1, 1)
    source = PushSource(push, 1, torch.float32)

    def flips(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        pairs = list(copies)
        copy_all(pairs)
        pairs[0][0].view(torch.int32).view(-1)[0] ^= 1

    monkeypatch.setattr("hybridrl.layout.push.copy_all", flips)
    with pytest.raises(WeightsDiffer, match=r"training rank 1 packed other values of model\."):
        source.pack(own(push.plan.src, numbered(push.plan.src), 1), 3)
