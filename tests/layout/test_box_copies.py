"""Boxes copied together: as many bytes at the same places, in few calls."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

from hybridrl.layout.box import Box
from hybridrl.layout.box_copies import PackedBox, copy_all, joined, packed_boxes
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.portions import Piece


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The names of copying calls, one entry each."""
    calls: list[str] = []
    copy, together = torch.Tensor.copy_, torch._foreach_copy_

    def one(to: torch.Tensor, source: torch.Tensor) -> Any:
        calls.append("one")
        return copy(to, source)

    def many(*lists: Any) -> None:
        calls.append(f"{len(lists[0])} together")
        together(*lists)

    with (
        mock.patch.object(torch.Tensor, "copy_", one),
        mock.patch.object(torch, "_foreach_copy_", many),
    ):
        yield calls


def from_ranks(shape: tuple[int, ...], dim: int, count: int) -> list[Piece]:
    """The parts of a tensor that come from `count` ranks, which cut it along `dim`."""
    whole, each = Box.whole(shape), shape[dim] // count
    return [Piece("w", whole.narrow(dim, i * each, (i + 1) * each)) for i in range(count)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("gap", [0, 5])
def test_parts_from_all_ranks_are_one_copy(dim: int, gap: int) -> None:
    """Rows of ranks at a distance in the bucket, as an all-gather of more parameters has them."""
    shape, count, start = (8, 12), 4, 3
    local = {"w": LocalTensor((Box.whole(shape),))}
    boxes: list[PackedBox] = []
    for piece in from_ranks(shape, dim, count):
        boxes += packed_boxes([piece], local, start)
        start += piece.box.size + gap
    (box,) = joined(boxes)
    assert box.count == count
    row, tensors = torch.randn(start), {"w": torch.zeros(shape)}
    wanted = torch.zeros(shape)
    for single in boxes:
        wanted[single.index] = row[single.start :][: single.shape[0] * single.shape[1]].view(
            single.shape
        )
    with counted_calls() as calls:
        copy_all([(box.in_tensor(tensors), box.in_row(row))])
    assert torch.equal(tensors["w"], wanted)
    assert len(calls) == 1


def test_a_gap_ends_what_is_joined() -> None:
    """The rank's own part does not come; two boxes are too few to be worth a view of both."""
    pieces = from_ranks((16,), 0, 8)
    local = {"w": LocalTensor((Box.whole((16,)),))}
    boxes = [
        box
        for number, piece in enumerate(pieces)
        if number != 2
        for box in packed_boxes([piece], local, 100 * number)
    ]
    assert [box.count for box in joined(boxes)] == [1, 1, 5]
    row, tensors = torch.randn(900), {"w": torch.zeros(16)}
    copy_all((box.in_tensor(tensors), box.in_row(row)) for box in joined(boxes))
    for number in range(8):
        filled = tensors["w"][2 * number : 2 * number + 2]
        assert torch.equal(filled, row[100 * number :][:2] if number != 2 else torch.zeros(2))


def test_boxes_at_unequal_distances_stay_apart() -> None:
    local = {"w": LocalTensor((Box.whole((16,)),))}
    starts = [0, 10, 20, 35, 50, 65, 80]
    boxes = [
        box
        for start, piece in zip(starts, from_ranks((14,), 0, 7), strict=True)
        for box in packed_boxes([piece], local, start)
    ]
    together = joined(boxes)
    assert [box.count for box in together] == [1, 1, 1, 4]
    assert all(one.start < other.start for one, other in pairwise(together))


def test_contiguous_pairs_are_one_call_for_each_dtype() -> None:
    draw = torch.Generator().manual_seed(0)
    sources = [torch.randn(3, 1, 4, generator=draw) for _ in range(5)]
    sources += [torch.randn(2, 2, generator=draw).double() for _ in range(4)]
    strided = torch.randn(4, 6, generator=draw)[:, 1:3]
    pairs = [(torch.zeros(s.shape, dtype=torch.bfloat16), s) for s in [*sources, strided]]
    with counted_calls() as calls:
        copy_all(pairs)
    assert calls[:3] == ["one", "5 together", "4 together"]
    for to, source in pairs:
        assert torch.equal(to, source.to(torch.bfloat16))
    copy_all([])
