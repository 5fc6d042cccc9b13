"""Owners of whole matrices: each element has one, on its stage, and ranks have equal shares."""

from math import prod

import pytest

from hybridrl.layout.box import Box
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.owners import matrices_of, owner_layouts, restricted
from hybridrl.layout.parameters import Parameter, train_layout
from hybridrl.layout.plan import plan

PARAMETERS = [
    Parameter(f"layers.{layer}.{name}", shape, layer, tp_dim)
    for layer in range(4)
    for name, shape, tp_dim in [
        ("q", (8, 6), 0),
        ("o", (6, 8), 1),
        ("up", (16, 6), 0),
        ("experts", (6, 8, 6), None),
    ]
]
SIZES = {parameter.name: prod(parameter.shape) for parameter in PARAMETERS}
AXES = [(1, 1, 1, 1), (1, 1, 4, 1), (1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 1), (4, 1, 8, 1)]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_matrix_is_whole_on_one_rank_of_its_stage(axes) -> None:
    pp, ranks = axes[0], prod(axes)
    stages = [layer * pp // 4 for layer in range(4)]
    layout = train_layout(PARAMETERS, TrainAxes(*axes), stages)
    names = [name for name in layout.rules if not name.endswith("o")]
    singles, batches = owner_layouts(layout, names)
    assert {*singles.rules, *batches.rules} == {*names}
    load = [0] * ranks
    for name in names:
        owners = batches if name.endswith("experts") else singles
        boxes = {rank: owners.boxes(name, rank) for rank in range(ranks)}
        held = {rank: box for rank, (box,) in ((r, b) for r, b in boxes.items() if b)}
        assert sum(box.size for box in held.values()) == SIZES[name]
        for rank, box in held.items():
            whole = Box.whole(layout.shapes[name])
            assert box.shape[-2:] == whole.shape[-2:], "a matrix is not cut"
            assert rank // (ranks // pp) in layout.rules[name].stages
            load[rank] += box.size if owners is singles else 0
        assert len(held) == 1 or owners is batches
        for way in (plan(restricted(layout, [name]), restricted(owners, [name])),
                    plan(restricted(owners, [name]), restricted(layout, [name]))):  # fmt: skip
            assert way.traffic.received.sum() + way.traffic.kept.sum() >= SIZES[name]
    mean = sum(load) / ranks
    assert max(load) <= mean + max(SIZES[name] for name in singles.rules)


def test_whole_experts_do_not_move() -> None:
    """FSDP cuts them along their first dimension, as their owners do."""
    axes = TrainAxes(1, 1, 3, 1)
    layout = train_layout(PARAMETERS, axes, [0] * 4)
    names = [name for name in layout.rules if name.endswith("experts")]
    (owners,) = owner_layouts(layout, names)
    way = plan(restricted(layout, names), owners)
    assert not way.traffic.received.any()
    assert way.traffic.kept.tolist() == [sum(SIZES[name] for name in names) // 3] * 3


def test_experts_on_axes_of_their_own_do_not_move() -> None:
    """ep puts two of them on each rank, as owners have them; biases are no matrices."""
    weights = Parameter("layers.0.experts.down_proj", (6, 8, 6), 0, experts=6)
    biases = Parameter("layers.0.experts.down_proj_bias", (6, 8), 0, experts=6)
    mixer = "layers.0.mamba."
    filters = Parameter(f"{mixer}conv1d.weight", (32, 1, 4), 0)
    decay = Parameter(f"{mixer}A_log", (32, 16), 0)
    assert matrices_of([weights, biases, filters, decay]) == [weights.name]
    layout = train_layout([weights, biases], TrainAxes(fsdp=3, ep=3), [0])
    (owners,) = owner_layouts(layout, [weights.name])
    shards = restricted(layout, [weights.name])
    for way in (plan(shards, owners), plan(owners, shards)):
        assert not way.traffic.received.any()
        assert way.traffic.kept.tolist() == [2 * 8 * 6] * 3
