"""Files of rows: which ones a name means, and their rows."""

import bz2
import csv
import glob
import gzip
import io
import json
import logging
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.config.row_fields import WrittenNumber

log = logging.getLogger(__name__)

Row = dict[str, Any]
NumberedRows = Iterator[tuple[int, Row]]

ENDINGS = {
    SourceKind.jsonl: (".jsonl", ".json", ".ndjson"),
    SourceKind.csv: (".csv",),
    SourceKind.parquet: (".parquet",),
}
"""Names of files that are read where a folder is named."""
COMPRESSED = (".gz", ".zst", ".bz2", ".lz4")
_CODECS = {".zst": "zstd", ".lz4": "lz4"}
_OTHER_ARCHIVES = (".xz", ".zip", ".tar", ".tgz", ".7z", ".rar")


class UnreadableFile(Exception):
    """A file that is not what its source's kind says; the message says why."""


def read_files(key: str, source: SourceConfig) -> Iterator[tuple[str, Row]]:
    """Every row of a source's files, in order, and where it stands: `row 3 of part-2.jsonl`.

    Raises ConfigError for a name that means no file, and for a file that cannot be read.
    """
    files = files_of(key, source)
    for file in files:
        of_file = f" of {file.name}" if len(files) > 1 else ""
        try:
            for number, row in READERS[source.kind](file):
                yield f"row {number}{of_file}", row
        except UnreadableFile as error:
            reason = " ".join(str(error).split())[:400]
            raise ConfigError(f"{key}.name", str(file), reason) from error
        except (OSError, EOFError, zlib.error) as error:  # no right to read, a damaged archive
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())[:300]
            allowed = f"a {source.kind.value} file that can be read ({reason})"
            raise ConfigError(f"{key}.name", str(file), allowed) from error


def files_of(key: str, source: SourceConfig) -> list[Path]:
    """The files that a source names: a path, a pattern with `*`, a folder, or a list of these."""
    named = source.name if isinstance(source.name, list) else [source.name]
    files = [file for name in named for file in _files_of_name(key, source.kind, name)]
    if not files:
        raise ConfigError(f"{key}.name", source.name, "one file or more")
    counts = Counter(map(os.path.abspath, files))
    if twice := sorted(file for file, number in counts.items() if number > 1):
        raise ConfigError(f"{key}.name", source.name, f"each file once ({twice[0]})")
    return files


def _files_of_name(key: str, kind: SourceKind, name: Any) -> list[Path]:
    wanted = f"a {kind.value} file that exists, a pattern, a folder, or a list of these"
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{key}.name", name, wanted)
    path = Path(name).expanduser()
    try:
        is_there = path.exists()
    except OSError as error:  # a name that is too long, a folder without the right to look
        raise ConfigError(f"{key}.name", name, f"{wanted} ({error.strerror})") from None
    if path.is_dir():
        there = [file for file in sorted(path.rglob("*")) if _is_shown(file, path)]
        files = [file for file in there if _is_read(kind, file)]
        endings = ", ".join(f"*{ending}" for ending in ENDINGS[kind])
        if not files:
            raise ConfigError(f"{key}.name", name, f"a folder with files of {endings}")
        if others := [file.name for file in there if file not in files]:
            log.warning(
                "%s.name=%s: %d files are read, those of %s; %d others are not, such as %s",
                key, name, len(files), endings, len(others), others[0],
            )  # fmt: skip
        return files
    if is_there:
        return [path]
    if glob.has_magic(name):
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if files := [file for file in matches if file.is_file()]:
            return files
        raise ConfigError(f"{key}.name", name, f"a pattern that some {kind.value} file matches")
    raise ConfigError(f"{key}.name", name, wanted)


def _is_shown(file: Path, folder: Path) -> bool:
    """Whether a path below a folder is a file, and not hidden."""
    hidden = any(name.startswith(".") for name in file.relative_to(folder).parts)
    return file.is_file() and not hidden


def _is_read(kind: SourceKind, file: Path) -> bool:
    """Whether a file below a named folder is one of its rows' files."""
    name = file.name.lower()
    for ending in COMPRESSED:
        name = name.removesuffix(ending)
    return name.endswith(ENDINGS[kind])


def _opened(file: Path) -> IO[bytes]:
    """The bytes of a file, decompressed if its name says so."""
    ending = file.suffix.lower()
    if ending in _OTHER_ARCHIVES:
        raise UnreadableFile(f"a file without compression, or one of {', '.join(COMPRESSED)}")
    if ending == ".gz":
        return cast(IO[bytes], gzip.open(file))
    if ending == ".bz2":
        return cast(IO[bytes], bz2.open(file))
    if ending not in COMPRESSED:
        return file.open("rb")
    try:
        import pyarrow
    except ImportError:  # a bare machine
        allowed = "a file without compression, .gz or .bz2, or first: pip install pyarrow"
        raise UnreadableFile(allowed) from None
    stream: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(str(file), "rb"), _CODECS[ending])
    return io.BufferedReader(stream)


def _json(file: Path) -> NumberedRows:
    """JSON Lines, or one array. A row is numbered by its line, or its place in the array."""
    with _opened(file) as opened:
        is_first = True
        for number, line in enumerate(opened, 1):
            text = line.strip(b"\xef\xbb\xbf \t\r\n" if number == 1 else None)
            if is_first and text[:1] == b"[":
                yield from _array(line + opened.read())
                return
            if text:
                is_first = False
                yield number, _object(_parsed(line, f"line {number}"), f"line {number}")


def _array(text: bytes) -> NumberedRows:
    values = _parsed(text, "an array")
    if not isinstance(values, list):
        raise UnreadableFile("one JSON object a line, or one array of objects (line 1 has neither)")
    for number, value in enumerate(values, 1):
        yield number, _object(value, f"element {number}")


def _parsed(text: bytes, place: str) -> Any:
    try:
        return json.loads(text, parse_float=WrittenNumber)
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
        raise UnreadableFile(
            f"one JSON object a line, or one array of objects ({place}: {error})"
        ) from error


def _object(value: Any, place: str) -> Row:
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise UnreadableFile(f"one JSON object a line, or one array of objects ({place}: {kind})")
    return value


def _check_names(names: Sequence[str]) -> None:
    """Raise for a column that is there twice: one of both would be lost."""
    if twice := [name for name, number in Counter(names).items() if name and number > 1]:
        raise UnreadableFile(f"columns of different names ({twice[0]!r} is there twice)")


_LONGEST_CELL = 2**31 - 1
"""Bytes of a value of CSV: conversations have more than Python's 128 KiB."""


def _csv(file: Path) -> NumberedRows:
    csv.field_size_limit(_LONGEST_CELL)
    try:
        with io.TextIOWrapper(_opened(file), "utf-8-sig", newline="") as text:  # spreadsheets' mark
            reader = csv.DictReader(text, strict=True)
            _check_names(reader.fieldnames or ())
            for number, row in enumerate(reader, 1):
                if None in row or None in row.values():
                    wanted = f"{len(reader.fieldnames or ())} values a line"
                    raise csv.Error(f"line {reader.line_num} has not the header's {wanted}")
                yield number, dict(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise UnreadableFile(f"CSV with a header, in UTF-8 ({error})") from error


def _parquet(file: Path) -> NumberedRows:
    import pyarrow
    import pyarrow.parquet

    number = size = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            _check_names(opened.schema_arrow.names)
            for batch in opened.iter_batches():
                size = batch.num_rows
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except UnicodeDecodeError as error:
        place = f"rows {number + 1} to {number + size}" if size else "names of its columns"
        raise UnreadableFile(f"parquet whose texts are UTF-8 ({place}: {error})") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise UnreadableFile(f"parquet ({error})") from error


READERS: dict[SourceKind, Callable[[Path], NumberedRows]] = {
    SourceKind.jsonl: _json,
    SourceKind.csv: _csv,
    SourceKind.parquet: _parquet,
}
