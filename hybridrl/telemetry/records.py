"""Files of a run that are whole at any moment: JSON lines, and small files replaced at once.

Invariants, also when the writer is killed between any two instructions:
1. every line of a `.jsonl` file but possibly the last is one JSON object;
2. opening such a file again cuts a partial last line, so that invariant 1 still holds;
3. a file written with `write_atomic` has its old text or its new one, never a mixture.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

TEXTS = ("prompt", "response")
"""The texts in a line of samples.jsonl; null where they were lost with their instance."""


def with_lost_texts(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A line of samples.jsonl for people, who could not tell a lost text from an empty one."""
    lost = [name for name in TEXTS if sample.get(name, "") is None]
    return {**sample, **dict.fromkeys(lost, "(lost with its instance)")}


def plain(value: Any) -> Any:
    """`value` as strict JSON knows it.

    Numbers that are not finite become the strings "NaN", "Infinity" and "-Infinity", which
    `float()` and JavaScript's `Number()` read back. Zero-dimensional arrays become numbers, enums
    their values, anything else its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and torch, without importing either
        return plain(value.tolist())
    return str(value)


def _key(key: Any) -> str:
    """The key of a mapping as `json.dumps` writes it; of a type that it refuses, the text."""
    if isinstance(key, str):
        return str.__str__(key)  # of an enum that is a text, its value
    return json.dumps(key) if key is None or isinstance(key, bool) else str(key)


def dump(record: Mapping[str, Any]) -> str:
    """`record` as one line of strict JSON, without the line's end."""
    try:
        return json.dumps(record, allow_nan=False, ensure_ascii=False, default=plain)
    except (TypeError, ValueError):  # keys that are no text, or numbers that are not finite
        return json.dumps(plain(record), allow_nan=False, ensure_ascii=False)


class JsonLines:
    """An append-only file of JSON objects, one a line; every append is one write to the kernel.

    Raises `OSError`, with its path, when the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        _cut_partial_line(self._fd)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write `record` as the next line."""
        # A lone surrogate, which broken model output may hold, has no UTF-8 form.
        with named(self.path):
            write_all(self._fd, (dump(record) + "\n").encode("utf-8", "replace"))

    def close(self) -> None:
        """Close the file; appended lines are already with the kernel."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_lines(path: Path, size: int | None = None) -> list[dict[str, Any]]:
    """The objects of a `.jsonl` file in order; none if it is missing, no line that is not whole.

    With `size`, those of its first so many bytes.
    """
    if not path.is_file():
        return []
    records = []
    for line in path.read_bytes()[:size].decode("utf-8", "replace").split("\n"):
        record = parse(line)
        if isinstance(record, dict):
            records.append(record)
    return records


def parse(text: str) -> Any:
    """The JSON value of `text`, or None where a writer was cut off."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def write_atomic(path: Path, text: str) -> None:
    """Replace the file at `path` by `text` in one step."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with named(path):
            partial.write_text(text, "utf-8", errors="replace")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Replace the file at `path` by `record` as indented JSON, in one step."""
    write_atomic(path, json.dumps(plain(record), indent=2, allow_nan=False) + "\n")


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Give an `OSError` of a write, which knows but a number of the file, the file's path."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_all(fd: int, data: bytes, offset: int | None = None) -> None:
    """Write all of `data`, appended or at `offset`; raises `OSError` if it does not fit."""
    while data:
        written = os.write(fd, data) if offset is None else os.pwrite(fd, data, offset)
        data = data[written:]
        if offset is not None:
            offset += written


def _cut_partial_line(fd: int) -> None:
    end = os.fstat(fd).st_size
    tail = b""
    while end > 0 and b"\n" not in tail:
        start = max(0, end - 65536)
        tail = os.pread(fd, end - start, start)
        keep = start + tail.rfind(b"\n") + 1
        os.ftruncate(fd, keep)
        end = start
