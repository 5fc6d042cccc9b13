"""Values, files and tokenizers that are unusual, and read right."""

import datetime
import decimal
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.data import Data
from hybridrl.models.tiny import make_char_tokenizer

Load = Callable[..., Data]

MOMENT = datetime.datetime(2024, 2, 29, 12, 30)
VALUES = {
    "when": (MOMENT, "2024-02-29 12:30:00"),
    "day": (MOMENT.date(), "2024-02-29"),
    "price": (decimal.Decimal("1.50"), "1.50"),
    "large": (2**60 + 1, str(2**60 + 1)),
    "blob": (b"\x00\xff", None),
}


@pytest.mark.parametrize("column", VALUES)
def test_values_of_parquet_stay_what_they_are(load: Load, tmp_path: Path, column: str) -> None:
    """In rows for judges, which go to other processes; as text where a text follows from them."""
    row = {name: value for name, (value, _) in VALUES.items()}
    rows = [{"prompt": f"{n}?", "answer": "x", **row} for n in range(6)]
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    source = SourceConfig(kind=SourceKind.parquet, name=str(file))
    value, text = VALUES[column]
    template = f"{{question}} {{{column}}}"
    if text is None:
        with pytest.raises(ConfigError, match=r"prompt_template=.*row 1: bytes is no text"):
            load(source, prompt_template=template)
        template = "{question}"
    for item in load(source, eval_size=2, prompt_template=template).train:
        assert item.item[column] == value
        assert pickle.loads(pickle.dumps(item)) == item
        assert text is None or item.prompt.endswith(f"? {text}")


@pytest.mark.parametrize("name", ["a b.jsonl", "[x]*.jsonl", "k=v,{w}.jsonl", "ü'\"$#.jsonl"])
def test_names_of_files_may_have_any_character(load: Load, tmp_path: Path, name: str) -> None:
    """A file that is there is meant, and no pattern."""
    file = tmp_path / "of users" / name
    file.parent.mkdir()
    file.write_text("".join(f'{{"prompt": "{n}?", "answer": "x"}}\n' for n in range(6)))
    data = load(SourceConfig(kind=SourceKind.jsonl, name=str(file)), eval_size=2)
    assert len(data.train) == 4


def test_csv_as_excel_writes_it(load: Load, tmp_path: Path) -> None:
    """A mark of UTF-8, CRLF, quotes twice, line breaks in a cell; semicolons are told."""
    file = tmp_path / "rows.csv"
    lines = "".join(f'"{n}, ""so""\nand?",x\r\n' for n in range(6))
    file.write_bytes(b"\xef\xbb\xbf" + f"prompt,answer\r\n{lines}".encode())
    source = SourceConfig(kind=SourceKind.csv, name=str(file))
    data = load(source, eval_size=2)
    items = [*data.train, *data.eval]
    assert {item.prompt for item in items} == {f'{n}, "so"\nand?' for n in range(6)}
    file.write_text("prompt;answer\nq;x\n")
    with pytest.raises(ConfigError, match=r"_column=.*wanted one of prompt;answer"):
        load(source)


@pytest.mark.parametrize("chat", [False, True])
def test_a_tokenizer_that_adds_ends_ends_no_prompt(load: Load, jsonl: Any, chat: bool) -> None:
    tokenizer = make_char_tokenizer("".join(map(chr, range(32, 127))) + "\n", 4096)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    assert tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id
    rows = [{"prompt": f"{n}?", "answer": "x", "chosen": "y"} for n in range(6)]
    data = load(
        SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows)), eval_size=2, tokenizer=tokenizer,
        chat=chat, columns=("chosen",),
    )  # fmt: skip
    for item in data.train:
        assert tokenizer.decode(item.prompt_ids) == item.prompt
        assert tokenizer.decode(item.target_ids) == "x<eos>"
        assert tokenizer.decode(item.columns["chosen"]) == "y<eos>"
