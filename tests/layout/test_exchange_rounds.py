"""Rounds of messages: the invariants at the top of `exchange_rounds`, and their one order."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest

from hybridrl.config.layout import Grouping
from hybridrl.layout import exchange_rounds as module
from hybridrl.layout.box import Box
from hybridrl.layout.exchange_rounds import ClassLinks, Exchange, exchange_rounds, first_contacts
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.parameters import BOTH, LAST, Parameter
from hybridrl.layout.plan import Plan
from hybridrl.layout.switching import plan_switch
from hybridrl.layout.transfer_rounds import exchanged_links

NO_GATHERS = 10_000
"""A group that large is never there, so everything is exchanged."""


def all_to_all(num_ranks: int, rows: int, names: int) -> ClassLinks:
    """Every rank has `rows` rows of each parameter and sends them to all others."""
    boxes = [Box((rank * rows, 0), ((rank + 1) * rows, 7)) for rank in range(num_ranks)]
    links = [(s, d, s) for s, d in product(range(num_ranks), repeat=2) if s != d]
    return ClassLinks(tuple(f"{rows}.{i}" for i in range(names)), boxes, np.array(links))


def ring(num_ranks: int, rows: int) -> ClassLinks:
    """Every rank sends its rows to the next one, and rank 0 sends three times as many."""
    boxes = [Box((0, 0), (rows * (3 if rank == 0 else 1), 5)) for rank in range(num_ranks)]
    links = [(rank, (rank + 1) % num_ranks, rank) for rank in range(num_ranks)]
    return ClassLinks(("ring",), boxes, np.array(links))


@contextmanager
def messages_of_a_round(most: int, peers: int = 16) -> Iterator[None]:
    """A limit of messages, and the peers of a rank at a time where it has more of them."""
    with (
        mock.patch.object(module, "MOST_MESSAGES", most),
        mock.patch.object(module, "_PEERS", peers),
    ):
        yield


def rounds_of_all(classes: list[ClassLinks], num_ranks: int, room: int) -> list[list[Exchange]]:
    return [list(exchange_rounds(classes, num_ranks, rank, room)) for rank in range(num_ranks)]


Batch = tuple[list[tuple[int, Any]], list[tuple[int, Any]]]
"""What a rank sends and what it receives in a round: peers, and what each gets."""


def check_in_order(batches: list[list[Batch]]) -> None:
    """Ranks that wait for all messages of a round before the next one all get to the end.

    A message ends where both of its ends have begun. Both ends have the same.
    """
    ends: dict[tuple[int, int], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for rank, rounds in enumerate(batches):
        for number, (sends, receives) in enumerate(rounds):
            for peer, what in sends:
                ends[rank, peer][0].append((number, what))
            for peer, what in receives:
                ends[peer, rank][1].append((number, what))
    waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for (sender, receiver), (sent, received) in ends.items():
        assert [what for _, what in sent] == [what for _, what in received]
        for (one, _), (other, _) in zip(sent, received, strict=True):
            waits[sender, one].append((receiver, other))
            waits[receiver, other].append((sender, one))
    place = [0] * len(batches)
    while ready := [
        rank
        for rank, rounds in enumerate(batches)
        if place[rank] < len(rounds)
        and all(place[peer] >= number for peer, number in waits[rank, place[rank]])
    ]:
        for rank in ready:
            place[rank] += 1
    assert place == [len(rounds) for rounds in batches]


def batches_of(by_rank: list[list[Exchange]]) -> list[list[Batch]]:
    return [
        [
            ([(m.peer, m.pieces) for m in e.sends], [(m.peer, m.pieces) for m in e.receives])
            for e in rounds
        ]
        for rounds in by_rank
    ]


def check_bounds(by_rank: list[list[Exchange]], room: int, most: int) -> None:
    for exchange in (exchange for rounds in by_rank for exchange in rounds):
        for messages in (exchange.sends, exchange.receives):
            assert sum(m.size for m in messages) <= max(room, len(messages))
            assert all(m.size for m in messages)
            peers = [m.peer for m in messages]
            assert peers == sorted(set(peers))
        assert len(exchange.sends) + len(exchange.receives) <= most


def check_elements(by_rank: list[list[Exchange]], classes: list[ClassLinks]) -> None:
    """Every link carries what its classes say: each box once, of each name."""
    wanted: Counter[Any] = Counter()
    for c in classes:
        for sender, receiver, box in c.links.tolist():
            wanted.update(
                (sender, receiver, name, i) for name in c.names for i in indices(c.boxes[box])
            )
    received_elements: Counter[Any] = Counter()
    for receiver, rounds in enumerate(by_rank):
        for message in (message for exchange in rounds for message in exchange.receives):
            for piece in message.pieces:
                received_elements.update(
                    (message.peer, receiver, piece.name, i) for i in indices(piece.box)
                )
    assert received_elements == wanted


def indices(box: Box) -> list[tuple[int, ...]]:
    return list(product(*map(range, box.start, box.stop)))


@pytest.mark.parametrize("room", [1, 6, 50, 640, 10_000])
@pytest.mark.parametrize("most", [2, 4, 8, 256])
def test_large_and_small_links(room: int, most: int) -> None:
    """Few messages a round make windows of links, and little room makes many rounds."""
    classes = [all_to_all(6, 1, 3), ring(6, 40), all_to_all(6, 3, 1)]
    with messages_of_a_round(most, peers=3):
        by_rank = rounds_of_all(classes, 6, room)
    check_bounds(by_rank, room, most)
    check_in_order(batches_of(by_rank))
    check_elements(by_rank, classes)


def model() -> list[Parameter]:
    parameters = [Parameter("embed", (37, 6), BOTH, 0), Parameter("norm", (7,), LAST)]
    for layer in range(4):
        parameters += [
            Parameter(f"{layer}.k", (6, 6), layer, 0, units=2),
            Parameter(f"{layer}.o", (6, 24), layer, 1, units=8),
            Parameter(f"{layer}.gate_up", (4, 16, 5), layer, 1, blocks=2, experts=4),
            Parameter(f"{layer}.norm", (5,), layer),
        ]
    return parameters


def random_plans(count: int) -> list[Plan]:
    draw = random.Random(0)
    sizes = [TrainAxes(*size) for size in product((1, 2, 4), repeat=4)]
    some = [axes for axes in sizes if 4 <= axes.ranks <= 16 and axes.tp <= 2]
    plans = []
    for axes in draw.sample(some, count):
        pairs = [(pp, tp) for pp in (1, 2, 4) for tp in (1, 2, 4, 8) if axes.ranks % (pp * tp) == 0]
        order = draw.choice([Grouping.strided, Grouping.vanilla])
        plans.append(plan_switch(model(), axes, *draw.choice(pairs), order).plan)
    return plans


@pytest.mark.long
def test_random_layouts() -> None:
    draw, exchanged = random.Random(1), 0
    for plan in random_plans(12):
        room, most = draw.choice([3, 40, 300, 5000]), draw.choice([4, 256])
        classes = exchanged_links(plan, NO_GATHERS)
        with messages_of_a_round(most, peers=draw.choice([1, 2])):
            by_rank = rounds_of_all(classes, plan.num_ranks, room)
        check_bounds(by_rank, room, most)
        check_in_order(batches_of(by_rank))
        check_elements(by_rank, classes)
        exchanged += sum(len(rounds) for rounds in by_rank)
    assert exchanged > 500


def test_the_busiest_rank_is_busy_in_all_rounds() -> None:
    by_rank = rounds_of_all([ring(4, 400)], 4, 640)
    assert {len(exchange.sends) for exchange in by_rank[0]} == {1}
    least = 3 * 400 * 5 / 640
    assert least <= len(by_rank[0]) <= 1.05 * least + 1
    sizes = [message.size for exchange in by_rank[2] for message in exchange.sends]
    assert max(sizes) - min(sizes) <= 5  # a row


def test_small_links_do_not_send_in_the_rounds_of_large_ones() -> None:
    """A message a peer, although the ring alone takes 30 rounds and more."""
    (small, large) = all_to_all(8, 16, 1), ring(8, 4000)
    by_rank = rounds_of_all([small, large], 8, 6400)
    messages = Counter(message.peer for exchange in by_rank[3] for message in exchange.sends)
    assert messages.pop(4) > 3
    assert set(messages.values()) == {1}
    assert len(messages) == 6


def test_of_many_peers_a_rank_sends_to_few_at_a_time() -> None:
    """Messages are as large as if it had no others, and ranks are busy in all rounds."""
    with messages_of_a_round(8, peers=2):
        by_rank = rounds_of_all([all_to_all(7, 400, 1)], 7, 640)
    for rank, rounds in enumerate(by_rank):
        peers = [[m.peer for m in exchange.sends] for exchange in rounds]
        assert sorted({tuple(group) for group in peers}) == sorted(
            tuple(sorted((rank + distance) % 7 for distance in group))
            for group in ((1,), (2, 3), (4, 5), (6,))
        )
        assert all(sum(m.size for m in exchange.sends) > 540 for exchange in rounds)


def test_parameters_of_many_peers_are_apart() -> None:
    """They would else be busy in the rounds of the one link that has more."""
    with messages_of_a_round(8, peers=2):
        by_rank = rounds_of_all([all_to_all(7, 400, 1), ring(7, 4000)], 7, 640)
    for exchange in (exchange for rounds in by_rank for exchange in rounds):
        names = {p.name for m in (*exchange.sends, *exchange.receives) for p in m.pieces}
        assert len(names) == 1


def test_small_boxes_of_all_peers_come_together() -> None:
    """Peers that send large boxes send small ones then, too, so all are at equal distances."""
    by_rank = rounds_of_all([ring(8, 4000), all_to_all(8, 1, 9)], 8, 6400)
    first = by_rank[3][0]
    assert [m.peer for m in first.receives] == [0, 1, 2, 4, 5, 6, 7]
    assert {m.size for m in first.receives} == {9 * 7}
    assert len({id(m.pieces) for m in first.sends}) == 1  # all peers get the same


@pytest.mark.parametrize("most", [2, 6, 256])
def test_first_contacts_are_those_of_the_rounds(most: int) -> None:
    """Each link once, in an order in which none waits in a circle."""
    for plan in random_plans(6):
        classes = exchanged_links(plan, NO_GATHERS)
        with messages_of_a_round(most):
            contacts = [first_contacts(classes, plan.num_ranks, r) for r in range(plan.num_ranks)]
        check_in_order(
            [
                [
                    ([(p, ()) for p in receivers], [(p, ()) for p in senders])
                    for receivers, senders in r
                ]
                for r in contacts
            ]
        )
        for rank, rounds in enumerate(contacts):
            sends = sorted(peer for receivers, _ in rounds for peer in receivers)
            links = np.concatenate([c.links for c in classes])
            assert sends == sorted(set(links[links[:, 0] == rank, 1].tolist()))
            assert all(len(receivers) + len(senders) <= most for receivers, senders in rounds)
