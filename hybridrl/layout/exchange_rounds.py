"""Rounds of messages between ranks, which each rank computes for itself. Pure data.

A *link* is a sender and a receiver, with the elements between them. Links are put into groups; in
each of the n rounds of a group every link sends one n-th of what it has. Rounds of a rank are in
one order with those of all others, and both ends of a link cut it alike. So no message is needed to
agree, and no rank computes what others send each other.

Invariants, asserted by the tests:
1. a round sends at most `room` elements from a rank and as many to it, or one by each message;
2. a rank has at most `MOST_MESSAGES` messages in a round;
3. what a rank sends in a round is what its peers expect in that round.

A group has as few rounds as its busiest rank allows, so that rank is busy in all of them. Small
links would send very small messages in all rounds of large ones, so they have a group of their own.
A rank with many peers sends to few of them at a time. Its messages are then larger than most boxes,
so that few boxes are cut.

Parameters with small boxes come first, in groups of their own: the boxes from all peers are then
alike, and are copied together (`box_copies`). For the same reason parameters that a rank exchanges
with many peers, such as experts, are apart from those that it exchanges with few.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from hybridrl.layout.box import Box
from hybridrl.layout.portions import Piece, portions

MOST_MESSAGES = 256
"""Messages that a rank sends and receives in one round: NCCL below 2.30 can hang with more."""

_SMALL_BOX = 2**15
"""Elements of a box whose launch takes longer than its copy."""

_PEERS = 16
"""Ranks that one sends to at a time, where a round has too few messages for all of them."""

_PARTS = 64
"""A round may waste one in 64 parts of its room on whole rows."""


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


@dataclass(frozen=True)
class ClassLinks:
    """The links of each parameter of a class: rows of (sender, receiver, number of the box)."""

    names: tuple[str, ...]
    boxes: Sequence[Box]
    links: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """Elements of each box."""
        return np.array([box.size for box in self.boxes], np.int64)


def exchange_rounds(
    classes: Sequence[ClassLinks], num_ranks: int, rank: int, room: int
) -> Iterator[Exchange]:
    """The rounds of `rank`, each with at most `room` elements sent and as many received."""
    kinds: dict[tuple[bool, bool], list[ClassLinks]] = defaultdict(list)
    for c in classes:
        small = c.sizes.max(initial=0) <= min(_SMALL_BOX, room // _PARTS)
        many_peers = _most_peers(_summed([c], num_ranks)) > MOST_MESSAGES // 2
        kinds[not small, many_peers].append(c)
    for _, alike in sorted(kinds.items()):
        links = _connected_links(_summed(alike, num_ranks), num_ranks, rank)
        keys = [_keys(alike, rank, side) for side in (0, 1)]
        cut = cache(partial(_portions, alike))
        for group, rounds, grain in _groups(links, num_ranks, room):
            sends, receives = (
                [(peer, cut(of_peer[peer], rounds, grain)) for peer in peers]
                for of_peer, peers in zip(keys, _peers(group, rank), strict=True)
            )
            for number in range(rounds):
                exchange = Exchange(_messages(sends, number), _messages(receives, number))
                if exchange.sends or exchange.receives:
                    yield exchange


def first_contacts(
    classes: Sequence[ClassLinks], num_ranks: int, rank: int
) -> list[tuple[list[int], list[int]]]:
    """The peers that `rank` sends to and receives from, in rounds, each link once.

    Rounds are in one order on all ranks, and none has more than `MOST_MESSAGES` messages.
    """
    links = _connected_links(_summed(classes, num_ranks), num_ranks, rank)
    rounds = []
    for group in _windows(links, num_ranks, MOST_MESSAGES // 2):
        receivers, senders = _peers(group, rank)
        if receivers or senders:
            rounds.append((receivers, senders))
    return rounds


def connected(links: np.ndarray, num_ranks: int) -> np.ndarray:
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


def _summed(classes: Iterable[ClassLinks], num_ranks: int) -> np.ndarray:
    """Rows of (sender, receiver, elements), one for each link."""
    total = np.zeros(num_ranks * num_ranks, np.int64)
    for c in classes:
        pairs = c.links[:, 0] * num_ranks + c.links[:, 1]
        np.add.at(total, pairs, len(c.names) * c.sizes[c.links[:, 2]])
    pairs = np.flatnonzero(total)
    return np.stack([*np.divmod(pairs, num_ranks), total[pairs]], 1)


def _connected_links(links: np.ndarray, num_ranks: int, rank: int) -> np.ndarray:
    """The links among ranks that `rank` is connected with: others have rounds of their own."""
    nearest = connected(links, num_ranks)
    return links[nearest[links[:, 0]] == nearest[rank]]


# Which links share rounds


def _groups(links: np.ndarray, num_ranks: int, room: int) -> Iterator[tuple[np.ndarray, int, int]]:
    """Links that share rounds, the number of rounds, and the grain of their portions."""
    while len(links):
        rounds, _ = _num_rounds(links, num_ranks, room)
        small = links[:, 2] < rounds * (room // MOST_MESSAGES)
        if rounds == 1 or small.all():
            small[:] = False
        width = min(MOST_MESSAGES // 2, max(_PEERS, num_ranks // rounds))
        for group in _windows(links[~small], num_ranks, width):
            yield group, *_num_rounds(group, num_ranks, room)
        links = links[small]


def _windows(links: np.ndarray, num_ranks: int, width: int) -> Iterator[np.ndarray]:
    """Links in groups in which no rank has more than `MOST_MESSAGES`.

    Where one has more in all, the first group has the links from each rank to the next `width`. A
    distance occurs once among what a rank sends, and once among what it receives.
    """
    if _most_peers(links) <= MOST_MESSAGES // 2:
        yield from [links] * (len(links) > 0)
        return
    window = (links[:, 1] - links[:, 0]) % num_ranks // width
    for number in np.unique(window):
        yield links[window == number]


def _num_rounds(links: np.ndarray, num_ranks: int, room: int) -> tuple[int, int]:
    """The least number of rounds of a group, and the grain of its portions.

    A portion may exceed its share by less than the grain. Together the messages of a rank keep
    within `room`, or are of one element each where a rank has more of them.
    """
    load = int(max(np.bincount(links[:, side], links[:, 2]).max() for side in (0, 1)))
    if load <= room:
        return 1, 1
    messages = _most_peers(links)
    grain = max(1, room // (_PARTS * messages))
    return -(-load // max(1, room - messages * grain)), grain


def _most_peers(links: np.ndarray) -> int:
    """The largest number of ranks that one sends to, or receives from."""
    return max(int(np.bincount(links[:, side]).max(initial=0)) for side in (0, 1))


# What a rank itself sends and receives

_Key = tuple[tuple[int, tuple[int, ...]], ...]
"""What a link has: of each class the numbers of its boxes. Links of equal keys are cut once."""


def _keys(classes: Sequence[ClassLinks], rank: int, side: int) -> dict[int, _Key]:
    """What a rank sends (`side` 0) or receives (1), by peer."""
    boxes: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for number, c in enumerate(classes):
        for peer, box in c.links[c.links[:, side] == rank][:, [1 - side, 2]].tolist():
            boxes[peer][number].append(box)
    return {
        peer: tuple((number, tuple(ids)) for number, ids in by_class.items())
        for peer, by_class in boxes.items()
    }


def _portions(
    classes: Sequence[ClassLinks], key: _Key, rounds: int, grain: int
) -> list[tuple[Piece, ...]]:
    pieces = [
        Piece(name, classes[number].boxes[box])
        for number, boxes in key
        for name in classes[number].names
        for box in boxes
    ]
    return portions(pieces, rounds, grain)


def _peers(links: np.ndarray, rank: int) -> tuple[list[int], list[int]]:
    """The ranks that `rank` sends to, and those that it receives from, ascending."""
    receivers, senders = links[links[:, 0] == rank, 1], links[links[:, 1] == rank, 0]
    return sorted(receivers.tolist()), sorted(senders.tolist())


def _messages(
    links: Sequence[tuple[int, Sequence[tuple[Piece, ...]]]], number: int
) -> tuple[Message, ...]:
    return tuple(Message(peer, parts[number]) for peer, parts in links if parts[number])
