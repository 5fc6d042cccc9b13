"""Fields of a row of data: found by a dotted name, told as text, filled into a template."""

import math
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

_STEP = re.compile(r"\.([^.\[\]]+)|\[([^\[\]]+)\]")
_NAME = re.compile(rf"([^.\[\]]+)((?:{_STEP.pattern})*)")


class WrittenNumber(float):
    """A number of a text file that is told as the file has it: `72.0`, `1e3`, `0.10`."""

    written: str

    def __new__(cls, written: str) -> "WrittenNumber":
        """`written` is the number's text in the file."""
        number = super().__new__(cls, written)
        number.written = written
        return number

    def __str__(self) -> str:
        return self.written

    def __reduce__(self) -> tuple[type["WrittenNumber"], tuple[str]]:
        return WrittenNumber, (self.written,)


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field within one: `reward_model.ground_truth`, `turns[0]`.

    A column whose own name has the dots comes first. Raises KeyError with the part that is missing.
    """
    if name in row:
        return row[name]
    match = _NAME.fullmatch(name)
    if match is None:
        raise KeyError(name)
    value = row[match[1]]
    for step in _STEP.finditer(match[2]):
        value = _inner(value, step[1] or step[2])
    return value


def _inner(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value[name]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not name.isdecimal() or int(name) >= len(value):
            raise KeyError(name)
        return value[int(name)]
    if value is None or isinstance(value, str) or not hasattr(value, name):
        raise KeyError(name)
    return getattr(value, name)  # objects of a generator of the user's


def text_of(value: Any) -> str:
    """A text, or a number or a truth value as JSON writes it.

    Raises TypeError for a list, a struct, null or bytes, which no text follows from.
    """
    if isinstance(value, str):
        return value
    scalar = getattr(value, "item", None)
    if callable(scalar) and getattr(value, "ndim", None) == 0:  # numpy's
        return text_of(scalar())
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not isinstance(value, WrittenNumber):
        # A column of whole numbers with a gap in it is stored as floats: they are whole again.
        return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(float(value))
    if value is None or isinstance(value, bytes) or hasattr(value, "__len__"):
        raise TypeError(f"{kind_of(value)} is no text")
    return str(value)


def is_missing(value: Any) -> bool:
    """Whether a value is null, NaN (pandas' word for it), or an empty text: CSV has no null."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def kind_of(value: Any) -> str:
    """What a value is, in words for a message."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return f"a struct with {', '.join(map(str, value)) or 'no field'}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"{type(value).__name__}"


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """`template`, a format string, with values of `fields` by dotted names, each as `text_of`.

    Raises KeyError for an unknown field, TypeError for a value that is no text, and ValueError for
    a string that is no format string.
    """
    return _ROWS.vformat(template, (), fields)


def names_in(template: str) -> set[str]:
    """The dotted names in a format string; raises ValueError if it is none."""
    parsed = string.Formatter().parse(template)
    return {name for _, name, _, _ in parsed if name is not None}


class _RowFormatter(string.Formatter):
    """Format strings over rows. A value with a conversion or a format is written as Python does."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return field_of(kwargs, field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        return format(value, format_spec) if format_spec else text_of(value)


_ROWS = _RowFormatter()
