"""Records of finished samples in a file that only grows: one damaged record costs itself alone.

A record is a magic number, the lengths of its two parts, a CRC-32 of lengths and parts, then the
parts: a line of JSON, and the bytes of arrays that it describes. A process that is killed leaves a
part of its last record. Whoever reads passes over what has another sum, up to the next record.
"""

import json
import mmap
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"\x93hrl\x1arec"
_LENGTHS, _SUM = struct.Struct("<IQ"), struct.Struct("<I")
_HEAD = len(MAGIC) + _LENGTHS.size + _SUM.size
_FIELDS = "fields"


@dataclass(frozen=True, slots=True)
class RecordPlace:
    """The place of a whole record, in bytes of its file."""

    file: str
    start: int
    size: int


def prompt_sum(prompt_ids: Sequence[int]) -> int:
    """A checksum of a prompt's tokens, which a record may have."""
    return zlib.crc32(np.asarray(prompt_ids, np.int64).tobytes())


def encode(facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """A record of `facts`, in plain JSON types, and of arrays by name."""
    fields = [[name, array.dtype.str, array.shape] for name, array in arrays.items()]
    line = json.dumps({**facts, _FIELDS: fields}).encode()
    parts = [line, *(array.tobytes() for array in arrays.values())]
    lengths = _LENGTHS.pack(len(line), sum(map(len, parts)) - len(line))
    total = zlib.crc32(lengths)
    for piece in parts:
        total = zlib.crc32(piece, total)
    return b"".join([MAGIC, lengths, _SUM.pack(total), *parts])


def decode(record: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and the arrays of a whole record; raises ValueError for a damaged one."""
    size = _size_at(record, 0)
    if size is None or size != len(record):
        raise ValueError("a damaged record")
    facts, start = _facts(record, 0)
    arrays = {}
    for name, dtype, shape in facts.pop(_FIELDS):
        array = np.frombuffer(record, dtype, int(np.prod(shape)), start).reshape(shape)
        arrays[name] = array.copy()  # a tensor shares its memory, and may be written
        start += array.nbytes
    return facts, arrays


def read(place: RecordPlace) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and the arrays of the record at `place`; raises ValueError for a damaged one."""
    with Path(place.file).open("rb") as file:
        file.seek(place.start)
        record = file.read(place.size)
    try:
        return decode(record)
    except ValueError as error:
        raise ValueError(f"{place.file}, byte {place.start}: {error}") from None


def scan(file: Path) -> tuple[list[tuple[RecordPlace, dict[str, Any]]], list[str]]:
    """The whole records of a file with their facts, and a line for each damaged stretch."""
    records: list[tuple[RecordPlace, dict[str, Any]]] = []
    damaged: list[str] = []
    length = file.stat().st_size
    if not length:
        return records, damaged
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        position, wrong_from = 0, -1
        while position < length:
            size = _size_at(data, position)
            if size is None:  # the next record may begin at any byte: the lengths may be wrong, too
                wrong_from = position if wrong_from < 0 else wrong_from
                following = data.find(MAGIC, position + 1)
                position = length if following < 0 else following
                continue
            if wrong_from >= 0:
                damaged.append(_stretch(file, wrong_from, position))
                wrong_from = -1
            facts, _ = _facts(data, position)
            del facts[_FIELDS]
            records.append((RecordPlace(str(file), position, size), facts))
            position += size
        if wrong_from >= 0:
            damaged.append(_stretch(file, wrong_from, length))
    return records, damaged


def _stretch(file: Path, start: int, stop: int) -> str:
    return f"bytes {start} to {stop} of {file}"


def _size_at(data: Any, start: int) -> int | None:
    """The bytes of the record at `start`; None where there is no whole one with its sum."""
    begin = start + _HEAD
    if len(data) < begin or data[start : start + len(MAGIC)] != MAGIC:
        return None
    lengths = data[start + len(MAGIC) : begin - _SUM.size]
    size = sum(_LENGTHS.unpack(lengths))
    (wanted,) = _SUM.unpack(data[begin - _SUM.size : begin])
    if len(data) < begin + size:
        return None
    with memoryview(data) as whole, whole[begin : begin + size] as parts:
        is_whole = zlib.crc32(parts, zlib.crc32(lengths)) == wanted
    return _HEAD + size if is_whole else None


def _facts(data: Any, start: int) -> tuple[dict[str, Any], int]:
    """The facts of the whole record at `start`, and where its arrays begin."""
    begin = start + _HEAD
    length, _ = _LENGTHS.unpack(data[start + len(MAGIC) : begin - _SUM.size])
    facts: dict[str, Any] = json.loads(data[begin : begin + length])
    return facts, begin + length
