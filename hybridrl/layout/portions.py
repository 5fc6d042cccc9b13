"""Portions: pieces of parameters in one row, cut into parts of about equal size. Pure data."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from hybridrl.layout.box import Box


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a parameter."""

    name: str
    box: Box


def portions(pieces: Sequence[Piece], count: int, grain: int = 1) -> list[tuple[Piece, ...]]:
    """`count` parts of the pieces, in their order; parts may be empty.

    Part k of n has the elements k/n to (k + 1)/n. Where rows of a box, or rows of its rows, have at
    most `grain` elements, a cut moves back to the beginning of one. So a part has at most
    ceil(elements / n) + grain - 1 elements. Pieces of equal shapes are cut alike.
    """
    if count == 1:
        return [tuple(pieces)]
    ends = list(accumulate(piece.box.size for piece in pieces))
    total = ends[-1] if ends else 0
    cuts = [_cut(pieces, ends, number * total // count, grain) for number in range(count)]
    return [tuple(_between(pieces, *places)) for places in pairwise([*cuts, (len(pieces), 0)])]


_Place = tuple[int, int]
"""A piece's number, and elements of it."""


def _cut(pieces: Sequence[Piece], ends: Sequence[int], position: int, grain: int) -> _Place:
    """The last place at or before a position where the pieces may be cut."""
    number = bisect_right(ends, position)
    if number == len(pieces):
        return number, 0
    inside = position - (ends[number - 1] if number else 0)
    unit = 1
    for extent in reversed(pieces[number].box.shape):
        if unit * extent > grain:
            break
        unit *= extent
    return number, inside - inside % unit


def _between(pieces: Sequence[Piece], start: _Place, stop: _Place) -> Iterator[Piece]:
    """The pieces from one place to another."""
    (first, skipped), (last, taken) = start, stop
    for number in range(first, last + (taken > 0)):
        piece = pieces[number]
        low = skipped if number == first else 0
        high = taken if number == last else piece.box.size
        for box in piece.box.run(low, high):
            yield piece if box is piece.box else Piece(piece.name, box)
