"""Files of a run are strict JSON, and whole again after a writer that was cut off."""

import json
import math
from enum import Enum, IntEnum, StrEnum
from pathlib import Path

import numpy as np
import pytest

from hybridrl.telemetry.records import JsonLines, dump, read_lines, write_atomic


class Color(Enum):
    red = "red"


def strict(text: str) -> object:
    """Parse JSON, refusing the NaN and Infinity that Python's parser takes by default."""

    def refuse(name: str) -> float:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_numbers_that_are_not_finite_come_back() -> None:
    record = {"a": math.nan, "b": [math.inf, -math.inf], "c": 1.5, "d": np.float32("nan")}
    back = strict(dump(record))
    assert back == {"a": "NaN", "b": ["Infinity", "-Infinity"], "c": 1.5, "d": "NaN"}
    assert isinstance(back, dict)
    assert math.isnan(float(back["a"]))
    assert float(back["b"][1]) == -math.inf


def test_values_of_other_libraries_become_plain() -> None:
    record = {"n": np.int64(3), "v": np.arange(2), "e": Color.red, "p": Path("/x"), 7: (1, None)}
    assert strict(dump(record)) == {"n": 3, "v": [0, 1], "e": "red", "p": "/x", "7": [1, None]}


class Spelled(StrEnum):
    one = "1st"


class Numbered(IntEnum):
    two = 2


class Kind(Enum):
    three = "3rd"


@pytest.mark.parametrize(
    "key", [True, False, None, 3, -1.5, "text", Spelled.one, Numbered.two, Kind.three, (1, 2)]
)
def test_keys_are_written_alike_in_every_record(key: object) -> None:
    """A number that is not finite has all of a record written another way."""
    alone = json.loads(dump({"of": {key: 1}}))
    with_infinity = json.loads(dump({"of": {key: 1}, "loss": math.inf}))
    assert alone["of"] == with_infinity["of"]


def test_text_of_any_kind_stays_on_one_line(tmp_path: Path) -> None:
    texts = ["a\nb\r\u2028c", "\x00\x1b[31m", "\udcff", "é漢🙂"]
    lines = JsonLines(tmp_path / "x.jsonl")
    for text in texts:
        lines.append({"text": text})
    lines.close()
    assert (tmp_path / "x.jsonl").read_bytes().count(b"\n") == len(texts)
    assert [row["text"] for row in read_lines(tmp_path / "x.jsonl")] == [*texts[:2], "?", texts[3]]


@pytest.mark.parametrize("cut", [1, 9, 10, 11, 19])
def test_a_partial_last_line_is_cut_when_the_file_is_opened_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": 22}\n'[:cut])
    whole = [1] if 9 <= cut < 19 else [1, 22] if cut == 19 else []
    lines = JsonLines(path)
    lines.append({"a": 3})
    lines.close()
    assert [strict(line)["a"] for line in path.read_text().splitlines()] == [*whole, 3]  # type: ignore[index]


def test_a_partial_line_longer_than_any_buffer_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n{"a": "' + "x" * 200_000)
    lines = JsonLines(path)
    lines.append({"a": 2})
    lines.close()
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n'


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_atomic(path, "old")
    with pytest.raises(TypeError):
        write_atomic(path, b"not text")  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
