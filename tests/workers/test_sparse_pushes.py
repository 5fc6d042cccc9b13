"""Sparse pushes between ranks of one process: what is lost on the way is found, and taken whole."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numbered_layouts import NUM_LAYERS, numbered, own, parameters

from hybridrl.flow.executor import LoadWeights
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layerwise import Fill
from hybridrl.layout.layout import stages_of_layers
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.parameters import train_layout
from hybridrl.layout.push import PushPlan, PushSource, PushTarget, WeightArray, WeightsDamaged
from hybridrl.layout.push_deltas import WeightDelta
from hybridrl.workers.data_plane import LocalDataPlane
from hybridrl.workers.sparse_pushes import DeltaSource, DeltaTarget

DTYPE = torch.bfloat16
VERSIONS = 20
Refs = tuple[Any, ...]


class Pushed:
    """Twenty versions of a model on two training ranks, which push to an instance of one rank.

    A hundredth of the values changes from version to version, one a step, into NaN or -0 too.
    """

    def __init__(self) -> None:
        model = parameters()
        src = train_layout(model, TrainAxes(fsdp=2), stages_of_layers(NUM_LAYERS, 1), 1, 1)
        self.push = PushPlan.make(src, model, 1, 1, NUM_LAYERS)
        generator = torch.Generator().manual_seed(0)
        full = {name: tensor.to(DTYPE) for name, tensor in numbered(src).items()}
        sources = [PushSource(self.push, rank, DTYPE) for rank in range(2)]
        plane = LocalDataPlane()
        makers = [DeltaSource(plane) for _ in sources]
        self.full, self.loads = [], []
        for version in range(VERSIONS):
            arrays, deltas = [], []
            for rank, (source, maker) in enumerate(zip(sources, makers, strict=True)):
                (array,) = source.pack(own(src, full, rank), version)
                assert array is not None
                arrays.append(array)
                deltas.append(maker.deltas({0: array}).get(0))
            self.full.append({name: tensor.clone() for name, tensor in full.items()})
            self.loads.append(LoadWeights(version, arrays=tuple(arrays), deltas=tuple(deltas)))
            for tensor in full.values():
                bits = tensor.view(torch.int16)
                bits += (torch.rand(bits.shape, generator=generator) < 0.01).short()
            full["model.norm.weight"][version % 8] = (torch.nan, -0.0, 0.0)[version % 3]

    def target(self) -> DeltaTarget:
        return DeltaTarget(PushTarget(self.push, 0, DTYPE), LocalDataPlane())


class Engine:
    """The tensors of the instance's rank."""

    def __init__(self, push: PushPlan) -> None:
        layout, rank = push.plan.dst, push.plan.src.mesh.size
        shapes = {name: LocalTensor(layout.local(name, rank)).shape for name in layout.rules}
        self.tensors = {n: torch.zeros(s, dtype=DTYPE) for n, s in shapes.items() if s is not None}

    def load(self, fill: Fill) -> None:
        fill(self.tensors)

    def has(self, full: dict[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(tensor.view(torch.int16), full[name].view(torch.int16))
            for name, tensor in self.tensors.items()
        )


@pytest.fixture(scope="module")
def pushed() -> Pushed:
    return Pushed()


def whole_bytes(load: LoadWeights) -> int:
    return sum(array.data.nbytes for array in load.arrays)


def delta_bytes(load: LoadWeights) -> int:
    return sum(delta.data.nbytes for delta in load.deltas)


def test_deltas_in_order_are_all_that_is_taken(pushed: Pushed) -> None:
    engine, target = Engine(pushed.push), pushed.target()
    first, *others = pushed.loads
    assert first.deltas == (None, None)
    stats = target.load(first, engine.load)
    assert stats.bytes_received == stats.bytes_theory == whole_bytes(first)
    for load in others:
        without = replace(load, arrays=(None, None))  # nobody looks at them
        stats = target.load(without, engine.load)
        assert engine.has(pushed.full[load.version])
        assert stats.bytes_received == delta_bytes(load) < 0.2 * stats.bytes_theory
    assert target.kept.nbytes == stats.bytes_theory


def flipped(delta: WeightDelta) -> WeightDelta:
    data = delta.data.copy()
    data[-10] ^= 4
    return replace(delta, data=data)


def of_another_result(delta: WeightDelta) -> WeightDelta:
    return replace(delta, checksum=delta.checksum ^ 1)


FAULTS: dict[str, Callable[[list[LoadWeights], int], Refs]] = {
    "a version lost": lambda loads, at: loads[at + 1].deltas,
    "repeated": lambda loads, at: loads[at - 1].deltas,
    "the other way round": lambda loads, at: loads[at].deltas[::-1],
    "damaged": lambda loads, at: (flipped(loads[at].deltas[0]), loads[at].deltas[1]),
    "cut": lambda loads, at: tuple(replace(x, data=x.data[:-3]) for x in loads[at].deltas),
    "of other weights": lambda loads, at: tuple(map(of_another_result, loads[at].deltas)),
    "of another's place": lambda loads, at: (
        replace(loads[at].deltas[1], sender=0),
        loads[at].deltas[1],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_delta_is_found_and_the_array_taken_whole(
    pushed: Pushed, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What comes next is sparse again."""
    engine, target, at = Engine(pushed.push), pushed.target(), 4
    for load in pushed.loads[:at]:
        target.load(load, engine.load)
    wrong = replace(pushed.loads[at], deltas=FAULTS[fault](pushed.loads, at))
    with caplog.at_level(logging.WARNING):
        stats = target.load(wrong, engine.load)
    if fault == "the other way round":  # each names its sender
        assert caplog.text == ""
        assert stats.bytes_received == delta_bytes(wrong)
    else:
        assert "weights of version 4 from training rank 0" in caplog.text
        assert "the whole array is taken" in caplog.text
        assert stats.bytes_received >= delta_bytes(wrong) + wrong.arrays[0].data.nbytes
    assert engine.has(pushed.full[at])
    stats = target.load(pushed.loads[at + 1], engine.load)
    assert stats.bytes_received == delta_bytes(pushed.loads[at + 1])
    assert engine.has(pushed.full[at + 1])


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_every_version_is_what_was_pushed(pushed: Pushed, seed: int) -> None:
    """Versions skipped, again, and backwards, with deltas of any of them, right or damaged."""
    random = np.random.default_rng(seed)
    engine, target = Engine(pushed.push), pushed.target()
    num_whole = num_sparse = version = 0
    for _ in range(60):
        version = int(random.choice([(version + 1) % VERSIONS, random.integers(VERSIONS)]))
        load, other = pushed.loads[version], pushed.loads[random.integers(VERSIONS)]
        deltas = other.deltas if random.random() < 0.2 else load.deltas
        if random.random() < 0.2:
            deltas = tuple(x and flipped(x) for x in deltas)
        if random.random() < 0.2:
            deltas = (None, deltas[1])
        stats = target.load(replace(load, deltas=deltas), engine.load)
        assert engine.has(pushed.full[version])
        num_whole += stats.bytes_received >= whole_bytes(load)
        num_sparse += stats.bytes_received < 0.5 * whole_bytes(load)
    assert num_whole >= 10
    assert num_sparse >= 5


def test_a_rank_that_begins_anew_takes_all_whole(pushed: Pushed) -> None:
    engine, target = Engine(pushed.push), pushed.target()
    stats = target.load(pushed.loads[7], engine.load)
    assert stats.bytes_received == delta_bytes(pushed.loads[7]) + whole_bytes(pushed.loads[7])
    assert engine.has(pushed.full[7])


def test_a_damaged_whole_array_ends_the_run_before_anything_is_loaded(pushed: Pushed) -> None:
    engine, target = Engine(pushed.push), pushed.target()
    target.load(pushed.loads[0], engine.load)

    def damaged(array: WeightArray) -> WeightArray:
        data = array.data.copy()
        data[3] ^= 1
        return replace(array, data=data)

    load = replace(pushed.loads[2], arrays=tuple(map(damaged, pushed.loads[2].arrays)))
    with pytest.raises(WeightsDamaged, match="the bytes are not those that were sent"):
        target.load(load, engine.load)
    assert engine.has(pushed.full[0])
    target.load(pushed.loads[2], engine.load)
    assert engine.has(pushed.full[2])


def test_a_training_rank_that_begins_anew_has_no_delta(pushed: Pushed) -> None:
    maker = DeltaSource(LocalDataPlane())
    (first, second) = (load.arrays[0] for load in pushed.loads[:2])
    assert maker.deltas({0: first}) == {}
    delta = maker.deltas({0: second, 1: second})
    assert delta.keys() == {0}
    assert (delta[0].base, delta[0].version) == (0, 1)
