"""The order of ranks in generation on several nodes: groups stay within nodes where they can."""

from collections.abc import Hashable, Sequence
from itertools import product

import pytest
from layout.test_plan import awkward_model, check, divisors, even_model, gen_sizes, train_axes

from hybridrl.config.layout import Grouping
from hybridrl.layout.grouping import TrainAxes, gen_positions, nodes_spanned
from hybridrl.layout.mesh import Mesh, gen_mesh
from hybridrl.layout.switching import candidate_orders, plan_switch


def nodes_of(ranks: int, per_node: int) -> list[int]:
    return [rank // per_node for rank in range(ranks)]


def across(groups: Sequence[Sequence[int]], nodes: Sequence[Hashable]) -> list[Sequence[int]]:
    return [group for group in groups if len({nodes[rank] for rank in group}) > 1]


def instances_of(mesh: Mesh) -> list[list[int]]:
    return mesh.grid().reshape(mesh.extent("instance"), -1).tolist()


@pytest.mark.parametrize(
    ("axes", "tp", "unaware", "order"),
    [
        (TrainAxes(fsdp=16), 4, [0, 4, 8, 12], Grouping.node_strided),
        (TrainAxes(fsdp=16), 8, [0, 2, 4, 6, 8, 10, 12, 14], Grouping.node_strided),
        (TrainAxes(fsdp=64), 8, [0, 8, 16, 24, 32, 40, 48, 56], Grouping.vanilla),
        (TrainAxes(fsdp=8, tp=2), 4, [0, 8, 1, 9], Grouping.node_strided),
        (TrainAxes(replicas=2, fsdp=8), 4, [0, 2, 4, 6], Grouping.strided),
        (TrainAxes(pp=8, fsdp=8), 8, [0, 1, 2, 3, 4, 5, 6, 7], Grouping.strided),
    ],
    ids=str,
)
def test_groups_of_nodes_of_eight(
    axes: TrainAxes, tp: int, unaware: list[int], order: Grouping
) -> None:
    """What one node would take, and what nodes of eight take instead."""
    alone = plan_switch(even_model(), axes, 1, tp).plan.dst.mesh
    assert alone.lines("tp")[0] == unaware
    nodes = nodes_of(axes.ranks, 8)
    switch = plan_switch(even_model(), axes, 1, tp, nodes=nodes)
    assert switch.grouping is order
    assert not across(switch.plan.dst.mesh.lines("tp"), nodes)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [16, 64, pytest.param(512, marks=pytest.mark.slow)])
def test_every_group_that_divides_a_node_stays_in_one(ranks: int) -> None:
    """Under every training layout, for every size of a node that divides the ranks."""
    moved = 0
    for per_node in divisors(ranks):
        nodes = nodes_of(ranks, per_node)
        for axes, (pp, tp) in product(train_axes(ranks), gen_sizes(ranks)):
            if ranks == 512 and (per_node not in (4, 8, 16) or pp > 4 or not 1 < tp <= 16):
                continue
            orders = candidate_orders(axes, pp, tp, nodes=nodes)
            assert orders
            for positions in orders:
                mesh = gen_mesh(positions, pp, tp)
                if per_node % tp == 0:
                    assert not across(mesh.lines("tp"), nodes), (axes, pp, tp, per_node)
                if per_node % (pp * tp) == 0:
                    assert not across(instances_of(mesh), nodes), (axes, pp, tp, per_node)
            moved += Grouping.strided not in orders.values()
    assert moved > ranks


def test_larger_groups_span_as_few_nodes_as_consecutive_ranks() -> None:
    nodes = nodes_of(64, 8)
    for axes, tp in product(train_axes(64), (16, 32, 64)):
        for positions in candidate_orders(axes, 1, tp, nodes=nodes):
            groups = gen_mesh(positions, 1, tp).lines("tp")
            assert {len({nodes[rank] for rank in group}) for group in groups} == {tp // 8}


def test_512_ranks_are_planned_within_nodes() -> None:
    nodes = nodes_of(512, 8)
    switch = plan_switch(even_model(), TrainAxes(replicas=8, fsdp=64), 1, 8, nodes=nodes)
    assert not across(switch.plan.dst.mesh.lines("tp"), nodes)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "per_node"), [(4, 2), (6, 3), (8, 2), (8, 4)])
def test_the_order_within_nodes_has_the_invariants_of_plans(ranks: int, per_node: int) -> None:
    nodes, seen = nodes_of(ranks, per_node), 0
    for number, (axes, (pp, tp)) in enumerate(product(train_axes(ranks), gen_sizes(ranks))):
        if number % 5 or 8 % tp or 8 % axes.tp:
            continue
        switch = plan_switch(awkward_model(), axes, pp, tp, Grouping.node_strided, nodes=nodes)
        check(switch.plan)
        seen += 1
    assert seen > 5


def test_it_nests_at_least_as_well_as_consecutive_ranks() -> None:
    """Where the shards of training are parts of those of generation."""
    nodes, better = nodes_of(16, 8), 0
    for axes, tp in product(train_axes(16), (2, 4, 8)):
        if (axes.fsdp * axes.tp) % tp:
            continue
        orders = (Grouping.node_strided, Grouping.vanilla)
        plans = [plan_switch(even_model(), axes, 1, tp, order, nodes=nodes) for order in orders]
        ours, theirs = (int(switch.plan.traffic.received.sum()) for switch in plans)
        assert ours <= theirs, (axes, tp)
        better += ours < theirs
    assert better > 5


def test_of_orders_within_nodes_the_one_of_fewest_bytes_between_nodes() -> None:
    nodes = nodes_of(16, 8)
    for axes, tp in product(train_axes(16), (2, 4, 8)):
        moved = []
        for order in candidate_orders(axes, 1, tp, nodes=nodes).values():
            switch = plan_switch(even_model(), axes, 1, tp, order, nodes=nodes)
            links = switch.plan.traffic.links.items()
            slow = sum(size for (a, b), size in links if nodes[a] != nodes[b])
            moved.append((slow, sum(size for _, size in links)))
        chosen = plan_switch(even_model(), axes, 1, tp, nodes=nodes).plan.traffic
        slow = sum(size for (a, b), size in chosen.links.items() if nodes[a] != nodes[b])
        assert (slow, chosen.received.sum()) == min(moved)


def test_nodes_whose_ranks_are_no_neighbors() -> None:
    """As `cluster.rank_order` may have them."""
    nodes = "abbaabba"
    (positions,) = candidate_orders(TrainAxes(fsdp=8), 1, 4, nodes=nodes)
    assert gen_mesh(positions, 1, 4).lines("tp") == [[0, 3, 4, 7], [1, 2, 5, 6]]


def test_one_node_has_the_order_that_it_has_without_nodes() -> None:
    for axes, (pp, tp) in product(train_axes(8), gen_sizes(8)):
        alone = candidate_orders(axes, pp, tp)
        assert candidate_orders(axes, pp, tp, nodes=["a"] * 8) == alone
        assert Grouping.node_strided not in alone.values()
        strided = tuple(gen_positions(axes, pp, tp, Grouping.strided))
        assert next(iter(alone)) == strided


def test_nodes_that_groups_span() -> None:
    positions = gen_positions(TrainAxes(fsdp=8), 2, 2, Grouping.vanilla)
    assert nodes_spanned(positions) == (0, 0)
    assert nodes_spanned(positions, "aaaabbbb") == (0, 0)
    assert nodes_spanned(positions, "aabbaabb") == (0, 2)
    assert nodes_spanned(positions, "abbbabcd") == (3, 4)
