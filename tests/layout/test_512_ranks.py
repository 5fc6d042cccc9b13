"""The switch of models on 64 and 512 ranks: rounds, messages and boxes of a rank, held exactly.

`large_switches.py` prints the seconds of planning.
"""

from collections import Counter

import pytest
import torch
from layout.large_switches import BUCKET_BYTES, CASES, RANKS_OF_A_NODE, counts, switch_of

from hybridrl.config.layout import Grouping
from hybridrl.layout.exchange_rounds import MOST_MESSAGES, Message, first_contacts
from hybridrl.layout.transfer_rounds import exchanged_links, transfer_rounds

pytestmark = pytest.mark.long

WANTED = {
    "8b on 8": (Grouping.strided, 140, 0, 0, 4296, 3579),
    "32b on 16": (Grouping.node_strided, 1, 124, 496, 6400, 2744),
    "70b on 64": (Grouping.vanilla, 1, 267, 4272, 23040, 4329),
    "70b on 64, pipeline": (Grouping.node_strided, 0, 276, 4430, 7832, 4051),
    "671b on 512": (Grouping.node_strided, 0, 712, 23870, 67208, 14721),
    "671b on 512, fsdp": (Grouping.node_strided, 1, 1357, 45108, 361431, 106614),
}
"""The order of ranks on nodes of eight, and the `counts` of one rank."""


def sizes(messages: list[Message]) -> Counter[int]:
    """Elements by peer."""
    total: Counter[int] = Counter()
    for message in messages:
        total[message.peer] += message.size
    return total


def test_every_case_has_its_counts() -> None:
    assert WANTED.keys() == CASES.keys()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.layouts] * (n == "671b on 512, fsdp")) for n in CASES],
)
def test_a_rank_plans_its_rounds(name: str) -> None:
    """Within the bucket and NCCL's limit, to and from all whom the plan names, in the counts."""
    switch = switch_of(CASES[name])
    plan, bucket = switch.plan, BUCKET_BYTES // torch.bfloat16.itemsize
    rank = plan.num_ranks // 3
    if CASES[name].tp <= RANKS_OF_A_NODE:
        for group in plan.dst.mesh.lines("tp"):
            assert len({member // RANKS_OF_A_NODE for member in group}) == 1, group
    rounds = transfer_rounds(plan, rank, bucket)
    sends = [message for exchange in rounds.exchanges for message in exchange.sends]
    receives = [message for exchange in rounds.exchanges for message in exchange.receives]
    gathered: Counter[int] = Counter()
    for gather in rounds.gathers:
        gathered.update({peer: gather.size for peer in gather.ranks if peer != rank})
    # Every element, and no more.
    traffic = plan.traffic
    assert sum(message.size for message in receives) + gathered.total() == traffic.received[rank]
    nests = switch.grouping is Grouping.strided  # else a rank is given what its node has no part of
    assert (traffic.received[rank] == plan.least[rank]) == nests
    assert sum(piece.box.size for piece in rounds.copies) == traffic.kept[rank]
    sent_to = {d: n for (s, d), n in traffic.links.items() if s == rank}
    assert sizes(sends) + gathered == sent_to
    assert sizes(receives) + gathered == {s: n for (s, d), n in traffic.links.items() if d == rank}
    # In rounds that fit.
    for exchange in rounds.exchanges:
        assert sum(message.size for message in exchange.sends) <= bucket // 2
        assert sum(message.size for message in exchange.receives) <= bucket // 2
        assert len(exchange.sends) + len(exchange.receives) <= MOST_MESSAGES
    # The other end of the largest link has the same.
    if receives:
        ((peer, _),) = sizes(receives).most_common(1)
        others = transfer_rounds(plan, peer, bucket)
        sent = [m.pieces for e in others.exchanges for m in e.sends if m.peer == rank]
        assert sent == [message.pieces for message in receives if message.peer == peer]
    assert (switch.grouping, *counts(plan, rank, rounds).values()) == WANTED[name]


def test_all_ranks_meet_at_the_start() -> None:
    """512 ranks of which each sends to all others are connected in four rounds."""
    plan = switch_of(CASES["671b on 512"]).plan
    classes = exchanged_links(plan)
    contacts = {rank: first_contacts(classes, 512, rank) for rank in (0, 170, 511)}
    for rank, rounds in contacts.items():
        assert [len(receivers) for receivers, _ in rounds] == [127, 128, 128, 128]
        assert [len(senders) for _, senders in rounds] == [127, 128, 128, 128]
        peers = sorted(peer for receivers, _ in rounds for peer in receivers)
        assert peers == [peer for peer in range(512) if peer != rank]
    one, other = contacts[170], contacts[511]
    assert [511 in receivers for receivers, _ in one] == [170 in senders for _, senders in other]
