"""Copies between tensors of a rank and the row of a bucket, many in one call.

A call of torch takes longer than most boxes do. So boxes at equal distances, both in the tensor and
in the row, are copied as one (`joined`). Such are the parts of a norm that come from all ranks. All
that is contiguous goes into one call (`copy_all`).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from hybridrl.layout.local import LocalTensor
from hybridrl.layout.portions import Piece

_FEWEST = 4
"""Boxes that are copied as one: the views of fewer cost as much as they save."""


@dataclass(frozen=True, slots=True)
class PackedBox:
    """A box of a rank's tensor in a row, or `count` of them at equal distances.

    `index` is that of all boxes in the tensor, in which they follow each other along `dim`. `shape`
    is that of one. In the row the first is at `start`, and each other one `step` further.
    """

    name: str
    index: tuple[slice, ...]
    shape: tuple[int, ...]
    start: int
    count: int = 1
    dim: int = 0
    step: int = 0

    def in_tensor(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The boxes in the rank's tensor: [count, *shape], of one box `shape`."""
        boxes = tensors[self.name][self.index]
        if self.count == 1:
            return boxes
        parted = boxes.unflatten(self.dim, (self.count, self.shape[self.dim]))
        return parted.movedim(self.dim, 0)

    def in_row(self, row: torch.Tensor) -> torch.Tensor:
        """The boxes in the row: [count, *shape], of one box `shape`."""
        size = prod(self.shape)
        if self.count == 1:
            return row[self.start : self.start + size].view(self.shape)
        boxes = row.as_strided(
            (self.count, size), (self.step, 1), row.storage_offset() + self.start
        )
        return boxes.unflatten(1, self.shape)


def packed_boxes(
    pieces: Iterable[Piece], local: Mapping[str, LocalTensor], start: int = 0
) -> list[PackedBox]:
    """The pieces in a row, one after another from `start`."""
    boxes = []
    for piece in pieces:
        index, shape = local[piece.name].slices(piece.box), piece.box.shape
        boxes.append(PackedBox(piece.name, index, shape, start))
        start += prod(shape)
    return boxes


def joined(boxes: Iterable[PackedBox]) -> list[PackedBox]:
    """Return all boxes, with those at equal distances joined into one."""
    alike: dict[tuple[str, tuple[int, ...]], list[PackedBox]] = defaultdict(list)
    for box in boxes:
        alike[box.name, box.shape].append(box)
    return [box for group in alike.values() for box in _joined(group)]


def copy_all(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy, for each pair, the second tensor into the first, and cast it.

    All contiguous pairs go into one call for each dtype: torch has a kernel for many of these.
    """
    batches: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for to, source in copies:
        if to.is_contiguous() and source.is_contiguous():
            tos, sources = batches.setdefault(source.dtype, ([], []))
            tos.append(to.view(-1))  # torch wants equal strides, also of dimensions of size 1
            sources.append(source.view(-1))
        else:
            to.copy_(source)
    for tos, sources in batches.values():
        torch._foreach_copy_(tos, sources)


def _joined(boxes: Sequence[PackedBox]) -> Iterator[PackedBox]:
    """Boxes of one tensor and shape, joined where they follow each other."""
    run: list[PackedBox] = []
    distance: tuple[int, int] | None = None
    for box in boxes:
        next_distance = _distance(run[-1], box) if run else None
        if run and (next_distance is None or distance not in (None, next_distance)):
            yield from _as_one(run, distance)
            run, next_distance = [], None
        run.append(box)
        distance = next_distance
    yield from _as_one(run, distance)


def _distance(box: PackedBox, after: PackedBox) -> tuple[int, int] | None:
    """The dimension along which one box follows another, and the distance in the row."""
    differ = [
        dim
        for dim, sides in enumerate(zip(box.index, after.index, strict=True))
        if sides[0] != sides[1]
    ]
    if len(differ) != 1 or after.index[differ[0]].start != box.index[differ[0]].stop:
        return None
    return differ[0], after.start - box.start


def _as_one(run: Sequence[PackedBox], distance: tuple[int, int] | None) -> Iterator[PackedBox]:
    if distance is None or len(run) < _FEWEST:
        yield from run
        return
    dim, step = distance
    first, index = run[0], list(run[0].index)
    index[dim] = slice(first.index[dim].start, run[-1].index[dim].stop)
    yield PackedBox(first.name, tuple(index), first.shape, first.start, len(run), dim, step)
