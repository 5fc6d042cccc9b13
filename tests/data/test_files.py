"""Files as users have them: several, compressed, nested, half broken; and their columns."""

import gzip
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.data import Data

Load = Callable[..., Data]

ROWS = [{"prompt": f"{n} + 1 =", "answer": n + 1} for n in range(20)]


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def compressed(data: bytes, kind: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, kind) as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def write_forms(folder: Path) -> dict[str, Any]:
    """Write the same rows in every form that a name may have."""
    whole, first, second = lines(ROWS), lines(ROWS[:12]), lines(ROWS[12:])
    parts = folder / "parts"
    (parts / "deep").mkdir(parents=True)
    (parts / "a.jsonl").write_bytes(first)
    (parts / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(second))
    (parts / "README.md").write_text("no rows")
    (parts / ".hidden.jsonl").write_text("no rows")
    files = {
        "rows.jsonl": whole,
        "rows.jsonl.gz": gzip.compress(whole),
        "rows.jsonl.zst": compressed(whole, "zstd"),
        "rows.jsonl.bz2": compressed(whole, "bz2"),
        "array.json": json.dumps(ROWS).encode(),
        "array.json.gz": gzip.compress(json.dumps(ROWS, indent=2).encode()),
        "bom.jsonl": b"\xef\xbb\xbf" + whole,
        "behind an empty line.json": b"\n" + json.dumps(ROWS, indent=1).encode(),
        "split-1.jsonl": first,
        "split-2.jsonl": second,
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    names = {name: str(folder / name) for name in files if not name.startswith("split")}
    return names | {
        "a list": [str(folder / "split-1.jsonl"), str(folder / "split-2.jsonl")],
        "a pattern": str(folder / "split-*.jsonl"),
        "a folder": str(parts),
    }


def test_every_form_of_file_gives_the_same_rows(load: Load, tmp_path: Path) -> None:
    loaded = {}
    for form, name in write_forms(tmp_path).items():
        data = load(SourceConfig(kind=SourceKind.jsonl, name=name), eval_size=5)
        loaded[form] = {item.prompt: item.answer for item in [*data.train, *data.eval]}
    expected = {f"{n} + 1 =": str(n + 1) for n in range(20)}
    assert loaded == dict.fromkeys(loaded, expected)
    assert len(loaded) == 11


def test_several_files_of_parquet_and_csv(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, rows in enumerate((ROWS[:12], ROWS[12:])):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{number}.parquet")
        text = "prompt,answer\n" + "".join(f"{r['prompt']},{r['answer']}\n" for r in rows)
        (tmp_path / f"{number}.csv.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / ".cache").write_text("hidden")
    for kind in (SourceKind.parquet, SourceKind.csv):
        data = load(SourceConfig(kind=kind, name=str(tmp_path)), eval_size=5)
        assert len(data.train) + len(data.eval) == 20
        assert data.train[0].item["prompt"] == data.train[0].prompt
    assert "2 files are read, those of *.csv; 2 others are not, such as 0.parquet" in caplog.text


REFUSED_NAMES: dict[str, tuple[Any, str]] = {
    "nothing matches": ("none-*.jsonl", "a pattern that some jsonl file matches"),
    "an empty folder": ("empty", r"a folder with files of \*\.jsonl, \*\.json, \*\.ndjson"),
    "a list with nothing": ([], "one file or more"),
    "a list with a number": ([3], "a jsonl file that exists, a pattern, a folder, or a list"),
    "a file twice": (["rows.jsonl", "rows.jsonl"], "each file once"),
    "a zip": ("rows.zip", "a file without compression, or one of .gz, .zst, .bz2, .lz4"),
    "not compressed": ("false.jsonl.gz", "a jsonl file that can be read"),
    "cut off": ("cut.jsonl.gz", "a jsonl file that can be read"),
    "words in an array": ("words.json", "element 1: str"),
    "half an array": ("half.json", "an array: "),
    "a name that is too long": ("a" * 300, "File name too long"),
    "a file twice by two names": (["rows.jsonl", "empty/../rows.jsonl"], "each file once"),
}


@pytest.mark.parametrize("case", REFUSED_NAMES)
def test_a_name_that_cannot_be_read_is_one_line(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("rows.jsonl", "rows.zip", "false.jsonl.gz"):
        (tmp_path / name).write_bytes(lines(ROWS))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines(ROWS))[:-20])
    (tmp_path / "words.json").write_text('["a", "b"]')
    (tmp_path / "half.json").write_text('[{"prompt": "a"},')
    name, message = REFUSED_NAMES[case]
    with pytest.raises(ConfigError, match=message) as caught:
        load(SourceConfig(kind=SourceKind.jsonl, name=name))
    assert caught.value.key == "data.sources.s.name"
    assert "\n" not in str(caught.value)


COLUMNS_TWICE = pyarrow.table([["a", "b"], ["x", "y"], ["1", "2"]], ["prompt", "answer", "answer"])
NOT_UTF8 = pyarrow.table([pyarrow.array([b"a\xff", b"b"]).view(pyarrow.string())], ["prompt"])


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("csv", b"prompt,answer,answer\nq,1,2\n", "'answer' is there twice"),
        ("parquet", COLUMNS_TWICE, "'answer' is there twice"),
        ("parquet", NOT_UTF8, "texts are UTF-8 .rows 1 to 2: .*0xff"),
    ],
)
def test_what_would_be_lost_of_a_file_is_refused(
    load: Load, tmp_path: Path, kind: str, content: Any, message: str
) -> None:
    file = tmp_path / f"rows.{kind}"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        pyarrow.parquet.write_table(content, file)
    with pytest.raises(ConfigError, match=message) as caught:
        load(SourceConfig(kind=SourceKind(kind), name=str(file)), eval_size=1)
    assert caught.value.key == "data.sources.s.name"


def test_columns_without_a_name_may_be_several(load: Load, tmp_path: Path) -> None:
    """Spreadsheets leave them behind the last column."""
    file = tmp_path / "rows.csv"
    file.write_text("prompt,answer,,\nq,1,,\nr,2,,\n")
    data = load(SourceConfig(kind=SourceKind.csv, name=str(file)), eval_size=1)
    assert {item.answer for item in [*data.train, *data.eval]} == {"1", "2"}


def test_a_cell_of_csv_may_be_long(load: Load, tmp_path: Path) -> None:
    answer = "x" * 200_000
    (tmp_path / "rows.csv").write_text(f"prompt,answer\nq,{answer}\nr,b\n")
    source = SourceConfig(kind=SourceKind.csv, name=str(tmp_path / "rows.csv"))
    data = load(source, eval_size=1, targets=False)
    assert {item.answer for item in [*data.train, *data.eval]} == {answer, "b"}


def test_rows_that_keep_leaves_out_are_told(load: Load, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(ROWS))
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"data\.keep leaves 20 out"):
        load(source, eval_size=1, keep="nothing")


def test_only_files_come_in_lists(load: Load) -> None:
    for kind in (SourceKind.reasoning_gym, SourceKind.function, SourceKind.huggingface):
        with pytest.raises(ConfigError, match=r"s\.name=.*one name: only jsonl, csv, parquet"):
            load(SourceConfig(kind=kind, name=["a", "b"]))


def test_half_a_surrogate_pair_is_named(load: Load, tmp_path: Path) -> None:
    rows = [*ROWS, {"prompt": "fine", "answer": "x", "more": [{"x": "broken \ud83d emoji"}]}]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"row 21 has \\ud83d, half of a surrogate pair"):
        load(source)
    (tmp_path / "rows.jsonl").write_bytes(lines([*ROWS, {"prompt": "\U0001f600", "answer": "x"}]))
    assert len(load(source, eval_size=5).train) == 16


def verl(n: int, truth: Any) -> dict[str, Any]:
    """A row as verl's RL files have it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{n} + 1 ="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": n, "split": "train"},
    }


def parquet(folder: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "rows.parquet")
    return str(folder / "rows.parquet")


@pytest.mark.parametrize("column", ["reward_model", "reward_model.ground_truth"])
def test_parquet_of_verl(load: Load, tmp_path: Path, chat_tokenizer: Any, column: str) -> None:
    name = parquet(tmp_path, [verl(n, str(n + 1)) for n in range(20)])
    source = SourceConfig(
        kind=SourceKind.parquet, name=name, answer_column=column, task_column="data_source"
    )
    template = "{question} ({extra_info.index})"
    data = load(source, chat=True, tokenizer=chat_tokenizer, eval_size=5, prompt_template=template)
    assert len(data.train) == 15
    for item in data.train:
        n = item.item["extra_info"]["index"]
        assert (item.answer, item.answers) == (str(n + 1), (str(n + 1),))
        assert f"{n} + 1 = ({n})" in item.prompt
        assert item.item["reward_model"] == {"style": "rule", "ground_truth": str(n + 1)}


def test_a_field_that_is_not_there_is_named(
    load: Load, tmp_path: Path, chat_tokenizer: Any
) -> None:
    rows = [verl(n, str(n + 1)) for n in range(20)]
    rows[7]["reward_model"] = {"style": "rule"}
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    settings: dict[str, Any] = {"chat": True, "tokenizer": chat_tokenizer}
    source = SourceConfig(
        kind=SourceKind.jsonl,
        name=str(tmp_path / "rows.jsonl"),
        answer_column="reward_model.ground_truth",
    )
    with pytest.raises(ConfigError, match=r"answer_column=.*row 8 has no 'ground_truth'"):
        load(source, **settings)
    with pytest.raises(ConfigError, match=r"prompt_template=.*fields among.*KeyError: 'no'"):
        load(parquet_source(tmp_path), prompt_template="{extra_info.no}", **settings)


def parquet_source(folder: Path) -> SourceConfig:
    name = parquet(folder, [verl(n, str(n + 1)) for n in range(20)])
    return SourceConfig(kind=SourceKind.parquet, name=name, answer_column="reward_model")


@pytest.mark.parametrize(
    ("value", "answers"),
    [
        ("1", ("1",)),
        (72, ("72",)),
        (True, ("true",)),
        (["a", "b", "a"], ("a", "b")),
        ([1, 2.5], ("1", "2.5")),
        ({"target": ["Paris", "paris"]}, ("Paris", "paris")),
        ({"ground_truth": {"target": ["x"]}, "style": "rule"}, ("x",)),
        ('{"style": "rule", "ground_truth": "2"}', ("2",)),
        ('{"ground_truth"', ('{"ground_truth"',)),
        ({"target": 7, "numbers": [3, 4]}, ()),
        ([["a"], ["b"]], ()),
        ([], ()),
        (["a", ""], ()),  # an empty response would be right
        ({"target": ["a", None]}, ()),
    ],
)
def test_answers_in_json(load: Load, tmp_path: Path, value: Any, answers: tuple[str, ...]) -> None:
    rows = [{"prompt": f"{n}?", "answer": value} for n in range(12)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    item = load(source, eval_size=2, targets=False).train[0]
    assert item.answers == answers
    assert item.answer == (answers[0] if answers else "")
    assert item.expected == (None if isinstance(value, str) else value)
    if not answers:  # no text follows from it, so nothing can be trained on it
        with pytest.raises(ConfigError, match=r"data\.answer_template=.*row 1: a (struct|list)"):
            load(source, eval_size=2)


@pytest.mark.parametrize(
    ("written", "answers"),
    [("72.0", ("72.0", "72")), ("0.10", ("0.10",)), ("1e3", ("1e3", "1000")), ("-3", ("-3",))],
)
def test_numbers_are_as_the_file_has_them(
    load: Load, tmp_path: Path, written: str, answers: tuple[str, ...]
) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(f'{{"prompt": "{n}?", "answer": {written}}}\n' for n in range(12))
    )
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    item = load(source, eval_size=2, prompt_template="{question} {answer}").train[0]
    assert item.answers == answers
    assert item.prompt.endswith(f"? {written}")
    assert item.item["answer"] == float(written)


def test_whole_numbers_that_parquet_has_as_floats(load: Load, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": float(n)} for n in range(12)]
    source = SourceConfig(kind=SourceKind.parquet, name=parquet(tmp_path, rows))
    item = load(source, eval_size=2).train[0]
    n = item.prompt.removesuffix("?")
    assert (item.answer, item.answers) == (n, (n, f"{n}.0"))


def test_the_users_own_question_and_answer_stay(load: Load, tmp_path: Path) -> None:
    rows = [
        {"problem": f"p{n}", "question": f"q{n}", "solution": f"s{n}", "answer": f"a{n}"}
        for n in range(12)
    ]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    source = SourceConfig(
        kind=SourceKind.jsonl,
        name=str(tmp_path / "rows.jsonl"),
        prompt_column="problem",
        answer_column="solution",
    )
    template = "{question} {answer} {row.question} {row.answer} {problem}"
    for item in load(source, eval_size=2, prompt_template=template).train:
        n = item.answer.removeprefix("s")
        assert item.prompt == f"p{n} s{n} q{n} a{n} p{n}"
        assert item.item == rows[int(n)]
        assert item.question == f"p{n}"  # for judges: their rubric's {question}


@pytest.mark.parametrize("value", [["a"], {"b": 1}, None])
def test_what_is_no_text_is_not_written_as_python_does(
    load: Load, tmp_path: Path, value: Any
) -> None:
    rows = [{"prompt": f"{n}?", "answer": "x", "hint": value} for n in range(12)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"prompt_template=.*row 1: (a list|a struct|null)"):
        load(source, prompt_template="{question} {hint}")
    assert load(source, eval_size=2, prompt_template="{question} {hint!r}").train
    source.prompt_column = "hint"
    with pytest.raises(ConfigError, match=r"data\.(sources\.s\.prompt_column|chat)="):
        load(source)


def test_a_task_is_no_struct(load: Load, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "answer": "x", "extra": {"index": n}} for n in range(12)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    source.task_column = "extra"
    with pytest.raises(
        ConfigError, match=r"task_column=extra: .*\(row \d+ has a struct with index"
    ):
        load(source)
    source.task_column = "extra.index"
    assert load(source, eval_size=2).train


def test_nan_stands_for_a_missing_answer(load: Load, tmp_path: Path) -> None:
    """As pandas writes it; the text nan is an answer."""
    rows = [{"prompt": f"{n}?", "answer": float("nan") if n == 3 else "nan"} for n in range(12)]
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"answer_column=answer: .*\(row 4 has none\)"):
        load(source)
    (tmp_path / "rows.jsonl").write_bytes(lines(rows[:3] + rows[4:]))
    assert {item.answer for item in load(source, eval_size=2).train} == {"nan"}


def test_all_rows_are_trained_where_no_prompt_generates(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Twelve prompts of four answers each, and one more row to hold out."""
    rows = [{"prompt": f"{n}?", "answer": f"{n}.{k}"} for n in range(12) for k in range(4)]
    (tmp_path / "rows.jsonl").write_bytes(lines([*rows, {"prompt": "last?", "answer": "z"}]))
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    data = load(source, eval_size=1, generates=False)
    assert sorted(item.answer for item in data.train) == sorted(row["answer"] for row in rows)
    assert [item.answer for item in data.eval] == ["z"]
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        data = load(source, eval_size=1)
    assert len(data.train) == 12
    assert "data.sources.s: 36 rows ask what an earlier row asks" in caplog.text


def test_rows_that_were_appended_keep_their_neighbors_order(load: Load, tmp_path: Path) -> None:
    """Which rows are held out follows from each row: further ones move few."""
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(400)]
    held_out = []
    for number in (380, 400):
        (tmp_path / "rows.jsonl").write_bytes(lines(rows[:number]))
        held_out.append({item.prompt for item in load(source, eval_size=100).eval})
    assert len(held_out[0] & held_out[1]) >= 90
    assert held_out[1] != {f"{n}?" for n in range(100)}


def test_limits_hold_for_every_form_of_row(load: Load, tmp_path: Path, tokenizer: Any) -> None:
    """An empty prompt, a response beyond the context, a token without an embedding."""
    good = [{"prompt": f"{n}?", "answer": "x", "chosen": "y"} for n in range(12)]
    bad = {
        "an empty prompt": {"prompt": "", "answer": "x", "chosen": "y"},
        "a response beyond the context": {"prompt": "?", "answer": "x" * 200, "chosen": "y"},
    }
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    small: dict[str, Any] = {"max_context": 100, "eval_size": 2, "generates": False}
    for why, row in bad.items():
        (tmp_path / "rows.jsonl").write_bytes(lines([*good, row]))
        with pytest.raises(ConfigError, match=r"data\.skip_unusable_rows=False: .*row 13"):
            load(source, **small)
        data = load(source, skip_unusable_rows=True, **small)
        assert (len(data.train), data.dropped) == (10, {why: 1})
    # another column, and an answer that the recipe does not read
    (tmp_path / "rows.jsonl").write_bytes(lines([*good, {**good[0], "chosen": "y" * 200}]))
    with pytest.raises(ConfigError, match=r"data\.skip_unusable_rows=False"):
        load(source, columns=("chosen",), targets=False, **small)
    assert load(source, targets=False, **small).train
    # the template's or tokenizer's tokens beyond the embedding
    (tmp_path / "rows.jsonl").write_bytes(lines(good))
    with pytest.raises(ConfigError, match=r"model\.path=.*a row for each token.*the embedding 9"):
        load(source, vocab_size=9, skip_unusable_rows=True, **small)
    assert load(source, vocab_size=len(tokenizer), **small).train


UNUSABLE: dict[str, list[dict[str, Any]]] = {
    "no 'prompt'": [{"prompt": None}, {"prompt": math.nan}, {"prompt": ...}],
    "no 'answer'": [{"answer": None}, {"answer": math.nan}, {"answer": ""}, {"answer": ...}],
    "an empty prompt": [{"prompt": ""}],
    "an empty response": [{"chosen": None}, {"rejected": ""}, {"rejected": math.nan}],
    "a pair that does not differ": [{"rejected": "yes"}],
    "half of a surrogate pair": [{"chosen": "\ud83d"}, {"more": {"x": ["\ud83d"]}}],
}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("why", UNUSABLE)
def test_rows_that_cannot_be_used_are_named_or_left_out(
    load: Load, tmp_path: Path, chat_tokenizer: Any, why: str, chat: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    good = [{"prompt": f"{n}?", "answer": "x", "chosen": "yes", "rejected": "n"} for n in range(6)]
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    settings: dict[str, Any] = {"chat": chat, "tokenizer": chat_tokenizer, "generates": False}
    settings |= {"eval_size": 2, "columns": ("chosen", "rejected")}
    for change in UNUSABLE[why]:
        bad = {name: x for name, x in {**good[0], **change}.items() if x is not ...}
        (tmp_path / "rows.jsonl").write_bytes(lines([*good, bad]))
        with pytest.raises(ConfigError, match=r"row 7\b") as refused:
            load(source, **settings)
        assert "data.skip_unusable_rows" in str(refused.value)
        caplog.clear()
        data = load(source, skip_unusable_rows=True, **settings)
        assert (len(data.train), data.dropped) == (4, {why: 1})
        assert f"1 with {why} left out; the first: {refused.value}" in caplog.text
    (tmp_path / "rows.jsonl").write_bytes(lines([bad] * 3))
    with pytest.raises(ConfigError, match=rf"eval_size=2: .*3 with {why} left out; .*row 1\b"):
        load(source, skip_unusable_rows=True, **settings)


def test_an_empty_cell_is_no_answer(load: Load, tmp_path: Path) -> None:
    """As null is in other files."""
    (tmp_path / "rows.csv").write_text("prompt,answer\n1?,x\n2?,\n3?,x\n4?,x\n")
    source = SourceConfig(kind=SourceKind.csv, name=str(tmp_path / "rows.csv"))
    with pytest.raises(ConfigError, match=r"answer_column=answer: .*\(row 2 has none\)"):
        load(source, eval_size=1)
    assert load(source, eval_size=1, skip_unusable_rows=True).dropped == {"no 'answer'": 1}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(st.dictionaries(st.sampled_from(["prompt", "answer", "x"]), JSON), max_size=4))
@example(rows=[{"prompt": "\ud800", "answer": 1}])
@example(rows=[{"prompt": "a", "answer": float("nan")}])
@example(rows=[{"prompt": {"\n": None}, "answer": []}])
def test_any_rows_are_read_or_refused_in_one_line(
    load: Load, tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    (tmp_path / "rows.jsonl").write_bytes(lines(rows))
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "rows.jsonl"))
    refused, data = "", Data([], [], {}, {})
    try:
        data = load(source, eval_size=1, prompt_template="{question}{x}")
    except ConfigError as error:
        refused = str(error)
    assert "\n" not in refused
    for item in [*data.train, *data.eval]:
        question = item.item["prompt"]
        assert isinstance(question, str | int | float)
        assert not isinstance(item.item["x"], list | dict | None)
        assert item.answers or item.item["answer"] is None


def test_the_first_of_several_right_answers_is_trained_on_and_said(
    load: Load, jsonl: Callable[[list[dict]], str], caplog: pytest.LogCaptureFixture
) -> None:
    name = jsonl([{"prompt": f"q{n}", "answer": ["a", "b"] if n else "a"} for n in range(3)])
    source = SourceConfig(kind=SourceKind.jsonl, name=name)
    load(source, eval_size=0, targets=False)
    assert not caplog.records, "a judge takes each of them"
    data = load(source, eval_size=0, targets=True)
    assert len({item.target_ids for item in data.train}) == 1
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("several right answers is trained on (2 rows, the first is row 2)")
