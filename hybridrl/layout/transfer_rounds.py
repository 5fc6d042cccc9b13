"""Transfer rounds: a plan cut into rounds that never hold more than a bucket. Pure data.

Invariants, asserted by the tests:
1. copies, gathers and exchanges of a rank together are its moves of the plan, each element once;
2. a round takes at most one bucket of scratch on every rank, whatever the size of a parameter;
3. what a rank sends in a round is what its peers expect in that round, in the same order.

A rank computes its own rounds and no others. Its peers compute theirs, which fit, so they need no
message to agree.

Buckets are all-gathered if every member of a group sends all others the same boxes, of equal
shapes. This is the micro data-parallel group of HybridFlow, section 5.3: its training shards nest
evenly in a generation shard. All other moves go from rank to rank (`exchange_rounds`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.layout.box import Box
from hybridrl.layout.exchange_rounds import ClassLinks, Exchange, connected, exchange_rounds
from hybridrl.layout.plan import ParameterClass, Plan
from hybridrl.layout.portions import Piece, portions

BUCKET_BYTES = 16 * 2**20
"""Default size of a bucket; two are in flight."""


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
    groups: dict[tuple[int, ...], list[list[Piece]]] = {}
    copies = []
    for name, link in zip(plan.dst.rules, names, strict=True):
        copies += [Piece(name, box) for box in link.kept.get(rank, ())]
        if group := link.group_of.get(rank):
            pieces = [[Piece(name, box) for box in link.contributed[member]] for member in group]
            for own, more in zip(
                groups.setdefault(group, [[] for _ in group]), pieces, strict=True
            ):
                own += more
    exchanged = [link.exchanged for link in links]
    return TransferRounds(
        tuple(copies),
        tuple(
            gather
            for group in sorted(groups)
            for gather in _gathers(group, groups[group], max(1, bucket // (len(group) + 1)))
        ),
        tuple(exchange_rounds(exchanged, plan.num_ranks, rank, max(1, bucket // 2))),
    )


def gather_ranks(plan: Plan, rank: int, least_group: int = 3) -> list[tuple[int, ...]]:
    """The ranks of each all-gather of `rank`, as in `transfer_rounds`, without the rounds."""
    links = [_Links(cls, plan.num_ranks, least_group) for cls in plan.classes]
    return sorted({link.group_of[rank] for link in links if rank in link.group_of})


def exchanged_links(plan: Plan, least_group: int = 3) -> list[ClassLinks]:
    """What ranks exchange under `transfer_rounds`, as opposed to what they gather."""
    return [_Links(cls, plan.num_ranks, least_group).exchanged for cls in plan.classes]


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
        self.exchanged = ClassLinks(cls.names, self.boxes, links[~gathered])

    def _gathers(self, links: np.ndarray, least_group: int) -> bool:
        """Whether connected links are an all-gather: every member gives all others the same."""
        ranks = np.unique(links[:, :2])
        distinct, counts = np.unique(
            links[:, 0] * len(self.boxes) + links[:, 2], return_counts=True
        )
        if len(ranks) < least_group or (counts != len(ranks) - 1).any():
            return False
        boxes: dict[int, list[Box]] = {rank: [] for rank in ranks.tolist()}
        for number in distinct.tolist():
            sender, box = divmod(number, len(self.boxes))
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
    labels = connected(links, num_ranks)[links[:, 0]]
    order = np.argsort(labels, kind="stable")
    borders = np.flatnonzero(np.diff(labels[order])) + 1
    return (indices for indices in np.split(order, borders) if len(indices))


def _gathers(
    ranks: tuple[int, ...], pieces: Sequence[Sequence[Piece]], room: int
) -> Iterator[Gather]:
    """All-gathers of at most `room` elements a member; the pieces of all members are alike."""
    size = sum(piece.box.size for piece in pieces[0])
    grain = 1 if size <= room else max(1, room // 64)
    rounds = -(-size // (room - grain + 1))
    parts = [portions(own, rounds, grain) for own in pieces]
    yield from (Gather(ranks, round) for round in zip(*parts, strict=True) if round[0])
