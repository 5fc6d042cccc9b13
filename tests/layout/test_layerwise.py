"""The weight switch layer by layer, on real processes, against slices of the whole parameters."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numbered_layouts import numbered, own, parameters

from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layerwise import Fill, LayerwiseSwitch, by_layer
from hybridrl.layout.layout import Layout
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.plan import Plan, subplan
from hybridrl.layout.switching import plan_switch
from hybridrl.layout.weight_switch import SwitchStats

CPU = torch.device("cpu")
Ranks = Callable[..., list[Any]]
# Training axes; pp and tp of generation.
CASES = {
    2: [(TrainAxes(fsdp=2), 1, 2), (TrainAxes(pp=2), 1, 1), (TrainAxes(tp=2), 2, 1)],
    4: [(TrainAxes(fsdp=4), 1, 2), (TrainAxes(fsdp=4), 2, 2), (TrainAxes(pp=2, tp=2), 1, 1)],
}


def plan_of(axes: TrainAxes, pp: int, tp: int) -> Plan:
    return plan_switch(parameters(), axes, pp, tp, vocab_multiple=4).plan


def test_parameters_of_a_layer_stand_together() -> None:
    names = ["embed", "a.layers.1.x", "a.layers.10.x", "a.layers.1.y", "layers.1.x", "norm"]
    layers = [("a.layers.1.x", "a.layers.1.y"), ("a.layers.10.x",), ("layers.1.x",)]
    assert by_layer(names) == [("embed",), *layers, ("norm",)]


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_parts_move_what_the_whole_moves(case: tuple[Any, ...]) -> None:
    """Each move once, with the least bytes of each; nothing of other layers is known."""
    whole = plan_of(*case)
    parts = [subplan(whole, names) for names in by_layer(whole.dst.rules)]
    moves = [move for there in parts for move in there.moves()]
    assert sorted(map(repr, moves)) == sorted(map(repr, whole.moves()))
    for count in ("received", "sent", "kept"):
        counts = [getattr(there.traffic, count) for there in parts]
        assert np.array_equal(sum(counts), getattr(whole.traffic, count))
    assert np.array_equal(sum(there.least for there in parts), whole.least)
    for there, names in zip(parts, by_layer(whole.dst.rules), strict=True):
        for layout in (there.src, there.dst):
            assert tuple(layout.rules) == tuple(layout.shapes) == names


class Repacking:
    """An engine that keeps nothing of a tensor but a copy in another order, negated."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        self.layout, self.dtype = layout, dtype
        self.packed: dict[str, torch.Tensor] = {}

    def load(self, fill: Fill) -> None:
        """New tensors of each layer, of which the rank may need none; packed once filled."""
        for names in by_layer(self.layout.rules):
            boxes = {name: self.layout.local(name, dist.get_rank()) for name in names}
            shapes = {n: LocalTensor(b).shape for n, b in boxes.items()}
            tensors = {
                name: torch.full(shape, torch.nan, dtype=self.dtype)
                for name, shape in shapes.items()
                if shape is not None
            }
            fill(tensors, names)
            for name, tensor in tensors.items():
                self.packed[name] = -tensor.flatten().flip(0)


def switches(cases: list[tuple[Any, ...]]) -> list[SwitchStats]:
    """Two switches of each case, in as few bytes a bucket as a row; all that is packed compared."""
    rank, stats_by_case = dist.get_rank(), []
    for axes, pp, tp in cases:
        there = plan_of(axes, pp, tp)
        before, after = numbered(there.src), numbered(there.dst)
        for dtype in (torch.float32, torch.bfloat16):
            engine = Repacking(there.dst, dtype)
            switch = LayerwiseSwitch(there, rank, dtype, CPU, 64)
            for factor in (1, -3):
                source = {n: t * factor for n, t in own(there.src, before, rank).items()}
                stats = switch.switch(source, engine.load)
                wanted = own(there.dst, after, rank)
                assert engine.packed.keys() == wanted.keys()
                for name, tensor in wanted.items():
                    packed = -(tensor * factor).to(dtype).flatten().flip(0)
                    same = (packed == engine.packed[name]) | packed.isnan()
                    assert same.all(), (name, rank, factor)
            stats_by_case.append(stats)
    return stats_by_case


@pytest.mark.long
@pytest.mark.parametrize("size", CASES)
def test_every_layer_gets_its_weights(ranks: Ranks, size: int) -> None:
    """With the bytes of the whole plan, and of its destination no more at a time than a layer."""
    results = ranks(size, switches, CASES[size])
    for rank, stats_by_case in enumerate(results):
        cases = [(case, itemsize) for case in CASES[size] for itemsize in (4, 2)]
        for (case, itemsize), stats in zip(cases, stats_by_case, strict=True):
            there = plan_of(*case)
            assert stats.bytes_received == there.traffic.received[rank] * itemsize
            assert stats.bytes_theory == there.least[rank] * itemsize
            held = [
                sum(box.size for name in names for box in there.dst.local(name, rank)) * itemsize
                for names in by_layer(there.dst.rules)
            ]
            assert stats.bytes_held == max(held)
            assert stats.scratch_bytes <= 2 * max(64, (1 + size) * itemsize)
            assert stats.seconds >= stats.seconds_pack + stats.seconds_wait + stats.seconds_copy
            assert (stats.path == "local") == (not there.traffic.received.any())
    assert size == 2 or any(
        "gather" in stats.path for stats_by_case in results for stats in stats_by_case
    )


def refused() -> None:
    there = plan_of(TrainAxes(fsdp=2), 1, 1)
    source = own(there.src, numbered(there.src), dist.get_rank())
    layers = by_layer(there.dst.rules)
    (layer,) = [names for names in layers if names[0].startswith("model.layers.0.")]
    others = [names for names in layers if names is not layer]
    wrong = {
        "1 layers of the plan were left out": layers[1:],
        f"{len(layers)} layers of the plan were left out": [],
        f"{layers[0][0]}: no layer of the plan, or one": [*layers, layers[0]],
        f"{layer[0]}: no layer of the plan, or one": [*others, layer[:1]],
        "other: no layer of the plan, or one": [("other",), *layers],
        "all layers: no layer of the plan, or one": [layers[0], None],
    }
    for message, groups in wrong.items():
        sent: list[str] = []

        def load(fill: Fill, groups: Any = groups, sent: list[str] = sent) -> None:
            for names in groups:
                tensors = own(there.dst, numbered(there.dst), dist.get_rank())
                fill({name: tensors[name] for name in names or tensors if name in tensors}, names)
                sent.append(str(names))

        with pytest.raises(ValueError, match=re.escape(message)):
            LayerwiseSwitch(there, dist.get_rank(), torch.float32, CPU).switch(source, load)
        if "left out" not in message:
            # Each wrong one comes last, but for the parameter of another model.
            assert len(sent) == (0 if message.startswith("other") else len(groups) - 1)


def test_layers_that_are_not_the_plans_are_refused(ranks: Ranks) -> None:
    ranks(2, refused)
