"""Boxes taken apart in row-major order, and pieces cut into portions."""

from itertools import product
from math import prod

import pytest

from hybridrl.layout.box import Box
from hybridrl.layout.portions import Piece, portions

BOXES = [
    Box((), ()),
    Box((2,), (9,)),
    Box((1, 3), (4, 7)),
    Box((1, 0), (2, 5)),
    Box((2, 1, 3), (4, 4, 5)),
    Box((0, 0, 0), (3, 1, 4)),
]


def elements(box: Box) -> list[tuple[int, ...]]:
    """The indices of a box, in row-major order."""
    return list(product(*map(range, box.start, box.stop)))


@pytest.mark.parametrize("box", BOXES)
def test_a_run_has_its_elements_in_order_in_few_boxes(box: Box) -> None:
    whole = elements(box)
    for start in range(box.size + 1):
        for stop in range(start, box.size + 1):
            boxes = list(box.run(start, stop))
            assert [index for portion in boxes for index in elements(portion)] == whole[start:stop]
            assert len(boxes) <= max(1, 2 * len(box.shape) - 1)


@pytest.mark.parametrize("grain", [1, 2, 3, 4, 8, 1000])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_portions(count: int, grain: int) -> None:
    pieces = [Piece(str(number), box) for number, box in enumerate(BOXES)]
    size = sum(box.size for box in BOXES)
    parts = portions(pieces, count, grain)
    assert len(parts) == count
    in_portions = [
        (piece.name, i) for portion in parts for piece in portion for i in elements(piece.box)
    ]
    assert in_portions == [(piece.name, i) for piece in pieces for i in elements(piece.box)]
    for portion in parts:
        assert sum(piece.box.size for piece in portion) <= -(-size // count) + grain - 1


def test_rows_up_to_the_grain_stay_whole() -> None:
    parts = portions([Piece("experts", Box((0, 0, 0), (4, 6, 5)))], 7, grain=5)
    assert {piece.box.shape[-1] for portion in parts for piece in portion} == {5}
    parts = portions([Piece("experts", Box((0, 0, 0), (4, 6, 5)))], 7, grain=4)
    assert min(piece.box.shape[-1] for portion in parts for piece in portion) < 5


def test_pieces_of_equal_shapes_are_cut_alike() -> None:
    one = [Piece("a", Box((0, 0), (3, 4))), Piece("b", Box((5,), (8,)))]
    other = [Piece("a", Box((3, 4), (6, 8))), Piece("c", Box((0,), (3,)))]
    cut = [portions(pieces, 4, grain=4) for pieces in (one, other)]
    shapes = [[[piece.box.shape for piece in portion] for portion in parts] for parts in cut]
    assert shapes[0] == shapes[1]
    assert sum(prod(shape) for portion in shapes[0] for shape in portion) == 15


def test_nothing_has_empty_portions() -> None:
    assert portions([], 3) == [(), (), ()]
