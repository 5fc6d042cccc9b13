"""The code for changed 16-bit values: what comes out is what went in, bit for bit."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from hybridrl.layout import sparse_bytes
from hybridrl.layout.sparse_bytes import apply, encode

PATTERNS = np.arange(2**16, dtype=np.uint16)


def bits(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.int16).numpy().view(np.uint16)


def round_trip(before: np.ndarray, after: np.ndarray) -> int:
    """Check that the code makes `after` of `before`; its bytes."""
    data = encode(before, after)
    assert data is not None
    values = before.copy()
    apply(data, values)
    assert np.array_equal(values, after)
    return data.size


def spread(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs among twenty times as many values that do not change."""
    pairs = []
    for values in (before, after):
        among = np.zeros((values.size, 21), np.uint16)
        among[:, 7] = values
        pairs.append(among.ravel())
    return pairs[0], pairs[1]


@pytest.fixture(params=[1 << 20, 1000])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sparse_bytes, "BLOCK", request.param)
    return request.param


CHANGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the next": lambda x: x + np.uint16(1),
    "the one before": lambda x: x - np.uint16(1),
    "the other sign": lambda x: x ^ np.uint16(0x8000),
    "zero": np.zeros_like,
    "not a number": lambda x: np.full_like(x, 0x7FC1),
    "shuffled": np.random.default_rng(0).permutation,
    "129 before": lambda x: x - np.uint16(129),
    "127 after": lambda x: x + np.uint16(127),
    "128 after": lambda x: x + np.uint16(128),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_bit_pattern_comes_out(block: int, change: str) -> None:
    """Whatever the format: a value is its 16 bits."""
    round_trip(*spread(PATTERNS, CHANGES[change](PATTERNS)))


def test_every_step_comes_out() -> None:
    """Steps of all sizes, from values of both signs."""
    for start in (0, 1, 0x3C00, 0x7F80, 0x7FFF, 0x8000, 0x8001, 0xBC00, 0xFFFF):
        round_trip(*spread(np.full_like(PATTERNS, start), PATTERNS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.01, 0.3])
def test_random_changes_come_out(block: int, dtype: torch.dtype, share: float) -> None:
    """Gaps of every kind; bytes follow the number of changes."""
    generator = torch.Generator().manual_seed(int(share * 1e4))
    before = (torch.randn(100_003, generator=generator) * 0.04).to(dtype)
    changed = torch.rand(before.shape, generator=generator) < share
    more = torch.where(torch.rand(before.shape, generator=generator) < 0.5, 1, -1)
    after = before.view(torch.int16) + (more * changed).to(torch.int16)
    size = round_trip(bits(before), bits(after))
    blocks = -(-before.numel() // block)
    assert size <= 2.2 * int(changed.sum()) + before.numel() / 255 + 40 * blocks


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 9_998])
def test_gaps_around_a_byte(gap: int) -> None:
    before = np.zeros(10_000, np.uint16)
    after = before.copy()
    after[[0, gap + 1]] = 7
    assert round_trip(before, after) < 40 + gap / 255
    assert round_trip(before[1:], after[1:]) < 40 + gap / 255


def test_equal_arrays_are_a_few_bytes() -> None:
    assert round_trip(PATTERNS, PATTERNS) < 40


def test_what_is_smaller_whole_has_no_code(block: int) -> None:
    random = np.random.default_rng(1)
    before, after = random.integers(0, 2**16, (2, 5000), np.uint16)
    assert encode(before, after) is None
    assert encode(before[:1], after[:1]) is None


def test_bytes_that_are_no_code_change_nothing_outside() -> None:
    """Cut, lengthened, of another size: an error. So is a flipped bit that means something."""
    before, after = spread(PATTERNS[:2000], PATTERNS[1:2001])
    data = encode(before, after)
    assert data is not None
    for wrong in (data[:0], data[:3], data[:-1], np.append(data, data[-1:])):
        with pytest.raises(ValueError, match="no changes"):
            apply(wrong, before.copy())
    for size in (before.size - 1000, 1):
        with pytest.raises(ValueError, match="is no change"):
            apply(data, before[:size].copy())
    num_errors = 0
    for position in range(data.size):
        flipped = data.copy()
        flipped[position] ^= 1 << position % 8
        values = before.copy()
        try:
            apply(flipped, values)
        except ValueError:
            num_errors += 1
        else:
            assert np.array_equal(values, after)  # zlib fills its last byte with bits of no meaning
    assert num_errors >= data.size - 2
