"""Records in a file that only grows: whatever is damaged costs the records that it touches."""

from pathlib import Path

import numpy as np
import pytest

from hybridrl.checkpoint.sample_records import MAGIC, decode, encode, read, scan

ARRAYS = {
    "tokens": np.arange(7),
    "log_probs": np.linspace(-1, 0, 4, dtype=np.float32),
    "experts": np.arange(24, dtype=np.uint8).reshape(6, 2, 2),
    "none": np.zeros(0, np.int32),
}


def record(number: int) -> bytes:
    return encode({"number": number, "text": "é" * number}, ARRAYS)


def numbers(file: Path) -> list[int]:
    return [facts["number"] for _, facts in scan(file)[0]]


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"".join(map(record, range(3))))
    records, damaged = scan(file)
    assert damaged == []
    assert [facts for _, facts in records] == [{"number": n, "text": "é" * n} for n in range(3)]
    facts, arrays = read(records[2][0])
    assert facts["number"] == 2
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert arrays[name].dtype == array.dtype
        assert arrays[name].flags.writeable
        np.testing.assert_array_equal(arrays[name], array)


def test_any_flipped_byte_costs_its_record_alone(tmp_path: Path) -> None:
    """In the magic number, in lengths, sum, facts and arrays: every byte of the middle record."""
    file, one = tmp_path / "file", record(1)
    before, after = record(0), record(2)
    for place in range(len(one)):
        for bit in (0, 7):
            wrong = bytearray(one)
            wrong[place] ^= 1 << bit
            file.write_bytes(before + wrong + after)
            assert numbers(file) == [0, 2], place
            stop = len(before) + len(one)
            assert scan(file)[1] == [f"bytes {len(before)} to {stop} of {file}"]


def test_a_file_that_is_cut_costs_its_last_record_alone(tmp_path: Path) -> None:
    """It goes on after the cut, as that of a rank whose disk was full for a while."""
    file, one = tmp_path / "file", record(1)
    for length in range(1, len(one)):
        file.write_bytes(record(0) + one[:length])
        assert numbers(file) == [0]
        assert len(scan(file)[1]) == 1
        file.write_bytes(record(0) + one[:length] + record(2))
        assert numbers(file) == [0, 2]
    file.write_bytes(b"")
    assert scan(file) == ([], [])


def test_a_magic_number_among_the_tokens_begins_no_record(tmp_path: Path) -> None:
    file = tmp_path / "file"
    inner = np.frombuffer(MAGIC + record(5) + MAGIC, np.uint8)
    whole = encode({"number": 1}, {"bytes": inner})
    file.write_bytes(whole + record(2))
    assert numbers(file) == [1, 2]
    file.write_bytes(whole[:-1])  # what is inside of it is a whole record: the price of resuming
    assert numbers(file) == [5]


def test_a_record_that_has_changed_since_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(record(0) + record(1))
    place = scan(file)[0][1][0]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ValueError, match=rf"{file}, byte {place.start}: a damaged record"):
        read(place)
    with pytest.raises(ValueError, match="a damaged record"):
        decode(record(0) + record(1))
