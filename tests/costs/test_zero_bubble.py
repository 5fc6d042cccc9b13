"""The moments of a zero-bubble update, by hand on small numbers."""

from hybridrl.costs.zero_bubble import ChunkSizes, ZeroBubbleUpdate

# A received row, or its gradient, has 5 bytes.
SIZES = {
    "kept": 100, "between": 10, "first": 30, "second": 40, "gathered": 50,
    "gradients": 20, "sums": 40, "arriving": 8, "copied": 16, "reduced": 6,
}  # fmt: skip
FIRST = ChunkSizes(**SIZES, received=0, received_gradient=5)
LAST = ChunkSizes(**SIZES, received=5, received_gradient=0)
ORDER = "F0 F0 F1 I1 W1 F1 I1 W1 I0 W0 I0 W0"


def _moments() -> list[tuple[int, int, int]]:
    """Gathered weights, activations and gradients, in the order of stage 0 of 2."""
    order = [(word[0], int(word[1])) for word in ORDER.split()]
    return [tuple(sizes.values()) for sizes in ZeroBubbleUpdate((FIRST, LAST), order, 2).moments()]


def test_the_first_row_of_the_last_chunk() -> None:
    rows = 3 * 100 + 2 * 5  # a gradient has come, or a row, and one is on its way
    assert _moments()[:3] == [
        (100, rows + 30, 0),
        # Between the halves: more is kept, and the input's gradient.
        (100, rows + 10 + 5 + 40, 0),
        (100, 2 * 100 + 2 * 5, 20),
    ]


def test_a_second_row_makes_the_gradients_sums() -> None:
    rows = 3 * 100 + 2 * 5  # of the first row nothing is left
    assert _moments()[3:7] == [
        (100, rows + 30, 20),
        (100, rows + 10 + 5, 40 + 8),
        (100, rows + 10 + 5 + 40, 40),
        (100, 2 * 100 + 2 * 5, 40 + 20),
    ]


def test_a_chunk_is_reduced_after_its_last_row() -> None:
    ended = 2 * 5  # on their way, as far as the plan knows
    assert _moments()[7:] == [
        (50, 2 * 100 + ended, 40 + 16),
        # The first chunk's whole backward pass.
        (50, 2 * 100 + ended + 40, 6),
        (50, 100 + ended, 6 + 40 + 8),
        (50, 100 + ended + 40, 6 + 40),
        (50, ended, 6 + 40 + 8),
        (0, ended, 6 + 40 + 16),
    ]
