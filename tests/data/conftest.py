"""A character tokenizer and a way to load data with it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from hybridrl.config import DataConfig, SourceConfig
from hybridrl.data import Data, load_data
from hybridrl.data.prompts import RowUses
from hybridrl.models.tiny import make_char_tokenizer

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_char_tokenizer(ALPHABET, 4096)


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    with_template = make_char_tokenizer(ALPHABET, 4096)
    with_template.chat_template = CHAT_TEMPLATE
    return with_template


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerFast) -> Callable[..., Data]:
    """`load(source, ...)`: data of one source named `s`, or of `sources=...`."""

    def run(source: SourceConfig | None = None, **settings: object) -> Data:
        remaining = dict(settings)
        max_context = remaining.pop("max_context", 1024)
        max_new_tokens = remaining.pop("max_new_tokens", 24)
        used = remaining.pop("tokenizer", tokenizer)
        uses = {name: remaining.pop(name) for name in ("columns", "targets", "generates")
                if name in remaining}  # fmt: skip
        chosen = {"uses": RowUses(**uses), "reserved": remaining.pop("reserved", ())}
        chosen |= {key: remaining.pop(key, None) for key in ("opening", "vocab_size")}
        chosen["known"] = remaining.pop("known", {})
        if source is not None:
            remaining["sources"] = {"s": source}
        config = DataConfig(**{"size": 50, "eval_size": 10, **remaining})
        limits = {"max_context": max_context, "max_new_tokens": max_new_tokens}
        return load_data(config, used, **limits, **chosen)

    return run


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[[list[dict]], str]:
    """Write rows to a JSONL file; returns its path."""
    import json

    def write(rows: list[dict]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        return str(path)

    return write
