"""What differs between two arrays of 16-bit values, in few bytes: a lossless code.

After a step of training few values of a 16-bit format have changed, most of them to a neighbor
(SparseRL-Sync, arXiv 2605.07330; PULSE, 2602.03839). The code has the distances between them, and
each change in units of the last place. Values are compared and changed as bits, so that NaN and the
sign of zero come out as they are.

The arrays are coded in blocks of `BLOCK` values. In front stands the length of each block's bytes.
A block is one zlib stream: the number of changed values, that of the bytes of gaps, and

- gaps: the unchanged values before each changed one. A byte below 255 ends a gap, and each byte of
  255 before it adds 255;
- steps: a signed byte a changed value, in units of the last place, or -128;
- the values themselves of those whose step does not fit.

zlib writes Huffman codes alone: its search for repeats finds none that are worth their time, as
`make bench-sparse-push` measures.
"""

import zlib

import numpy as np

BLOCK = 1 << 20
"""Values that are coded at a time: what either side computes with at once is bounded."""
_MORE = 255
_LARGE = -128


def encode(before: np.ndarray, after: np.ndarray) -> np.ndarray | None:
    """The bytes that make `after` of `before`; all are flat, and values are uint16.

    None where they are no fewer than those of `after` itself.
    """
    blocks: list[bytes] = []
    num_bytes = 0
    for begin in range(0, after.size, BLOCK):
        block = _encoded(before[begin : begin + BLOCK], after[begin : begin + BLOCK])
        blocks.append(block)
        num_bytes += len(block) + 4
        if num_bytes >= after.nbytes:
            return None
    lengths = np.array([len(block) for block in blocks], "<u4")
    return np.frombuffer(b"".join([lengths.tobytes(), *blocks]), np.uint8)


def apply(data: np.ndarray, values: np.ndarray) -> None:
    """Change `values`, from which `data` was coded as `before`, in place.

    Raises ValueError for bytes that are no code for so many values; some may be changed by then.
    """
    begins = range(0, values.size, BLOCK)
    head = 4 * len(begins)
    lengths = np.frombuffer(data[: min(head, data.size // 4 * 4)].tobytes(), "<u4")
    ends = head + np.cumsum(lengths, dtype=np.int64)
    if len(ends) < len(begins) or ends[-1] != data.size:
        raise ValueError(f"{data.size} bytes are no changes of {values.size} values")
    for begin, length, end in zip(begins, lengths, ends, strict=True):
        _change(data[end - length : end], values[begin : begin + BLOCK])


def _encoded(before: np.ndarray, after: np.ndarray) -> bytes:
    """A block's bytes."""
    changed = np.flatnonzero(before != after)
    gaps, new = _gaps(changed), after[changed]
    steps = _ordered(new) - _ordered(before[changed])  # wraps around, there and back
    is_large = (steps <= _LARGE) | (steps > -_LARGE - 1)
    steps[is_large] = _LARGE
    counts = np.array([changed.size, gaps.size], "<u4")
    arrays = counts, gaps, steps.astype(np.int8), new[is_large].astype("<u2")
    coder = zlib.compressobj(level=1, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
    coded = []
    for array in arrays:  # each with a Huffman code of its own
        coded += [coder.compress(array.tobytes()), coder.flush(zlib.Z_BLOCK)]
    return b"".join([*coded, coder.flush()])


def _change(block: np.ndarray, values: np.ndarray) -> None:
    """Undo `_encoded`: change a block's values in place."""
    try:
        data = np.frombuffer(zlib.decompress(block.data), np.uint8)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    num_changed, num_gaps = (int(count) for count in data[:8].view("<u4"))
    gaps, steps, large = np.split(data[8:], [num_gaps, num_gaps + num_changed])
    changed, steps = _positions(gaps), steps.view(np.int8)
    is_large = steps == _LARGE
    if not (
        changed.size == steps.size == num_changed
        and large.size == 2 * np.count_nonzero(is_large)
        and (not num_changed or changed[-1] < values.size)
    ):
        raise ValueError(f"a block of {data.size} bytes is no change of {values.size} values")
    new = _ordered(_ordered(values[changed]) + steps).view(np.uint16)
    new[is_large] = np.frombuffer(large.tobytes(), "<u2")
    values[changed] = new


def _ordered(values: np.ndarray) -> np.ndarray:
    """Bits of 16-bit floats as integers in the order of the floats, or such integers as bits.

    Neighbors differ by 1, 0 and -0 too.
    """
    signed = values.view(np.int16)
    return signed ^ ((signed >> 15) & 0x7FFF)


def _gaps(positions: np.ndarray) -> np.ndarray:
    """Ascending positions as bytes of gaps."""
    more, last = np.divmod(np.diff(positions, prepend=-1) - 1, _MORE)
    ends = np.cumsum(more + 1)
    gaps = np.full(ends[-1] if ends.size else 0, _MORE, np.uint8)
    gaps[ends - 1] = last
    return gaps


def _positions(gaps: np.ndarray) -> np.ndarray:
    """The positions of `_gaps`."""
    ends = np.flatnonzero(gaps != _MORE)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)
