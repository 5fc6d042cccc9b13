"""Boxes: half-open index ranges, one a dimension, the unit of every plan that moves weights.

A plan of 512 ranks has millions of them, so what each is asked for is written without generators.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import le, sub


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """Elements `start[d] <= index[d] < stop[d]` of a tensor; a scalar's box has no dimension.

    Example: rows 2 and 3 of a [4, 8] matrix are `Box((2, 0), (4, 8))`.
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent by dimension."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(map(sub, self.stop, self.start))

    def intersect(self, other: "Box") -> "Box | None":
        """The common elements; None if there are none."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(int.__lt__, start, stop)) else None

    def contains(self, other: "Box") -> bool:
        """Whether the elements of `other` are all in this box."""
        return all(map(le, self.start, other.start)) and all(map(le, other.stop, self.stop))

    def narrow(self, dim: int, start: int, stop: int) -> "Box":
        """The sub-box with indices `start` to `stop` along `dim`."""
        return Box(
            (*self.start[:dim], start, *self.start[dim + 1 :]),
            (*self.stop[:dim], stop, *self.stop[dim + 1 :]),
        )

    def run(self, start: int, stop: int) -> Iterator["Box"]:
        """Boxes that together are the elements `start` to `stop` in row-major order.

        Example: elements 1 to 10 of rows of four are the end of the first row, the second row, and
        the beginning of the third.
        """
        if stop - start == self.size or start >= stop:
            yield from [self] * (start < stop)
            return
        dim = next(dim for dim, extent in enumerate(self.shape) if extent > 1)
        row, low = self.size // self.shape[dim], self.start[dim]

        def inside(index: int, start: int, stop: int) -> Iterator[Box]:
            return self.narrow(dim, low + index, low + index + 1).run(start, stop)

        first, last = -(-start // row), stop // row  # whole rows
        if first > last:
            yield from inside(last, start % row, stop % row)
            return
        if start % row:
            yield from inside(first - 1, start % row, row)
        if first < last:
            yield self.narrow(dim, low + first, low + last)
        if stop % row:
            yield from inside(last, 0, stop % row)

    def slices(self, origin: "Box | None" = None) -> tuple[slice, ...]:
        """Index of the box in a tensor that holds `origin` (by default, the whole tensor)."""
        if origin is None:
            return tuple(map(slice, self.start, self.stop))
        low, high = map(sub, self.start, origin.start), map(sub, self.stop, origin.start)
        return tuple(map(slice, low, high))


def cut(boxes: Sequence[Box], dim: int, index: int, parts: int) -> tuple[Box, ...]:
    """Shard `index` of `parts` of a rank's tensor, in chunks of ceil(extent / parts) along `dim`.

    The rank's tensor concatenates its boxes. FSDP2 cuts the local tensor of a tensor-parallel rank,
    and so does this. Boxes that differ along `dim` are cut as one row, others each alike. Chunks at
    the end may be smaller, or empty.
    """
    if not boxes:
        return ()
    ranges = [(box.start[dim], box.stop[dim]) for box in boxes]
    if len(set(ranges)) == 1:
        start, stop = _chunk(ranges[0][1] - ranges[0][0], index, parts)
        low = ranges[0][0]
        pieces = [box.narrow(dim, low + start, low + stop) for box in boxes]
    else:
        start, stop = _chunk(sum(high - low for low, high in ranges), index, parts)
        pieces = list(_cut_row(boxes, dim, start, stop))
    return tuple(piece for piece in pieces if piece.size)


def _cut_row(boxes: Sequence[Box], dim: int, start: int, stop: int) -> Iterator[Box]:
    passed = 0
    for box in boxes:
        low, extent = box.start[dim], box.shape[dim]
        first, last = max(start - passed, 0), min(stop - passed, extent)
        if first < last:
            yield box.narrow(dim, low + first, low + last)
        passed += extent


def _chunk(extent: int, index: int, parts: int) -> tuple[int, int]:
    size = -(-extent // parts)
    return min(index * size, extent), min((index + 1) * size, extent)
