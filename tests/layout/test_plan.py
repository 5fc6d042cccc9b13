"""Plans against an oracle that walks single elements."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config import ConfigError
from hybridrl.config.layout import Grouping
from hybridrl.layout.grouping import TrainAxes, gen_positions
from hybridrl.layout.layout import Layout, Rule, Split, stages_of_layers
from hybridrl.layout.mesh import Mesh, gen_mesh
from hybridrl.layout.parameters import (
    BOTH,
    FIRST,
    LAST,
    Parameter,
    expert_mesh,
    gen_layout,
    train_layout,
)
from hybridrl.layout.plan import Plan, plan
from hybridrl.layout.switching import check_ascending, plan_switch

NUM_LAYERS = 8


def awkward_model(kv_heads: int = 2) -> list[Parameter]:
    """A vocabulary and norms that do not divide, fewer key heads than ranks, gate and up in one."""
    parameters = [
        Parameter("embed", (13, 3), BOTH, 0),
        Parameter("norm", (5,), LAST),
        Parameter("scale", (3,), FIRST),
    ]
    for layer in range(NUM_LAYERS):
        parameters += [
            Parameter(f"{layer}.q", (16, 3), layer, 0, units=8),
            Parameter(f"{layer}.k", (2 * kv_heads, 3), layer, 0, units=kv_heads),
            Parameter(f"{layer}.o", (3, 16), layer, 1, units=8),
            Parameter(f"{layer}.experts", (3, 16, 2), layer, 1, blocks=2),
            Parameter(f"{layer}.norm", (7,), layer),
        ]
    return parameters


def even_model() -> list[Parameter]:
    """Every dimension divides by 64, and nothing is held by several tp ranks."""
    parameters = [Parameter("embed", (64, 64), FIRST, 0), Parameter("head", (64, 64), LAST, 0)]
    for layer in range(NUM_LAYERS):
        parameters += [
            Parameter(f"{layer}.up", (64, 64), layer, 0),
            Parameter(f"{layer}.down", (64, 64), layer, 1),
        ]
    return parameters


def expert_model(num_experts: int) -> list[Parameter]:
    """Experts that tp cuts in two blocks and in one, beside other weights; even but for a norm."""
    parameters = [Parameter("embed", (16, 4), FIRST, 0), Parameter("head", (16, 4), LAST, 0)]
    for layer in range(NUM_LAYERS):
        parameters += [
            Parameter(f"{layer}.o", (16, 16), layer, 1),
            Parameter(f"{layer}.router", (num_experts, 16), layer),
            Parameter(
                f"{layer}.gate_up", (num_experts, 32, 4), layer, 1, blocks=2, experts=num_experts
            ),
            Parameter(f"{layer}.down", (num_experts, 4, 16), layer, 2, experts=num_experts),
        ]
    return parameters


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def train_axes(ranks: int) -> Iterator[TrainAxes]:
    for pp, replicas, fsdp in product(divisors(ranks), repeat=3):
        if ranks % (pp * replicas * fsdp) == 0 and pp <= NUM_LAYERS:
            yield TrainAxes(pp, replicas, fsdp, ranks // (pp * replicas * fsdp))


def gen_sizes(ranks: int) -> Iterator[tuple[int, int]]:
    for pp, tp in product(divisors(ranks), repeat=2):
        if ranks % (pp * tp) == 0 and pp <= NUM_LAYERS:
            yield pp, tp


def marked(layout: Layout, name: str, rank: int) -> np.ndarray:
    """How often each element of a parameter lies on a rank."""
    counts = np.zeros(layout.shapes[name], int)
    if rank in layout.mesh.ranks:
        for box in layout.boxes(name, rank):
            counts[box.slices()] += 1
    return counts


def check(planned: Plan) -> None:
    """The invariants of plan.py, element by element; the traffic counts what the moves say."""
    ranks = range(planned.num_ranks)
    got = {(n, r): np.zeros(planned.dst.shapes[n], int) for n in planned.dst.rules for r in ranks}
    has = {(n, r): marked(planned.src, n, r) for n in planned.dst.rules for r in ranks}
    received, sent = np.zeros(planned.num_ranks, int), np.zeros(planned.num_ranks, int)
    for move in planned.moves():
        index = move.box.slices()
        assert (has[move.name, move.src][index] == 1).all(), move
        got[move.name, move.dst][index] += 1
        if move.src != move.dst:
            assert not has[move.name, move.dst][index].any(), move
            received[move.dst] += move.box.size
            sent[move.src] += move.box.size
    for name, rank in got:
        assert (got[name, rank] == marked(planned.dst, name, rank)).all(), (name, rank)
    assert (planned.traffic.received == received).all()
    assert (planned.traffic.sent == sent).all()
    assert sum(planned.traffic.links.values()) == received.sum()
    assert (planned.least <= received).all()


def switch_plan(
    parameters: list[Parameter], axes: TrainAxes, pp: int, tp: int, grouping: Grouping, ep: int = 1
) -> Plan:
    stages = stages_of_layers(NUM_LAYERS, axes.pp)
    mesh = gen_mesh(gen_positions(axes, pp, tp, grouping), pp, tp)
    return plan(
        train_layout(parameters, axes, stages, gen_tp=tp, gen_ep=ep),
        gen_layout(parameters, mesh, NUM_LAYERS, ep=ep),
    )


PAIRS = [
    (axes, pp, tp)
    for ranks in range(1, 9)
    for axes in train_axes(ranks)
    for pp, tp in gen_sizes(ranks)
    if 8 % tp == 0 and 8 % axes.tp == 0
]


MANY = [pytest.param(ranks, 1, marks=pytest.mark.slow) for ranks in (4, 6, 8)]
"""Most of the pairs are here; the fast tests check one in three, ten or twenty of them."""


@pytest.mark.parametrize("grouping", [Grouping.strided, Grouping.vanilla])
@pytest.mark.parametrize(
    ("ranks", "every"),
    [*((ranks, 1) for ranks in (1, 2, 3, 5, 7)), (4, 3), (6, 10), (8, 20), *MANY],
)
def test_pairs_of_layouts_up_to_eight_ranks(ranks: int, every: int, grouping: Grouping) -> None:
    pairs = [pair for pair in PAIRS if pair[0].ranks == ranks]
    assert pairs
    for axes, pp, tp in pairs[::every]:
        there = switch_plan(awkward_model(max(2, axes.tp)), axes, pp, tp, grouping)
        check(there)
        check(plan(there.dst, there.src))  # the way back


EXPERT_PAIRS = [
    (replace(axes, ep=ep), pp, tp, gen_ep)
    for axes, pp, tp in PAIRS
    for ep in divisors(axes.fsdp * axes.tp)
    for gen_ep in sorted({1, tp})
    if 8 % axes.tp == 0 and 8 % ep == 0 and 8 % tp == 0
]


@pytest.mark.layouts
@pytest.mark.parametrize("grouping", [Grouping.strided, Grouping.vanilla])
@pytest.mark.parametrize(
    ("ranks", "every"), [(2, 1), (3, 1), (4, 7), (6, 19), (8, 47), *MANY], ids=str
)
def test_experts_up_to_eight_ranks(ranks: int, every: int, grouping: Grouping) -> None:
    """ep on any axes, to whole experts and to cut ones; some ranks have parts of experts alone."""
    pairs = [pair for pair in EXPERT_PAIRS if pair[0].ranks == ranks]
    assert {axes.ep for axes, *_ in pairs[::every]} == set(divisors(ranks)) & {1, 2, 4, 8}
    for axes, pp, tp, ep in pairs[::every]:
        there = switch_plan(expert_model(8), axes, pp, tp, grouping, ep)
        check(there)
        check(plan(there.dst, there.src))


def test_the_pairs_are_all_that_there_are() -> None:
    """20 ways to write 8 as an ordered product of four, times the 10 of (pp, tp) that divide it."""
    assert sum(axes.ranks == 8 for axes, _, _ in PAIRS) == 20 * 10
    assert {axes.ranks for axes, _, _ in PAIRS} == {1, 2, 3, 4, 5, 6, 7, 8}


def nests(axes: TrainAxes, pp: int, tp: int) -> bool:
    """Each training shard lies within one generation shard."""
    return axes.pp % pp == 0 and (axes.fsdp * axes.tp) % tp == 0


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_bytes_equal_theory_where_shards_nest(ranks: int) -> None:
    num_cases = 0
    for axes in train_axes(ranks):
        for pp, tp in gen_sizes(ranks):
            even = 64 % (axes.fsdp * axes.tp) == 0 == 64 % tp and NUM_LAYERS % axes.pp == 0
            if not even or not nests(axes, pp, tp):
                continue
            num_cases += 1
            planned = switch_plan(even_model(), axes, pp, tp, Grouping.strided)
            size = sum(math.prod(shape) for shape in planned.dst.shapes.values())
            assert (planned.traffic.received == planned.least).all(), (axes, pp, tp)
            each = size // (pp * tp) - size // axes.shards
            assert planned.traffic.received.sum() == each * ranks, (axes, pp, tp)
            if axes.pp == 1:
                assert (planned.traffic.received == each).all(), (axes, pp, tp)
    assert num_cases > ranks


@pytest.mark.parametrize(
    ("axes", "tp", "ep"),
    [
        (TrainAxes(fsdp=8, ep=4), 4, 4),
        (TrainAxes(fsdp=8, ep=8), 1, 1),
        (TrainAxes(fsdp=8, ep=2), 4, 4),
        (TrainAxes(fsdp=4, tp=2, ep=4), 4, 4),  # ep over both axes
        (TrainAxes(fsdp=4, tp=2, ep=2), 4, 4),  # ep over a part of tp
        (TrainAxes(fsdp=4, tp=2), 4, 4),
        (TrainAxes(fsdp=2, tp=4, ep=2), 2, 2),
        (TrainAxes(pp=2, replicas=2, fsdp=4, ep=2), 2, 2),
    ],
    ids=str,
)
def test_bytes_equal_theory_where_whole_experts_nest(axes: TrainAxes, tp: int, ep: int) -> None:
    """M/(p_g t_g) - M/(p f t), for experts as for all else."""
    switch = plan_switch(
        [p for p in expert_model(8) if "router" not in p.name],
        axes,
        1,
        tp,
        Grouping.strided,
        gen_ep=ep,
    )
    received = switch.plan.traffic.received
    size = sum(math.prod(shape) for shape in switch.plan.dst.shapes.values())
    assert (received == switch.plan.least).all()
    assert received.sum() == switch.theory == (size // tp - size // axes.shards) * axes.ranks


@pytest.mark.parametrize(
    ("axes", "tp"),
    [
        (TrainAxes(fsdp=8, ep=4), 4),
        (TrainAxes(fsdp=4, tp=2, ep=4), 4),
        (TrainAxes(fsdp=4, ep=2), 2),
    ],
    ids=str,
)
def test_consecutive_ranks_share_experts_that_generate_on_consecutive_ranks(
    axes: TrainAxes, tp: int
) -> None:
    """Shards of whole experts then nest in the order `vanilla`, not in `strided`."""
    near = replace(axes, ep_near=True)
    groups = expert_mesh(near).lines("ep")
    assert all(group == [*range(group[0], group[0] + axes.ep)] for group in groups)
    received = {}
    for order in (Grouping.strided, Grouping.vanilla, Grouping.auto):
        experts = [p for p in expert_model(8) if p.experts]
        switch = plan_switch(experts, near, 1, tp, order, gen_ep=tp)
        received[order] = switch.plan.traffic.received.sum()
    assert received[Grouping.auto] == received[Grouping.vanilla] == switch.theory
    assert received[Grouping.strided] > 1.2 * switch.theory


@pytest.mark.parametrize(
    ("axes", "tp", "kept"),
    [
        # A rank holds two of 16 experts, and wants a quarter of each.
        (TrainAxes(fsdp=8, ep=4), 4, (32 / 4, 32 / 4)),
        (TrainAxes(fsdp=8, ep=8), 2, (32 / 2, 32 / 2)),
        # Without ep, FSDP cuts `down` where tp does. In `gate_up` that would not help.
        (TrainAxes(fsdp=8), 4, (32 / 4, 32)),
        (TrainAxes(fsdp=4, tp=2), 4, (32 / 4, 32)),
    ],
    ids=str,
)
def test_experts_that_generation_cuts_keep_what_overlaps(
    axes: TrainAxes, tp: int, kept: tuple[float, float]
) -> None:
    """Per layer, `kept` in units of a 16th of an expert, of `gate_up` and of `down`."""
    parameters = [p for p in expert_model(16) if p.experts]
    switch = plan_switch(parameters, axes, 1, tp, Grouping.strided)
    gate_up, down = 16 * 32 * 4, 16 * 4 * 16
    each = sum(
        size / tp - size * overlap / 256
        for size, overlap in zip((gate_up, down), kept, strict=True)
    )
    assert switch.theory == each * NUM_LAYERS * axes.ranks
    assert switch.plan.traffic.received.sum() == switch.theory
    assert switch.plan.least.sum() < switch.theory


@pytest.mark.parametrize("ranks", [4, 8])
def test_strided_order_never_moves_more_than_vanilla_where_shards_nest(ranks: int) -> None:
    better = 0
    for axes in train_axes(ranks):
        for pp, tp in gen_sizes(ranks):
            if not nests(axes, pp, tp):
                continue
            strided, vanilla = (
                switch_plan(even_model(), axes, pp, tp, order).traffic.received.sum()
                for order in (Grouping.strided, Grouping.vanilla)
            )
            assert strided <= vanilla, (axes, pp, tp)
            better += strided < vanilla
    assert better > 0


def test_auto_takes_the_order_of_fewest_bytes() -> None:
    for axes in train_axes(4):
        for pp, tp in gen_sizes(4):
            auto = plan_switch(even_model(), axes, pp, tp)
            each = [
                plan_switch(even_model(), axes, pp, tp, order).plan.traffic.received.sum()
                for order in (Grouping.strided, Grouping.vanilla)
            ]
            assert auto.plan.traffic.received.sum() == min(each)


def test_replicas_serve_themselves() -> None:
    axes = TrainAxes(pp=2, replicas=4, fsdp=2, tp=1)
    planned = switch_plan(even_model(), axes, 1, 2, Grouping.strided)
    for src, dst in planned.traffic.links:
        assert (
            planned.src.mesh.coordinates(src)["replica"]
            == planned.src.mesh.coordinates(dst)["replica"]
        )


@st.composite
def large_pairs(draw: st.DrawFn) -> tuple[TrainAxes, int, int]:
    def power(most: int) -> int:
        return 2 ** draw(st.integers(0, most))

    axes = TrainAxes(power(3), power(3), power(3), power(3))
    odd = draw(st.sampled_from([1, 1, 3]))
    axes = TrainAxes(axes.pp, axes.replicas * odd, axes.fsdp, axes.tp)
    sizes = [(pp, tp) for pp, tp in gen_sizes(axes.ranks) if pp <= 8 and 8 % tp == 0]
    pp, tp = draw(st.sampled_from(sizes))
    return axes, pp, tp


@settings(max_examples=8)
@given(large_pairs(), st.sampled_from([Grouping.strided, Grouping.vanilla]), st.data())
def test_random_layouts_of_up_to_thousands_of_ranks(
    pair: tuple[TrainAxes, int, int], grouping: Grouping, data: st.DataObject
) -> None:
    """Single elements on a few ranks, and the sums over all of them."""
    axes, pp, tp = pair
    planned = switch_plan(awkward_model(8), axes, pp, tp, grouping)
    traffic = planned.traffic
    held = sum(planned.dst.elements(name, planned.num_ranks) for name in planned.dst.rules)
    assert (traffic.received + traffic.kept == held).all()
    assert traffic.received.sum() == traffic.sent.sum()
    assert (planned.least <= traffic.received).all()
    for _ in range(2):
        rank = data.draw(st.integers(0, axes.ranks - 1))
        got = {n: np.zeros(shape, int) for n, shape in planned.dst.shapes.items()}
        for move in planned.moves(rank):
            if move.dst == rank:
                assert (marked(planned.src, move.name, move.src)[move.box.slices()] == 1).all()
                if move.src != rank:
                    assert not marked(planned.src, move.name, rank)[move.box.slices()].any()
                got[move.name][move.box.slices()] += 1
        for name, count in got.items():
            assert (count == marked(planned.dst, name, rank)).all()


@settings(max_examples=200)
@given(large_pairs(), st.sampled_from([Grouping.strided, Grouping.vanilla]))
def test_every_place_in_generation_is_taken_once(
    pair: tuple[TrainAxes, int, int], grouping: Grouping
) -> None:
    axes, pp, tp = pair
    positions = gen_positions(axes, pp, tp, grouping)
    assert sorted(positions) == list(product(range(axes.ranks // (pp * tp)), range(pp), range(tp)))


def test_a_cluster_of_other_ranks_receives_everything() -> None:
    """Rollout workers that do not train: nothing is held, the senders share the work."""
    parameters = awkward_model()
    axes = TrainAxes(pp=1, replicas=2, fsdp=2, tp=1)
    src = train_layout(parameters, axes, [0] * NUM_LAYERS)
    mesh = Mesh((("instance", 2), ("pp", 1), ("tp", 2)), (4, 5, 6, 7))
    planned = plan(src, gen_layout(parameters, mesh, NUM_LAYERS))
    check(planned)
    assert (planned.traffic.kept == 0).all()
    assert (planned.traffic.sent[:4] > 0).all()


def test_what_does_not_fit_is_refused() -> None:
    mesh = Mesh((("fsdp", 2),))
    rules = {"w": Rule(splits=(Split("fsdp", 0),))}
    src = Layout(mesh, {"w": (4, 2)}, rules)
    with pytest.raises(ValueError, match=r"w: \(4, 2\) in the source, \(4, 3\) after"):
        plan(src, Layout(mesh, {"w": (4, 3)}, rules))
    with pytest.raises(ValueError, match="v: the source layout has no parameter of that name"):
        plan(src, Layout(mesh, {"w": (4, 2), "v": (1,)}, rules | {"v": Rule()}))
    with pytest.raises(ValueError, match="9 layers cannot be split into 12 pipeline chunks"):
        stages_of_layers(9, 4, 3)


def test_stages_of_layers() -> None:
    assert stages_of_layers(7, 3) == [0, 0, 0, 1, 1, 2, 2]
    assert stages_of_layers(8, 2, per_rank=2) == [0, 0, 1, 1, 0, 0, 1, 1]
    assert stages_of_layers(8, 2, per_rank=2, zigzag=True) == [0, 0, 1, 1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("axes", "pp", "tp", "ascends"),
    [
        (TrainAxes(fsdp=2, tp=2), 1, 4, False),
        (TrainAxes(fsdp=2, tp=2), 4, 1, False),
        (TrainAxes(fsdp=4), 1, 2, True),
        (TrainAxes(tp=4), 1, 2, True),
    ],
)
def test_an_order_whose_groups_do_not_ascend_is_refused(
    axes: TrainAxes, pp: int, tp: int, ascends: bool
) -> None:
    """torch sorts the ranks of a group; some engines number them by their place in it."""
    check_ascending(axes, pp, tp, Grouping.auto)
    check_ascending(axes, pp, tp, Grouping.vanilla)
    allowed = pytest.raises(ConfigError, match=r"rollout\.layout\.grouping=strided: wanted auto")
    with contextlib.nullcontext() if ascends else allowed:
        check_ascending(axes, pp, tp, Grouping.strided)
