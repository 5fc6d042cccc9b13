"""Whatever rows, columns, templates and messages are: read right, or refused in one line."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.config.row_fields import field_of, text_of
from hybridrl.data import Data
from hybridrl.data.chat import content_text
from hybridrl.data.prompts import Item

Load = Callable[..., Data]

cheap = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
KEY = st.sampled_from(["prompt", "answer", "a", "a.b", "b", "0", "items", "", " ", "chosen"])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=8,
)
NAME = KEY | st.lists(KEY, min_size=2, max_size=3).map(".".join) | TEXT | st.just("items[0]")


def loaded(load: Load, folder: Path, rows: list[Any], source: Any, **chosen: Any) -> list[Item]:
    """The items of rows in a file; none where they are refused, which is one line."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(lines)
    config = SourceConfig(kind=SourceKind.jsonl, name=str(folder / "rows.jsonl"), **source)
    refused = None
    try:
        data = load(config, eval_size=1, skip_unusable_rows=True, **chosen)
    except ConfigError as error:
        refused = error
    if refused is None:
        return [*data.train, *data.eval]
    assert "\n" not in str(refused)
    assert refused.key.startswith(("data.", "model.path", "rollout."))
    return []


def steps(row: Any, name: str) -> Any:
    """What a dotted name means: the longest column first, then a step for each dot."""
    if isinstance(row, dict) and name in row:
        return row[name]
    first, _, rest = name.replace("[", ".").replace("]", "").partition(".")
    if isinstance(row, list):
        row = dict(zip(map(str, range(len(row))), row, strict=True))
    return row[first] if not rest else steps(row[first], rest)


@pytest.mark.long
@cheap
@given(row=st.dictionaries(KEY, VALUE, max_size=4), name=NAME)
@example(row={"a": {"b": [1, {"0": "x"}]}}, name="a.b.1.0")
@example(row={"a.b": 1, "a": {"b": 2}}, name="a.b")
def test_a_name_leads_to_its_value_or_to_none(row: dict[str, Any], name: str) -> None:
    try:
        value = field_of(row, name)
    except KeyError:
        return
    if "." not in name or name in row:
        assert value == row.get(name, value)
    else:
        assert value == steps(row, name)


@cheap
@given(
    row=st.dictionaries(KEY, TEXT | VALUE, min_size=2, max_size=5),
    prompt=st.sampled_from(["prompt", "a", "a.b", "b"]) | NAME,
    answer=st.none() | NAME,
    task=st.none() | NAME,
    pattern=st.sampled_from([None, None, "(.)", "(", "x?"]),
)
@example(row={"a": {"b": "q"}, "answer": 1}, prompt="a.b", answer="answer", task=None, pattern=None)
def test_columns(
    load: Load, tmp_path: Path, row: dict[str, Any], prompt: str, answer: str | None,
    task: str | None, pattern: str | None,
) -> None:  # fmt: skip
    rows = [{**row, "number": number} for number in range(3)]
    source = {"prompt_column": prompt, "answer_column": answer, "task_column": task}
    template = "{question} {row.number}"
    items = loaded(
        load, tmp_path, rows, {**source, "answer_pattern": pattern}, prompt_template=template,
        targets=False,
    )  # fmt: skip
    SEEN["columns"] += len(items)
    for item in items:
        asked = text_of(field_of(item.item, prompt))
        assert item.prompt == f"{asked} {item.item['number']}"
        if answer is not None and pattern is None and not isinstance(item.expected, list | dict):
            assert item.answer == text_of(field_of(item.item, answer))


FIELDS = {"prompt": "q{}", "answer": "a", "a": {"b": "x"}, "items": ["y", "z"], "n": 7}
PIECE = st.sampled_from(
    ["{question}", "{answer}", "{a.b}", "{items.0}", "{items[1]}", "{n}", "{n:03}", "{a}", "{", "}",
     "{{", "}}", "{}", "{0}", "{a!r}", "{question.x}", "{row.n}", "{n!z}", "{n:q}", "{a.__class__}",
     "{question:{n}}"]
) | TEXT  # fmt: skip


@cheap
@given(pieces=st.lists(PIECE, max_size=5))
@example(pieces=["{n:q}"])
@example(pieces=["{question:{n}}"])
def test_templates(load: Load, tmp_path: Path, pieces: list[str]) -> None:
    rows = [{**FIELDS, "prompt": f"q{number}"} for number in range(3)]
    template = "{question}" + "".join(pieces)
    for item in loaded(load, tmp_path, rows, {}, prompt_template=template, targets=False):
        SEEN["templates"] += 1
        written = {"{a.b}": "x", "{items.0}": "y", "{items[1]}": "z", "{n:03}": "007", "{n}": "7"}
        written |= {"{answer}": "a", "{row.n}": "7", "{question}": item.item["prompt"]}
        written |= {"{{": "{", "}}": "}", "{a!r}": repr({"b": "x"})}
        if all(piece in written or not set(piece) & set("{}") for piece in pieces):
            assert item.prompt == item.item["prompt"] + "".join(
                written.get(piece, piece) for piece in pieces
            )


def turns(n: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]


def as_read(messages: Any) -> list[dict[str, Any]]:
    """Messages with contents of text: those of null are empty, and parts are joined."""
    return [
        {**message, "content": content_text(message.get("content")) or ""} for message in messages
    ]


TURNS = turns(9)
SEEN: Counter[str] = Counter()
"""How many of the random rows were read, by test."""
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "bot", None])},
    optional={
        "content": TEXT | st.none() | VALUE,
        "tool_calls": st.none() | st.lists(VALUE, max_size=2),
        "name": TEXT,
    },
)
USER, ASSISTANT = (
    st.fixed_dictionaries({"role": st.just(role), "content": TEXT})
    for role in ("user", "assistant")
)
PAIRS = st.lists(st.tuples(USER, ASSISTANT), min_size=1, max_size=2).map(
    lambda pairs: [message for pair in pairs for message in pair]
)
MESSAGES = PAIRS | st.lists(MESSAGE, max_size=3) | VALUE
RESPONSE = TEXT | ASSISTANT.map(lambda message: [message]) | MESSAGES


@cheap
@given(
    messages=PAIRS | MESSAGES,
    tools=st.one_of([st.none()] * 9 + [VALUE]),
    chat=st.sampled_from([True, True, False]),
)
@example(messages=TURNS, tools=None, chat=True)
@example(messages=[TURNS[0], {**TURNS[1], "tool_calls": [3]}], tools=None, chat=True)
def test_conversations(
    load: Load, tmp_path: Path, chat_tokenizer: Any, messages: Any, tools: Any, chat: bool
) -> None:
    rows = [{"messages": messages, "tools": tools, "random": True}]
    rows += [{"messages": turns(n), "tools": None, "random": False} for n in range(2)]
    source = {"messages_column": "messages", "tools_column": "tools"}
    chosen: dict[str, Any] = {"tokenizer": chat_tokenizer, "chat": chat, "generates": False}
    for item in loaded(load, tmp_path, rows, source, **chosen):
        ids, mask = item.response(None)
        text = chat_tokenizer.decode([*item.prompt_ids, *ids])
        whole = chat_tokenizer.apply_chat_template(as_read(item.item["messages"]), tokenize=False)
        encoded = chat_tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert chat_tokenizer.decode(encoded).startswith(text)
        assert mask[0]
        assert mask[-1]
        SEEN["conversations"] += item.item["random"]


@pytest.mark.long
@cheap
@given(
    prompt=TEXT | USER.map(lambda message: [message]) | MESSAGES,
    chosen=RESPONSE, rejected=RESPONSE, implicit=st.booleans(),
)  # fmt: skip
@example(prompt="q", chosen="ab", rejected="ac", implicit=True)
def test_preferences(
    load: Load, tmp_path: Path, chat_tokenizer: Any, prompt: Any, chosen: Any, rejected: Any,
    implicit: bool,
) -> None:  # fmt: skip
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "random": True}
    good = [turns(n) for n in range(2)]
    rows = [row] + [
        {"prompt": t[:1], "chosen": t, "rejected": [*t[:1], {**t[1], "content": "no"}]}
        for t in good
    ]
    source = {"prompt_column": None if implicit else "prompt", "answer_column": None}
    others: dict[str, Any] = {"tokenizer": chat_tokenizer, "chat": True, "generates": False}
    others |= {"columns": ("chosen", "rejected"), "targets": False}
    for item in loaded(load, tmp_path, rows, source, **others):
        for name in ("chosen", "rejected"):
            ids, mask = item.response(name)
            assert ids[-1] == chat_tokenizer.eos_token_id
            assert len(ids) == len(mask)
            assert mask[-1]
        SEEN["preferences"] += "random" in item.item


@pytest.fixture(scope="module", autouse=True)
def some_are_read() -> Iterator[None]:
    """They are not all refused: a property of nothing holds."""
    SEEN.clear()
    yield
    assert not SEEN or min(SEEN.values()), SEEN
