"""The schedule's three invariants, for every rank of random switches, and what is gathered."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.config.layout import Grouping
from hybridrl.layout.box import Box
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layout import Layout, Rule, Split
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import BOTH, FIRST, LAST, Parameter
from hybridrl.layout.plan import Plan, plan
from hybridrl.layout.portions import Piece
from hybridrl.layout.switching import plan_switch
from hybridrl.layout.transfer_rounds import TransferRounds, transfer_rounds

NUM_LAYERS = 4


def model(tp: int) -> list[Parameter]:
    """A vocabulary and norms that do not divide, key heads fewer than ranks, two blocks in one."""
    kv_heads = max(2, tp)
    parameters = [Parameter("embed", (13, 3), BOTH, 0), Parameter("norm", (5,), LAST)]
    parameters += [Parameter("scale", (3,), FIRST)]
    for layer in range(NUM_LAYERS):
        parameters += [
            Parameter(f"{layer}.k", (2 * kv_heads, 4), layer, 0, units=kv_heads),
            Parameter(f"{layer}.o", (3, 16), layer, 1, units=8),
            Parameter(f"{layer}.experts", (3, 16, 2), layer, 1, blocks=2),
        ]
    return parameters


@st.composite
def switches(draw: st.DrawFn) -> Plan:
    sizes = product([1, 2, 4], repeat=4)
    axes = draw(st.sampled_from([TrainAxes(*s) for s in sizes if TrainAxes(*s).ranks <= 16]))
    pairs = [
        (pp, tp) for pp in (1, 2, 4) for tp in (1, 2, 4, 8) if axes.ranks % (pp * tp) == 0
    ]  # fmt: skip
    pp, tp = draw(st.sampled_from(pairs))
    grouping = draw(st.sampled_from([Grouping.strided, Grouping.vanilla]))
    return plan_switch(model(axes.tp), axes, pp, tp, grouping).plan


def indices(piece: Piece, src: int, dst: int) -> Iterator[tuple[object, ...]]:
    """Every element of a piece on its way."""
    grid: list[tuple[int, ...]] = [()]
    for start, stop in zip(piece.box.start, piece.box.stop, strict=True):
        grid = [(*index, i) for index in grid for i in range(start, stop)]
    return ((piece.name, index, src, dst) for index in grid)


def moved(rounds: TransferRounds, rank: int) -> Counter[tuple[object, ...]]:
    """Elements that a rank receives or copies by its schedule, and how often."""
    elements: Counter[tuple[object, ...]] = Counter()
    for piece in rounds.copies:
        elements.update(indices(piece, rank, rank))
    for exchange in rounds.exchanges:
        for message in exchange.receives:
            for piece in message.pieces:
                elements.update(indices(piece, message.peer, rank))
    for gather in rounds.gathers:
        for member, pieces in zip(gather.ranks, gather.pieces, strict=True):
            for piece in pieces:
                if member != rank:
                    elements.update(indices(piece, member, rank))
    return elements


def check(there: Plan, bucket: int, least_group: int) -> list[TransferRounds]:
    """The invariants of schedule.py."""
    all_ranks = range(there.num_ranks)
    rounds = [transfer_rounds(there, rank, bucket, least_group) for rank in all_ranks]
    for rank in all_ranks:
        wanted: Counter[tuple[object, ...]] = Counter()
        for move in there.moves(rank):
            if move.dst == rank:
                wanted.update(indices(Piece(move.name, move.box), move.src, rank))
        assert moved(rounds[rank], rank) == wanted
        for exchange in rounds[rank].exchanges:
            for messages in (exchange.sends, exchange.receives):  # an element each at least
                assert sum(m.size for m in messages) <= max(bucket // 2, len(messages))
                assert all(m.size for m in messages)
        for gather in rounds[rank].gathers:
            members = len(gather.ranks)
            assert gather.size * (1 + members) <= max(bucket, 1 + members)
            assert all(gather in rounds[member].gathers for member in gather.ranks)
            for row in zip(*gather.pieces, strict=True):
                assert len({piece.box.shape for piece in row}) == 1
        for peer in all_ranks:
            sent = [m for e in rounds[rank].exchanges for m in e.sends if m.peer == peer]
            come = [m for e in rounds[peer].exchanges for m in e.receives if m.peer == rank]
            assert [m.pieces for m in sent] == [m.pieces for m in come]
    return rounds


@settings(max_examples=8)
@given(switches(), st.sampled_from([1, 7, 40, 10_000]), st.sampled_from([2, 3, 10_000]))
def test_invariants(there: Plan, bucket: int, least_group: int) -> None:
    check(there, bucket, least_group)


def even(axes: TrainAxes, pp: int, tp: int) -> Plan:
    parameters = [Parameter(f"{i}.up", (64, 8), i, 0) for i in range(NUM_LAYERS)]
    return plan_switch(parameters, axes, pp, tp).plan


@pytest.mark.parametrize(
    ("axes", "pp", "tp", "groups"),
    [
        (TrainAxes(fsdp=4), 1, 1, {(0, 1, 2, 3)}),
        (TrainAxes(fsdp=4, tp=2), 1, 2, {(0, 2, 4, 6), (1, 3, 5, 7)}),
        (TrainAxes(replicas=2, fsdp=4), 1, 1, {(0, 1, 2, 3), (4, 5, 6, 7)}),
        (TrainAxes(pp=2, fsdp=2), 1, 2, set()),
    ],
)
def test_nested_shards_are_gathered_in_their_micro_dp_group(
    axes: TrainAxes, pp: int, tp: int, groups: set[tuple[int, ...]]
) -> None:
    rounds = check(even(axes, pp, tp), 100, least_group=3)
    assert {gather.ranks for own in rounds for gather in own.gathers} == groups
    assert all(bool(own.gathers) != bool(own.exchanges) for own in rounds)


def test_uneven_shards_are_exchanged() -> None:
    mesh = Mesh((("fsdp", 3),))
    shapes = {"w": (7, 2), "v": (6, 2)}
    src = Layout(mesh, shapes, dict.fromkeys(shapes, Rule(splits=(Split("fsdp", 0),))))
    rounds = check(plan(src, Layout(mesh, shapes, dict.fromkeys(shapes, Rule()))), 100, 3)
    pieces = [piece for own in rounds for g in own.gathers for row in g.pieces for piece in row]
    assert {piece.name for piece in pieces} == {"v"}
    assert rounds[0].exchanges


def test_stages_send_at_once() -> None:
    """Every stage's ranks are busy in the first and in the last full round."""
    rounds = check(even(TrainAxes(pp=4), 1, 4), 32, least_group=3)
    assert len({len(own.exchanges) for own in rounds}) == 1
    for own in rounds:
        assert all(exchange.sends and exchange.receives for exchange in own.exchanges)


def test_a_scalar_travels() -> None:
    mesh = Mesh((("pp", 2),))
    src = Layout(mesh, {"scale": ()}, {"scale": Rule(stages=(1,))})
    rounds = check(plan(src, Layout(mesh, {"scale": ()}, {"scale": Rule(stages=(0, 1))})), 1, 3)
    assert [len(own.exchanges) for own in rounds] == [1, 1]


def test_where_boxes_lie_in_a_rank_s_tensor() -> None:
    two = LocalTensor((Box((0, 1), (2, 3)), Box((4, 1), (7, 3))))
    assert two.shape == (5, 2)
    assert two.slices(Box((5, 2), (7, 3))) == (slice(3, 5), slice(1, 2))
    assert LocalTensor(()).shape is None
    scalar = Box((), ())
    assert LocalTensor((scalar,)).shape == ()
    assert LocalTensor((scalar,)).slices(scalar) == ()
    with pytest.raises(AssertionError, match="is inside none of"):
        two.slices(Box((1, 1), (5, 3)))
