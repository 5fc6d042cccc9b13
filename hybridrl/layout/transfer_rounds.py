"""Transfer rounds: a plan cut into rounds that never hold more than a bucket. Pure data.

Invariants, asserted by the tests:
1. copies, gathers and exchanges of a rank together are its moves of the plan, each element once;
2. a round takes at most one bucket of scratch on every rank, whatever the size of a parameter;
3. what a rank sends in a round is what its peers expect in that round, in the same order.

A rank computes the rounds of the ranks that it is connected with, and no others. All of them
compute the same rounds, so they need no message to agree.

Buckets are all-gathered if every member of a group sends all others the same boxes, of equal
shapes. This is the micro data-parallel group of HybridFlow, section 5.3: its training shards nest
evenly in a generation shard. All other moves go from rank to rank. A move gets the earliest round
in which both its sender and its receiver have room, and is cut if it does not fit.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod

import numpy as np

from hybridrl.layout.box import Box
from hybridrl.layout.plan import ParameterClass, Plan

BUCKET_BYTES = 16 * 2**20
"""Default size of a bucket; two are in flight."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class Message:
    """Pieces sent to, or received from, `peer` in one buffer."""

    peer: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(piece.box.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Exchange:
    """A round of messages, sorted by peer."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Gather:
    """An all-gather among `ranks`; every member contributes pieces of the same shapes."""

    ranks: tuple[int, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """By member of `ranks`."""

    @property
    def size(self) -> int:
        """Elements that each member contributes."""
        return sum(piece.box.size for piece in self.pieces[0])


@dataclass(frozen=True, slots=True)
class TransferRounds:
    """The work of one rank: local `copies`, then gathers, then exchanges."""

    copies: tuple[Piece, ...]
    gathers: tuple[Gather, ...]
    exchanges: tuple[Exchange, ...]


def transfer_rounds(plan: Plan, rank: int, bucket: int, least_group: int = 3) -> TransferRounds:
    """The rounds of `rank`, each with at most `bucket` elements of scratch.

    An exchange may fill half of the bucket with sent and half with received elements; a gather
    among n ranks holds n + 1 shards. Groups smaller than `least_group` exchange instead, which
    needs no process group.
    """
    links = [_Links(cls, plan.num_ranks, least_group) for cls in plan.classes]
    by_name = {name: link for link in links for name in link.names}
    names = [by_name[name] for name in plan.dst.rules]
    # Local copies, and this rank's all-gathers by group.
    groups: dict[tuple[int, ...], list[tuple[Piece, ...]]] = defaultdict(list)
    copies = []
    for name, link in zip(plan.dst.rules, names, strict=True):
        copies += [Piece(name, box) for box in link.kept.get(rank, ())]
        if group := link.group_of.get(rank):
            pieces = [[Piece(name, box) for box in link.contributed[member]] for member in group]
            groups[group] += zip(*pieces, strict=True)
    return TransferRounds(
        tuple(copies),
        tuple(
            Gather(group, round)
            for group in sorted(groups)
            for round in _gathers(groups[group], max(1, bucket // (len(group) + 1)))
        ),
        tuple(_exchanges(plan, links, rank, max(1, bucket // 2))),
    )


def gather_ranks(plan: Plan, rank: int, least_group: int = 3) -> list[tuple[int, ...]]:
    """The ranks of each all-gather of `rank`, as in `transfer_rounds`, without the rounds."""
    links = [_Links(cls, plan.num_ranks, least_group) for cls in plan.classes]
    return sorted({link.group_of[rank] for link in links if rank in link.group_of})


_LOOK_BACK = 64
"""Rounds before a rank's last one that are still searched for room."""

_ByPeer = dict[int, list[Piece]]


class _Links:
    """Senders, receivers and boxes, for every parameter of a class."""

    def __init__(self, cls: ParameterClass, num_ranks: int, least_group: int) -> None:
        self.names = cls.names
        self.kept: dict[int, list[Box]] = defaultdict(list)
        self.contributed: dict[int, list[Box]] = {}
        self.group_of: dict[int, tuple[int, ...]] = {}
        ids: dict[Box, int] = {}
        parts = [np.zeros((0, 3), np.int64)]
        for transfer in cls.transfers:
            away = transfer.senders != transfer.receivers
            for receiver in transfer.receivers[~away].tolist():
                self.kept[receiver].append(transfer.box)
            box = np.full(int(away.sum()), ids.setdefault(transfer.box, len(ids)))
            parts.append(np.stack([transfer.senders[away], transfer.receivers[away], box], 1))
        self.boxes = list(ids)
        links = np.concatenate(parts)
        gathered = np.zeros(len(links), bool)
        for group in _split(links, num_ranks):
            gathered[group] = self._gathers(links[group], least_group)
        self.exchanged = links[~gathered]

    def _gathers(self, links: np.ndarray, least_group: int) -> bool:
        """Whether connected links are an all-gather: every member gives all others the same."""
        ranks = np.unique(links[:, :2])
        distinct, counts = np.unique(links[:, [0, 2]], axis=0, return_counts=True)
        if len(ranks) < least_group or (counts != len(ranks) - 1).any():
            return False
        boxes: dict[int, list[Box]] = {rank: [] for rank in ranks.tolist()}
        for sender, box in distinct.tolist():
            boxes[sender].append(self.boxes[box])
        if (
            len({tuple(box.shape for box in sorted(rank_boxes)) for rank_boxes in boxes.values()})
            > 1
        ):
            return False
        for rank, rank_boxes in boxes.items():
            self.contributed[rank] = sorted(rank_boxes)
            self.group_of[rank] = tuple(boxes)
        return True


def _split(links: np.ndarray, num_ranks: int) -> Iterator[np.ndarray]:
    """Indices of the links of each connected set of ranks."""
    labels = _connected(links, num_ranks)[links[:, 0]]
    order = np.argsort(labels, kind="stable")
    borders = np.flatnonzero(np.diff(labels[order])) + 1
    return (indices for indices in np.split(order, borders) if len(indices))


def _connected(links: np.ndarray, num_ranks: int) -> np.ndarray:
    """For every rank the lowest rank that it is connected with."""
    labels = np.arange(num_ranks)
    while True:
        lowest = labels[links[:, :2]].min(1)
        new = labels.copy()
        np.minimum.at(new, links[:, 0], lowest)
        np.minimum.at(new, links[:, 1], lowest)
        new = new[new]
        if (new == labels).all():
            return labels
        labels = new


def _gathers(
    rows: Sequence[tuple[Piece, ...]], room: int
) -> Iterator[tuple[tuple[Piece, ...], ...]]:
    """Fill buckets of `room` elements a member; a row holds pieces of one shape, one a member."""
    bucket: list[list[Piece]] = [[] for _ in rows[0]]
    filled = 0
    for row in rows:
        fitting = [list(_cut_to(piece.box, room)) for piece in row]
        for boxes in zip(*fitting, strict=True):
            remaining: list[Box] = list(boxes)
            while remaining:
                cuts = [_split_rows(box, room - filled) for box in remaining]
                heads = [head for head, _ in cuts if head]
                if heads:
                    for member_bucket, piece, head in zip(bucket, row, heads, strict=True):
                        member_bucket.append(Piece(piece.name, head))
                    filled += heads[0].size
                    remaining = [tail for _, tail in cuts if tail]
                else:
                    yield tuple(map(tuple, bucket))
                    bucket, filled = [[] for _ in row], 0
    if filled:
        yield tuple(map(tuple, bucket))


def _exchanges(plan: Plan, links: Sequence[_Links], rank: int, room: int) -> Iterator[Exchange]:
    """First fit, over all moves among the ranks that `rank` is connected with."""
    nearest = _connected(np.concatenate([link.exchanged for link in links]), plan.num_ranks)
    moves: dict[str, list[tuple[Box, int, int]]] = {}
    for link in links:
        near = nearest[link.exchanged[:, 0]] == nearest[rank]
        of_class = [(link.boxes[box], src, dst) for src, dst, box in link.exchanged[near].tolist()]
        moves |= dict.fromkeys(link.names, of_class)
    # Every connected rank places all moves alike, and keeps its own.
    sent, received = _Buckets(room), _Buckets(room)
    rounds: dict[int, tuple[_ByPeer, _ByPeer]] = defaultdict(
        lambda: (defaultdict(list), defaultdict(list))
    )
    for name in _alternating(plan):
        for box, src, dst in moves[name]:
            for fitting in _cut_to(box, room):
                remaining: Box | None = fitting
                while remaining:
                    number, head, remaining = _first_fit(remaining, sent, src, received, dst)
                    if src == rank:
                        rounds[number][0][dst].append(Piece(name, head))
                    elif dst == rank:
                        rounds[number][1][src].append(Piece(name, head))
    for _, (outgoing, incoming) in sorted(rounds.items()):
        yield Exchange(_messages(outgoing), _messages(incoming))


def _messages(pieces: _ByPeer) -> tuple[Message, ...]:
    return tuple(Message(peer, tuple(pieces[peer])) for peer in sorted(pieces))


def _alternating(plan: Plan) -> Iterator[str]:
    """Names by turns from each pipeline stage of the source, so that all stages send at once."""
    stages: dict[int, list[str]] = defaultdict(list)
    for name in plan.dst.rules:
        stages[plan.src.rules[name].stages[0]].append(name)
    for turn in zip_longest(*stages.values()):
        yield from (name for name in turn if name is not None)


class _Buckets:
    """The fill of every rank's bucket in every round.

    Invariant: rounds before `first[rank]` have less than a sixteenth left. The search skips them
    and rounds long before the rank's last one: a full search takes minutes for large models.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.filled: dict[int, list[int]] = defaultdict(list)
        self.first: dict[int, int] = defaultdict(int)

    def earliest(self, rank: int) -> int:
        return max(self.first[rank], len(self.filled[rank]) - _LOOK_BACK)

    def add(self, rank: int, round: int, size: int) -> None:
        filled, first = self.filled[rank], self.first[rank]
        filled += [0] * (round + 1 - len(filled))
        filled[round] += size
        while first < len(filled) and filled[first] > self.room * 15 // 16:
            first += 1
        self.first[rank] = first


def _first_fit(
    box: Box, sent: _Buckets, src: int, received: _Buckets, dst: int
) -> tuple[int, Box, Box | None]:
    """The earliest round with room for some of `box`, the box in it, and the remaining box."""
    least = _row(box)
    round = max(sent.earliest(src), received.earliest(dst))
    sizes_out, sizes_in = sent.filled[src], received.filled[dst]
    while round < max(len(sizes_out), len(sizes_in)):
        most = max(
            sizes_out[round] if round < len(sizes_out) else 0,
            sizes_in[round] if round < len(sizes_in) else 0,
        )
        if sent.room - most >= least:
            break
        round += 1
    else:
        most = 0
    head, tail = _split_rows(box, sent.room - most)
    assert head, (box, sent.room)
    sent.add(src, round, head.size)
    received.add(dst, round, head.size)
    return round, head, tail


def _split_rows(box: Box, room: int) -> tuple[Box | None, Box | None]:
    """As many full rows of `box` as fit into `room` elements, and the remaining box."""
    if box.size <= room:
        return box, None
    rows = room // _row(box)
    if not rows:
        return None, box
    dim = _row_dim(box)
    low, high = box.start[dim], box.stop[dim]
    return box.narrow(dim, low, low + rows), box.narrow(dim, low + rows, high)


def _row_dim(box: Box) -> int:
    return next((dim for dim, extent in enumerate(box.shape) if extent > 1), 0)


def _row(box: Box) -> int:
    """Elements of one index along the first dimension that has several."""
    return box.size // box.shape[_row_dim(box)] if box.shape else 1


def _cut_to(box: Box, room: int, dim: int = 0) -> Iterator[Box]:
    """Boxes that together are `box`, of each of which at least a row fits into `room` elements."""
    if dim + 1 >= len(box.shape) or prod(box.shape[dim + 1 :]) <= room:
        yield box
        return
    for i in range(box.start[dim], box.stop[dim]):
        yield from _cut_to(box.narrow(dim, i, i + 1), room, dim + 1)
