"""Records of a source: the user's row, what it asks, and its right answers."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.config.row_fields import WrittenNumber, is_missing, kind_of, text_of
from hybridrl.data.chat import as_message, content_text

SKIP = "; data.skip_unusable_rows=true leaves such rows out"


class UnusableRowError(ConfigError):
    """A row that cannot be used; `data.skip_unusable_rows` leaves it out."""

    def __init__(self, reason: str, key: str, value: object, allowed: str) -> None:
        """`reason` says why in a few words, to count by; the others as in a ConfigError."""
        super().__init__(key, value, allowed)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """One record of a source, as it was read."""

    row: dict[str, Any]
    """The user's own columns, as they are."""
    question: Any
    """The prompt's column: a text, or a list of messages."""
    expected: Any
    """The answer's column as the source has it; None without one."""
    place: str
    """Where it stands, for messages: `row 3 of part-2.jsonl`."""
    images: tuple[bytes, ...] = ()
    """The files of its images, in the order of its prompt (`hybridrl.data.images`)."""

    @property
    def untold(self) -> Any:
        """The answer where it is no text: a number, a list or a struct; None where it is one."""
        return None if isinstance(self.expected, str) else self.expected

    @property
    def item(self) -> dict[str, Any]:
        """The row for judges, with `question` and `answer` where the user has no such columns."""
        answer = "" if self.expected is None else self.expected
        return {"question": self.question, "answer": answer, **self.row}

    @property
    def right_answers(self) -> tuple[str, ...]:
        """The texts of its right answers; none where no text follows from what it has."""
        try:
            return answer_texts(self.expected)
        except (TypeError, ValueError):
            return ()

    @property
    def first_answer(self) -> str:
        """The text of its answer, the first one of several; empty without one."""
        return next(iter(self.right_answers), "")

    def fields(self) -> dict[str, Any]:
        """What a template may name; the user's own `question` and `answer` are `row.question`.

        The fields of a column `metadata` may be named without it.
        """
        metadata = self.row.get("metadata")
        inner = metadata if isinstance(metadata, Mapping) else {}
        answer = "" if self.expected is None else self.expected
        own = {"question": self.question, "answer": answer, "row": self.row}
        return {**inner, **self.row, **own}


def is_messages(value: Any) -> bool:
    """Whether a value is a list of messages, as TRL's conversational completions are."""
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def messages_of(value: Any) -> Any:
    """Messages that a file has as JSON, as CSV must, in a list; another value as it is.

    Raises ValueError for messages in Python's syntax, which pandas writes into CSV.
    """
    if not isinstance(value, str) or not _LIST.match(value):
        return value
    parsed = _parsed(value)
    if is_messages(parsed) and all({"content", "value", "tool_calls"} & set(x) for x in parsed):
        return parsed
    if isinstance(parsed, str) and is_messages(_in_python(value)):
        raise ValueError("a list of messages, or its JSON, which has double quotes")
    return value


_LIST = re.compile(r"\s*\[\s*\{\s*[\"']")


def form_of(row: Mapping[str, Any]) -> str:
    """The name of a form of TRL's that rows have and few recipes take; empty for others."""
    completions, labels = row.get("completions"), row.get("labels")
    if isinstance(completions, list) and isinstance(labels, list):
        return ": stepwise supervision, completions with labels, which no recipe takes"
    if "completion" in row and isinstance(row.get("label"), bool):
        return ": unpaired preference, which recipe=kto recipe.unpaired=true takes"
    return ""


def answer_texts(value: Any) -> tuple[str, ...]:
    """The texts of all right answers; none for null.

    A list has several; one of messages has the text of the last. verl's `reward_model` has its
    `ground_truth`, and `{"target": ...}` what is in it. A whole number with a decimal point is
    right with and without it. Raises TypeError for a value that no text follows from, or a list
    with an empty text, which an empty response would equal; ValueError for an empty list.
    """
    if value is None:
        return ()
    if isinstance(value, str) and value.startswith("{") and '"ground_truth"' in value:
        value = _parsed(value)  # verl's struct, which some files have as text
    if isinstance(value, Mapping):
        if "ground_truth" in value:
            return answer_texts(value["ground_truth"])
        if value.keys() == {"target"}:
            return answer_texts(value["target"])
        raise TypeError(f"{kind_of(value)} is no answer")
    if isinstance(value, list | tuple):
        if not value:
            raise ValueError("an empty list has no right answer")
        if is_messages(value):
            return (content_text(as_message(value[-1]).get("content")) or "",)
        wrong = [each for each in value if is_missing(each) or isinstance(each, list | tuple)]
        if wrong:
            kind = "an empty text" if wrong[0] == "" else kind_of(wrong[0])
            raise TypeError(f"a list with {kind} in it is no list of answers")
        return tuple(dict.fromkeys(text for each in value for text in answer_texts(each)))
    texts = [text_of(value)]
    if isinstance(value, float) and value.is_integer():
        whole = text_of(float(value))
        texts.append(whole if isinstance(value, WrittenNumber) else f"{whole}.0")
    return tuple(dict.fromkeys(texts))


def _in_python(text: str) -> Any:
    """The object of a text in Python's syntax; None for another text."""
    try:
        return ast.literal_eval(text.strip())
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _parsed(text: str) -> Any:
    """The object of a JSON text; another text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
