"""A run that resumes keeps its split: rows that were appended are trained on, none moves."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config import ConfigError, DataConfig, EvalSetConfig, SourceConfig, SourceKind
from hybridrl.data import Data, load_eval_set
from hybridrl.data.known_rows import KnownRows, read_rows, rows_of, write_rows

Rows = list[dict[str, Any]]
Jsonl = Callable[[Rows], str]
Load = Callable[..., Data]


def numbered(*numbers: int) -> Rows:
    return [{"prompt": f"{n}?", "answer": str(n)} for n in numbers]


def source(name: str) -> SourceConfig:
    return SourceConfig(kind=SourceKind.jsonl, name=name)


def known(data: Data) -> dict[str, KnownRows]:
    return rows_of(data.train, data.eval, {})


def prompts(items: Any) -> list[str]:
    return [item.prompt for item in items]


@pytest.mark.parametrize("generates", [True, False])
def test_appended_rows_leave_the_split_and_its_order(
    load: Load, jsonl: Jsonl, tmp_path: Path, generates: bool
) -> None:
    settings = {"eval_size": 40, "generates": generates}
    before = load(source(jsonl(numbered(*range(100)))), **settings)
    write_rows(tmp_path, known(before))
    mixed = numbered(*range(150))
    random.Random(0).shuffle(mixed)  # wherever they are
    grown = source(jsonl(mixed))
    data = load(grown, known=read_rows(tmp_path), **settings)
    assert prompts(data.eval) == prompts(before.eval)
    assert prompts(data.train)[:60] == prompts(before.train)
    assert sorted(prompts(data.train)[60:]) == sorted(f"{n}?" for n in range(100, 150))
    assert known(before)["s"].gone(known(data)["s"], 60) == 0
    assert prompts(load(grown, **settings).eval) != prompts(before.eval), "without the record"


def test_a_new_row_with_a_prompt_that_is_held_out_is_no_row_of_training(
    load: Load, jsonl: Jsonl
) -> None:
    settings = {"eval_size": 5, "generates": False}
    before = load(source(jsonl(numbered(*range(20)))), **settings)
    more = [{**row, "answer": "another"} for row in numbered(*range(20))]
    data = load(source(jsonl([*numbered(*range(20)), *more])), known=known(before), **settings)
    assert prompts(data.eval) == prompts(before.eval)
    assert not {*prompts(data.eval)} & {*prompts(data.train)}
    assert len(data.train) == 15 + 15


def test_rows_that_are_gone_are_counted_and_no_trained_one_is_held_out(
    load: Load, jsonl: Jsonl
) -> None:
    before = load(source(jsonl(numbered(*range(20)))), eval_size=5)
    lost = {prompts(before.eval)[1], prompts(before.train)[3], prompts(before.train)[14]}
    left = [row for row in numbered(*range(20)) if row["prompt"] not in lost]
    data = load(source(jsonl([*left, *numbered(20)])), known=known(before), eval_size=5)
    assert known(before)["s"].gone(known(data)["s"], 15) == 3
    assert known(before)["s"].gone(known(data)["s"], 14) == 2, "the 15th was never drawn"
    assert prompts(data.eval) == [*(x for x in prompts(before.eval) if x not in lost), "20?"]
    with pytest.raises(ConfigError, match=r"eval_size=5: wanted at most 4: .* were trained on"):
        load(source(jsonl(left)), known=known(before), eval_size=5)


def test_rows_that_are_equal_count_each(load: Load, jsonl: Jsonl) -> None:
    twice = [*numbered(*range(10)), {"prompt": "same", "answer": "x"}]
    twice.append(twice[-1])
    settings = {"eval_size": 1, "generates": False}
    before = load(source(jsonl(twice)), **settings)
    data = load(source(jsonl(twice[:-1])), known=known(before), **settings)
    assert known(before)["s"].gone(known(data)["s"], 11) == 1


def test_an_evaluation_set_stays_the_same_rows(jsonl: Jsonl, tokenizer: Any) -> None:
    def load_set(rows: Rows, known: KnownRows | None) -> list[str]:
        settings = EvalSetConfig(source=source(jsonl(rows)))
        of_set = load_eval_set(
            "own", settings, DataConfig(), tokenizer, max_context=99, max_new_tokens=9, known=known
        )
        rows_now.append(rows_of([], [], {"own": of_set})["eval.sets.own"])
        return prompts(of_set)

    rows_now: list[KnownRows] = []
    first = load_set(numbered(3, 1, 2), None)
    assert load_set(numbered(0, 2, 1, 3), rows_now[0]) == first
    assert rows_now[0].gone(rows_now[1], 0) == 0
    assert load_set(numbered(0, 2, 1), rows_now[0]) == ["1?", "2?"]
    assert rows_now[0].gone(rows_now[2], 0) == 1


def test_a_run_of_an_earlier_version_has_no_record(tmp_path: Path) -> None:
    assert read_rows(tmp_path) == {}
    rows = {"s": KnownRows(("a",), ("b", "c"))}
    write_rows(tmp_path, rows)
    assert read_rows(tmp_path) == rows
    assert json.loads((tmp_path / "rows.json").read_text())["s"]["held_out"] == ["a"]
