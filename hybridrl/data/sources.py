"""Sources of questions: each yields records.

Generated sources (reasoning_gym, function) are endless: rows are drawn until there are enough
distinct prompts. File sources (jsonl, csv, parquet, huggingface) yield all their rows.
"""

import difflib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.config.dotted import load_function
from hybridrl.config.patterns import compiled, last_match
from hybridrl.config.reasoning import import_reasoning_gym
from hybridrl.config.row_fields import field_of, is_missing, text_of
from hybridrl.data.files import READERS, Row, files_of, read_files
from hybridrl.data.records import SKIP, SourceRecord, UnusableRowError, form_of

if TYPE_CHECKING:
    from hybridrl.data.images import PromptImages

_PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")
"""Types of a message's parts in OpenAI's, transformers' and verl's messages."""
_COLUMNS = ("images", "videos", "audios")
"""Columns that verl and TRL read, with files, bytes or addresses."""
_NO_TOWER = "which the model does not read: its family has no image tower that is computed"
_SCALARS = (str, int, float, bool, type(None))
"""Types of most values of a row, none of which has an image."""


def records(
    key: str, source: SourceConfig, seed: int, chunk: int, images: "PromptImages | None" = None
) -> Iterator[SourceRecord | UnusableRowError]:
    """Every record of `source`; `key` is its config key, for error messages.

    A row without a value where one is named gives its error instead. So does one with half a
    surrogate pair, which no tokenizer takes. `chunk` is the number of rows of a generated source
    per call. `images` reads those of rows, for a model that does. Raises ConfigError for a missing
    name, parameter or file.
    """
    pattern = None
    if source.answer_pattern is not None:
        pattern = compiled(f"{key}.answer_pattern", source.answer_pattern)
    read: Iterator[tuple[str, Row]]
    generated = source.kind in GENERATED
    if generated:
        rows = _GENERATORS[source.kind](key, source, seed, chunk)
        read = ((f"row {number}", row) for number, row in enumerate(rows, 1))
    elif source.kind is SourceKind.huggingface:
        read = _huggingface(key, source)
    else:
        read = read_files(key, source)
    place, folders = "", _folders(key, source)
    for place, row in read:
        columns = _Columns(key, source, row, place)
        try:
            record = columns.generated() if generated else columns.record(pattern)
            _check_text(key, source, record)
            if images is not None:
                record = images.read(key, folders, record)
        except UnusableRowError as error:
            yield error
            continue
        others = {k: x for k, x in record.row.items() if not (record.images and k == "images")}
        if (column := column_with_images(others)) is not None:
            allowed = f"rows of text: {record.place} has images or other media in {column!r}, " + (
                "which are read in 'images' and in parts of messages" if images else _NO_TOWER
            )
            raise ConfigError(f"{key}.name", source.name, allowed)
        yield record
    if not place:
        raise ConfigError(f"{key}.name", source.name, "at least one row (there is none)")


def _folders(key: str, source: SourceConfig) -> list[Path]:
    """Where the images of a source are that it has as relative paths."""
    own = [] if source.kind not in READERS else [file.parent for file in files_of(key, source)]
    return list(dict.fromkeys([Path(), *own]))


def _check_text(key: str, source: SourceConfig, record: SourceRecord) -> None:
    """Raise for a lone surrogate anywhere in a row."""
    try:
        json.dumps(record.row, ensure_ascii=False, skipkeys=True, default=str).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        reason = "half of a surrogate pair"
        allowed = f"rows of text in Unicode ({record.place} has {half}, {reason}){SKIP}"
        raise UnusableRowError(reason, f"{key}.name", source.name, allowed) from None


def _reasoning_gym(key: str, source: SourceConfig, seed: int, chunk: int) -> Iterator[Row]:
    _one_name(key, source)
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


def _function(key: str, source: SourceConfig, seed: int, chunk: int) -> Iterator[Row]:
    name = _one_name(key, source)
    make = cast(Callable[..., Iterable[Row]], load_function(f"{key}.name", name))
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


_GENERATORS: dict[SourceKind, Callable[[str, SourceConfig, int, int], Iterator[Row]]] = {
    SourceKind.reasoning_gym: _reasoning_gym,
    SourceKind.function: _function,
}
GENERATED = frozenset(_GENERATORS)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The columns of one row that a source names."""

    key: str
    source: SourceConfig
    row: Row
    place: str

    def generated(self) -> SourceRecord:
        """The record of a generator's row."""
        return SourceRecord(self.row, self.row["question"], self.row["answer"], self.place)

    def record(self, pattern: re.Pattern[str] | None) -> SourceRecord:
        """The record of a row by the columns that the source names; `pattern` takes its answer."""
        row, source = self.row, self.source
        if source.tools_column is not None:
            self.value("tools_column", may_be_null=True)
        if source.messages_column is not None:  # `hybridrl.data.prompts` splits them
            return SourceRecord(row, self.value("messages_column"), None, self.place)
        expected = None
        if source.answer_column is not None:
            expected = self.value("answer_column")
        if source.answer_column in ("completions", "labels") and (form := form_of(row)):
            allowed = f"a column with answers ({self.place}){form}"
            raise ConfigError(f"{self.key}.answer_column", source.answer_column, allowed)
        if pattern is not None:
            expected = self.matched(pattern, expected)
        if source.prompt_column is None:
            row, question = self.without_prompt()
        else:
            question = self.value("prompt_column")
        return SourceRecord(row, question, expected, self.place)

    def value(self, setting: str, *, may_be_null: bool = False) -> Any:
        """The value at the dotted name that is the source's `setting`.

        Raises UnusableRowError for a row that has none.
        """
        name = getattr(self.source, setting)
        try:
            value = field_of(self.row, name)
        except KeyError as error:
            allowed = f"one of {', '.join(sorted(self.row))}; a dot leads into a field"
            if setting == "answer_column":
                allowed += "; or null where no judge reads one"
            form = form_of(self.row) or SKIP
            allowed += f" ({self.place} has no {error.args[0]!r}){form}"
            key = f"{self.key}.{setting}"
            raise UnusableRowError(f"no {name!r}", key, name, allowed) from None
        may_be_empty = setting == "prompt_column"  # where a template has other columns
        if is_missing(value) and not may_be_null and not (value == "" and may_be_empty):
            allowed = f"a column with a value in every row ({self.place} has none){SKIP}"
            raise UnusableRowError(f"no {name!r}", f"{self.key}.{setting}", name, allowed)
        return value

    def without_prompt(self) -> tuple[Row, Any]:
        """The row and its prompt, which is all that `chosen` and `rejected` begin with alike.

        It is empty for rows without these two. TRL calls it implicit, and a space before the
        answers is theirs there, too. Raises ConfigError where they do not begin alike.
        """
        chosen, rejected = self.row.get("chosen"), self.row.get("rejected")
        if chosen is None or rejected is None:
            return self.row, ""
        end = 0
        if type(chosen) is type(rejected) and isinstance(chosen, str | list):
            pairs = enumerate(zip(chosen, rejected, strict=False))
            end = next((number for number, (a, b) in pairs if a != b), 0)
        if end and chosen[end - 1] == " ":
            end -= 1
        if not end:
            allowed = (
                "a column, or rows whose chosen and rejected begin alike and then differ "
                f"({self.place}){SKIP}"
            )
            reason = "no prompt that chosen and rejected begin with"
            raise UnusableRowError(reason, f"{self.key}.prompt_column", "null", allowed)
        return {**self.row, "chosen": chosen[end:], "rejected": rejected[end:]}, chosen[:end]

    def matched(self, pattern: re.Pattern[str], expected: Any) -> str:
        """The part of the answer that `answer_pattern` takes; raises ConfigError."""
        allowed = f"an expression that every answer matches (that of {self.place} does not){SKIP}"
        try:
            answer = last_match(pattern, text_of(expected))
        except TypeError as error:
            answer, allowed = None, f"null, or answers that are text ({self.place}: {error})"
        if not answer:
            reason, key = "no match of answer_pattern", f"{self.key}.answer_pattern"
            raise UnusableRowError(reason, key, pattern.pattern, allowed)
        return answer


def _huggingface(key: str, source: SourceConfig) -> Iterator[tuple[str, Row]]:
    import datasets

    name = _one_name(key, source)
    try:
        if (Path(name) / "dataset_dict.json").exists():
            splits = datasets.load_from_disk(name)
            if source.split not in splits:
                raise ConfigError(f"{key}.split", source.split, sorted(splits))
            read = splits[source.split]
        elif (Path(name) / "state.json").exists():
            read = datasets.load_from_disk(name)
        else:
            read = datasets.load_dataset(name, split=source.split, **source.params)
    except ConfigError:
        raise
    # load_dataset raises many kinds, from its network stack as well; each means the same here.
    except Exception as error:
        raise ConfigError(
            f"{key}.name",
            name,
            f"a dataset of split {source.split} that opens ({_one_line(error)})",
        ) from error
    return ((f"row {number}", row) for number, row in enumerate(read, 1))


def _one_name(key: str, source: SourceConfig) -> str:
    """The name of a source that has one; raises ConfigError for a list or nothing."""
    if not isinstance(source.name, str) or not source.name:
        allowed = f"one name: only {', '.join(kind.value for kind in READERS)} take several"
        raise ConfigError(f"{key}.name", source.name, allowed)
    return source.name


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def column_with_images(row: Mapping[str, Any]) -> str | None:
    """The column of a row that has images, video or sound, which no model here reads; or None."""
    for column, value in row.items():
        if column in _COLUMNS and isinstance(value, Sequence) and value:
            return column
        if _has_media(value):
            return str(column)
    return None


def _has_media(value: Any) -> bool:
    if type(value) in _SCALARS:  # nearly all values, and the checks below take ten times as long
        return False
    if isinstance(value, Mapping):
        # Arrow stores an image as a struct of these two, and datasets a sound as an array.
        if value.keys() == {"bytes", "path"} or value.keys() == {"array", "path", "sampling_rate"}:
            return True
        if value.get("type") in _PARTS and not isinstance(value.get("text"), str):
            return True
        return any(map(_has_media, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return any(map(_has_media, value))
    return type(value).__module__.partition(".")[0] == "PIL"
