"""Sources of questions: each yields rows, plain dicts with `question` and `answer`.

Generated sources (reasoning_gym, function) are endless: rows are drawn until there are enough
distinct prompts. File sources (jsonl, csv, parquet, huggingface) yield all their rows.
"""

import csv
import difflib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.config.dotted import load_function
from hybridrl.config.patterns import compiled, last_match
from hybridrl.config.reasoning import import_reasoning_gym

Row = dict[str, Any]

GENERATED = frozenset({SourceKind.reasoning_gym, SourceKind.function})


def rows(key: str, source: SourceConfig, seed: int, chunk: int) -> Iterator[Row]:
    """Every row of `source`; `key` is its config key, for error messages.

    `chunk` is the number of rows of a generated source per call. Raises ConfigError for a missing
    name, parameter, file or column.
    """
    if source.kind is SourceKind.reasoning_gym:
        return _reasoning_gym(key, source, seed, chunk)
    if source.kind is SourceKind.function:
        return _function(key, source, seed)
    return _with_columns(key, source, READERS[source.kind](key, source))


def _reasoning_gym(key: str, source: SourceConfig, seed: int, chunk: int) -> Iterator[Row]:
    first = source.params.get("seed", seed)
    params = {k: v for k, v in source.params.items() if k != "seed"}
    bare = SourceConfig(kind=source.kind, name=source.name, params=params)
    # Item i of a dataset is made from seed + i, so a new chunk continues the last.
    for start in itertools.count(0, chunk):
        dataset = _reasoning_gym_dataset(key, bare, first + start, chunk)
        for index in range(chunk):
            try:
                yield dataset[index]
            except Exception as error:  # more than a hundred generators, each with its own
                raise ConfigError(
                    f"{key}.params",
                    source.params,
                    f"parameters with which {source.name} makes items ({_one_line(error)})",
                ) from error


def _reasoning_gym_dataset(key: str, source: SourceConfig, seed: int, size: int) -> Any:
    """The reasoning_gym dataset that `source` names, a `ProceduralDataset` of `size` items.

    Raises ConfigError for an unknown name (with the near ones) and for parameters it refuses.
    """
    reasoning_gym = import_reasoning_gym()  # a second, which runs without it need not pay
    from reasoning_gym.factory import DATASETS

    if source.name not in DATASETS:
        near = difflib.get_close_matches(source.name, DATASETS, n=5, cutoff=0.4)
        near += [name for name in DATASETS if source.name and source.name in name]
        hint = f", such as {', '.join(dict.fromkeys(near))}" if near else ""
        raise ConfigError(
            f"{key}.name", source.name, f"one of reasoning_gym's {len(DATASETS)} datasets{hint}"
        )
    if "size" in source.params:
        raise ConfigError(f"{key}.params", source.params, "no size: data.size says how many")
    try:
        return reasoning_gym.create_dataset(
            source.name, **{"seed": seed, **source.params}, size=size
        )
    except (TypeError, ValueError, AssertionError) as error:
        fields = ", ".join(DATASETS[source.name][1].__dataclass_fields__)
        raise ConfigError(
            f"{key}.params",
            source.params,
            f"parameters that {source.name} takes: {fields} ({_one_line(error)})",
        ) from error


def _function(key: str, source: SourceConfig, seed: int) -> Iterator[Row]:
    make = cast(Callable[..., Iterable[Row]], load_function(f"{key}.name", source.name))
    try:
        for row in make(**{"seed": seed, **source.params}):
            missing = [name for name in ("question", "answer") if name not in row]
            if missing:
                raise ConfigError(
                    f"{key}.name",
                    source.name,
                    f"a function that yields dicts with {' and '.join(missing)}, not {sorted(row)}",
                )
            yield row
    except ConfigError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"{key}.params", source.params, f"what {source.name} takes ({_one_line(error)})"
        ) from error


def _with_columns(key: str, source: SourceConfig, read: Iterable[Row]) -> Iterator[Row]:
    number, pattern = 0, None
    if source.answer_pattern is not None:
        pattern = compiled(f"{key}.answer_pattern", source.answer_pattern)
    columns: tuple[str, ...] = ("prompt_column", "answer_column")
    if source.messages_column is not None:
        columns = ("messages_column",)
    if source.tools_column is not None:
        columns = (*columns, "tools_column")
    for number, row in enumerate(read, 1):
        for column in columns:
            name = getattr(source, column)
            if name is None:
                continue
            if name not in row:
                allowed = "one of " + ", ".join(sorted(row))
                if column == "answer_column":
                    allowed += ", or null where no judge reads one"
                raise ConfigError(f"{key}.{column}", name, allowed)
            if row[name] is None and column != "tools_column":
                allowed = f"a column with a value in every row (row {number} has none)"
                raise ConfigError(f"{key}.{column}", name, allowed)
        if source.messages_column is not None:  # `hybridrl.data.prompts` splits them
            yield {**row, "question": row[source.messages_column], "answer": None}
            continue
        answer = "" if source.answer_column is None else row[source.answer_column]
        if pattern is not None and (answer := last_match(pattern, str(answer))) is None:
            allowed = f"an expression that every answer matches (that of row {number} does not)"
            raise ConfigError(f"{key}.answer_pattern", source.answer_pattern, allowed)
        yield {**row, "question": row[source.prompt_column], "answer": answer}
    if number == 0:
        raise ConfigError(f"{key}.name", source.name, "at least one row (there is none)")


def _jsonl(key: str, source: SourceConfig) -> Iterator[Row]:
    with _existing(key, source).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"{key}.name", source.name, f"one JSON object a line (line {number}: {error})"
                ) from error
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{key}.name", source.name, f"one JSON object a line (line {number} has none)"
                )
            yield row


def _csv(key: str, source: SourceConfig) -> Iterator[Row]:
    path = _existing(key, source)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # as spreadsheets write it
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    wanted = f"{len(reader.fieldnames or ())} values a line"
                    raise csv.Error(f"line {reader.line_num} has not the header's {wanted}")
                yield dict(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{key}.name", source.name, f"CSV with a header, in UTF-8 ({_one_line(error)})"
        ) from error


def _parquet(key: str, source: SourceConfig) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    path = _existing(key, source)
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{key}.name", source.name, f"parquet ({_one_line(error)})") from error
    return iter(table.to_pylist())


def _huggingface(key: str, source: SourceConfig) -> Iterator[Row]:
    import datasets

    try:
        if (Path(source.name) / "dataset_dict.json").exists():
            splits = datasets.load_from_disk(source.name)
            if source.split not in splits:
                raise ConfigError(f"{key}.split", source.split, sorted(splits))
            read = splits[source.split]
        elif (Path(source.name) / "state.json").exists():
            read = datasets.load_from_disk(source.name)
        else:
            read = datasets.load_dataset(source.name, split=source.split, **source.params)
    except ConfigError:
        raise
    # load_dataset raises many kinds, from its network stack as well; each means the same here.
    except Exception as error:
        raise ConfigError(
            f"{key}.name",
            source.name,
            f"a dataset of split {source.split} that opens ({_one_line(error)})",
        ) from error
    return iter(read)


READERS: dict[SourceKind, Callable[[str, SourceConfig], Iterator[Row]]] = {
    SourceKind.jsonl: _jsonl,
    SourceKind.csv: _csv,
    SourceKind.parquet: _parquet,
    SourceKind.huggingface: _huggingface,
}


def _existing(key: str, source: SourceConfig) -> Path:
    path = Path(source.name).expanduser()
    if not source.name or not path.exists():
        raise ConfigError(f"{key}.name", source.name, f"a {source.kind.value} file that exists")
    return path


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]
