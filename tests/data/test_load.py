"""From sources to training and held-out items."""

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.data import Data

Load = Callable[..., Data]

WORDS = SourceConfig(name="spell_backward", params={"min_word_len": 3, "max_word_len": 8})
SPELL: dict[str, Any] = {"prompt_template": "{word}:", "answer_template": "#{answer}"}
ROWS = [{"prompt": f"{n} + 1 =", "answer": n + 1, "meta": {"n": n}} for n in range(40)]


def test_spell_backward_reads_as_wanted(load: Load, tokenizer: Any) -> None:
    data = load(WORDS, **SPELL)
    item = data.train[0]
    word = item.item["metadata"]["word"]
    assert item.prompt == f"{word}:"
    assert tokenizer.decode(item.prompt_ids) == f"{word}:"
    assert item.answer == word[::-1]
    assert tokenizer.decode(item.target_ids) == f"#{word[::-1]}<eos>"
    assert item.target_ids[-1] == tokenizer.eos_token_id
    assert item.source == "s"
    assert data.longest == max(len(i.prompt_ids) + len(i.target_ids) for i in data.train)


def test_held_out_prompts_are_never_trained_on(load: Load) -> None:
    data = load(WORDS, size=3000, eval_size=1024, **SPELL)
    assert (len(data.train), len(data.eval)) == (3000, 1024)
    prompts = [item.prompt for item in data.train + data.eval]
    assert len(set(prompts)) == len(prompts)


def test_loading_is_deterministic_and_the_seed_decides(load: Load) -> None:
    first, again, other = (load(WORDS, seed=seed, **SPELL) for seed in (1, 1, 2))
    assert first == again
    assert first.train != other.train


@pytest.mark.long
def test_a_small_source_trains_on_what_it_has(load: Load, caplog: Any) -> None:
    digits = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    products = SourceConfig(name="products", params=digits)
    with caplog.at_level(logging.WARNING):
        data = load(products, size=5000, eval_size=20)
    total = len(data.train) + len(data.eval)
    assert len(data.eval) == 20
    assert 90 <= total <= 100  # one-digit products: 100 questions
    assert f"data.sources.s has {total} different prompts" in caplog.text
    with pytest.raises(ConfigError, match=r"data\.eval_size=256: .*source s .*different prompts"):
        load(products, size=5000, eval_size=256)


def test_an_unknown_dataset_gets_near_names(load: Load) -> None:
    with pytest.raises(ConfigError, match=r"s\.name=spell_back:.* 1\d\d datasets.*spell_backward"):
        load(SourceConfig(name="spell_back"))


@pytest.mark.parametrize(
    "params",
    [{"nonsense": 1}, {"min_word_len": 9, "max_word_len": 3}, {"min_word_len": "x"}, {"size": 3}],
)
def test_bad_parameters_are_one_line(load: Load, params: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SourceConfig(name="spell_backward", params=params))
    assert caught.value.key == "data.sources.s.params"
    assert "\n" not in str(caught.value)


def test_a_parameter_of_reasoning_gym_changes_the_items(load: Load) -> None:
    short = SourceConfig(name="spell_backward", params={"max_word_len": 4, "seed": 7})
    assert max(len(item.answer) for item in load(short).train) <= 4


def test_jsonl_with_columns_of_ones_own(load: Load, jsonl: Any, tokenizer: Any) -> None:
    rows = [{"q": row["prompt"], "a": row["answer"], "meta": row["meta"]} for row in ROWS]
    source = SourceConfig(
        kind=SourceKind.jsonl, name=jsonl(rows), prompt_column="q", answer_column="a"
    )
    data = load(source, prompt_template="Q: {question} ({meta[n]})", answer_template="= {answer}")
    assert (len(data.train), len(data.eval)) == (30, 10)
    item = data.train[0]
    n = item.item["meta"]["n"]
    assert item.prompt == f"Q: {n} + 1 = ({n})"
    assert item.answer == str(n + 1)
    assert tokenizer.decode(item.target_ids) == f"= {n + 1}<eos>"
    assert {i.item["meta"]["n"] for i in data.eval} != set(range(10))  # a sorted file is shuffled


def test_parquet_and_huggingface_read_the_same(load: Load, jsonl: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="a dependency of the package")
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "splits")
    huggingface = SourceKind.huggingface
    files = {"data_files": jsonl(ROWS), "cache_dir": str(tmp_path / "cache")}
    sources = [
        SourceConfig(kind=SourceKind.jsonl, name=jsonl(ROWS)),
        SourceConfig(kind=SourceKind.parquet, name=str(tmp_path / "rows.parquet")),
        SourceConfig(kind=huggingface, name=str(tmp_path / "saved")),
        SourceConfig(kind=huggingface, name=str(tmp_path / "splits")),
        SourceConfig(kind=huggingface, name="json", params=files),
    ]
    first, *others = (load(source) for source in sources)
    assert len(first.train) == 30
    assert all(other == first for other in others)


def test_csv(load: Load, jsonl: Any, tmp_path: Path) -> None:
    """Quotes, line breaks and a spreadsheet's byte order mark; all values are text."""
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"])
        writer.writeheader()
        for i in range(40):
            writer.writerow({"prompt": f'{i}, "quoted"\nin two lines', "answer": f"a{i}"})
    data = load(SourceConfig(kind=SourceKind.csv, name=str(path)))
    assert (len(data.train), len(data.eval)) == (30, 10)
    items = {item.answer: item.prompt for item in [*data.train, *data.eval]}
    assert items["a3"] == '3, "quoted"\nin two lines'
    source = SourceConfig(kind=SourceKind.csv, name=str(path), answer_column=None)
    unanswered = load(source, targets=False)
    assert {item.answer for item in unanswered.train} == {""}


@pytest.mark.parametrize("text", ["prompt,answer\na,b\nc\n", "prompt,answer\na,b,c\n", "p,a\n\xff"])
def test_broken_csv_is_named(load: Load, tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"s\.name=.*wanted CSV with a header, in UTF-8"):
        load(SourceConfig(kind=SourceKind.csv, name=str(path)))


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"prompt_column": "q"}, "data.sources.s.prompt_column", "one of answer, meta, prompt"),
        ({"answer_column": "a"}, "data.sources.s.answer_column", "one of answer, meta, prompt"),
    ],
)
def test_a_missing_column_is_named(
    load: Load, jsonl: Any, settings: dict[str, str], key: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(SourceConfig(kind=SourceKind.jsonl, name=jsonl(ROWS), **settings))
    assert caught.value.key == key
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", [SourceKind.jsonl, SourceKind.parquet, SourceKind.huggingface])
def test_a_missing_file_is_named(
    load: Load, kind: SourceKind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError) as caught:
        load(SourceConfig(kind=kind, name=str(tmp_path / "nothing")))
    assert caught.value.key == "data.sources.s.name"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", ["{broken", "[1, 2]"])
def test_a_broken_line_is_named(load: Load, tmp_path: Path, line: str) -> None:
    path = tmp_path / "broken.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"s\.name=.*line 2"):
        load(SourceConfig(kind=SourceKind.jsonl, name=str(path)))
    path.rename(tmp_path / "broken.parquet")
    with pytest.raises(ConfigError, match=r"s\.name=.*wanted parquet"):
        load(SourceConfig(kind=SourceKind.parquet, name=str(tmp_path / "broken.parquet")))


def test_an_unknown_split_is_named(load: Load, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="a dependency of the package")
    dataset = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=dataset, test=dataset).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match=r"s\.split=dev: wanted one of test, train"):
        load(SourceConfig(kind=SourceKind.huggingface, name=str(tmp_path / "splits"), split="dev"))


@pytest.mark.parametrize("key", ["prompt_template", "answer_template"])
@pytest.mark.parametrize("template", ["{wrod}:", "{", '{"json": 1}', "{metadata[x]}", "{}"])
def test_a_template_with_an_unknown_field_lists_them(load: Load, key: str, template: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(WORDS, **{key: template})
    assert caught.value.key == f"data.{key}"
    assert "answer, difficulty, metadata, question" in str(caught.value)
    assert "word" in str(caught.value)


def test_a_long_prompt_is_an_error_or_skipped(load: Load, jsonl: Any) -> None:
    rows = [{"prompt": "x" * n, "answer": "y"} for n in range(1, 41)]
    source = SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows))
    with pytest.raises(
        ConfigError, match=r"data\.max_prompt_tokens=30: wanted \d\d.*s, row 31 has 'xxx"
    ):
        load(source, max_prompt_tokens=30)
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens=20: wanted at most \d+.*'xxx"):
        load(source, max_context=50, max_new_tokens=20)
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens=50: wanted less than"):
        load(source, max_context=50, max_new_tokens=50)
    data = load(source, max_prompt_tokens=30, skip_unusable_rows=True)
    assert data.dropped == {"a prompt that is too long": 10}
    assert len(data.train) + len(data.eval) == 30
    assert max(len(i.prompt_ids) for i in data.train + data.eval) == 30


def test_skipping_in_a_generated_source_draws_more(load: Load) -> None:
    data = load(WORDS, max_prompt_tokens=6, skip_unusable_rows=True, **SPELL)
    assert (len(data.train), len(data.eval)) == (50, 10)
    assert data.dropped["a prompt that is too long"] > 0
    with pytest.raises(ConfigError, match=r"data\.eval_size"):
        load(WORDS, max_prompt_tokens=2, skip_unusable_rows=True, **SPELL)


def test_a_mixture_shares_sizes_by_weight(load: Load, jsonl: Any) -> None:
    sources = {
        "words": SourceConfig(name="spell_backward", weight=2),
        "sums": SourceConfig(name="chain_sum", weight=1),
        "file": SourceConfig(kind=SourceKind.jsonl, name=jsonl(ROWS), weight=1),
    }
    data = load(sources=sources, size=90, eval_size=22)
    assert data.weights == {"words": 0.5, "sums": 0.25, "file": 0.25}
    train = [item.source for item in data.train]
    held_out = [item.source for item in data.eval]
    assert {name: train.count(name) for name in sources} == {"words": 60, "sums": 30, "file": 35}
    assert {name: held_out.count(name) for name in sources} == {"words": 11, "sums": 6, "file": 5}


def test_a_prompt_of_two_sources_counts_once(load: Load, jsonl: Any) -> None:
    same = SourceConfig(kind=SourceKind.jsonl, name=jsonl(ROWS))
    with pytest.raises(ConfigError, match=r"data\.eval_size=10: .*source b .* has 0 different"):
        load(sources={"a": same, "b": same})


def test_sources_are_asked_for(load: Load, jsonl: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources"):
        load(sources={})


def test_characters_that_the_tokenizer_lacks_are_reported(
    load: Load, jsonl: Any, caplog: Any
) -> None:
    rows = [{"prompt": f"{n} Ä", "answer": "y"} for n in range(30)]
    load(SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows)))
    assert "20 of 20 training items hold characters that the tokenizer does not know" in caplog.text
