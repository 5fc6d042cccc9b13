"""The ends of what a model writes: of config.json, generation_config.json, tokenizer, template."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from hybridrl.config import TinyModelConfig
from hybridrl.flow.executor import Sampling
from hybridrl.models.load import end_token_ids
from hybridrl.models.tiny import make_tiny_model
from hybridrl.workers.sampling import SamplingTexts

CHATML = (
    "{% for m in messages %}|{{ m.content }}~{% endfor %}{% if add_generation_prompt %}|{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, TinyModelConfig(alphabet="abcAQ|~"), seed=0)
    return path


def change(folder: Path, file: str, eos: Any) -> None:
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**settings, "eos_token_id": eos}))


def ends(folder: Path, template: str | None = None) -> set[int]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template:
        tokenizer.chat_template = template
        tokenizer.add_special_tokens({"additional_special_tokens": ["~"]})
    of_files = end_token_ids(str(folder), AutoConfig.from_pretrained(folder))
    texts = SamplingTexts(tokenizer, template is not None, [], of_files)
    return set(texts.params(Sampling(4)).stop_token_ids)


def test_all_ends_of_all_files_count(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eos = tokenizer.eos_token_id
    a, b, tilde = (tokenizer.convert_tokens_to_ids(text) for text in "ab~")
    assert ends(folder) == {eos}
    change(folder, "generation_config.json", [eos, a])
    assert ends(folder) == {eos, a}
    change(folder, "config.json", b)
    assert ends(folder) == {eos, a, b}
    assert ends(folder, CHATML) == {eos, a, b, tilde}
    change(folder, "generation_config.json", [eos, 10_000])  # no token of the vocabulary
    assert ends(folder) == {eos, b}
    (folder / "generation_config.json").unlink()
    assert ends(folder) == {eos, b}
    change(folder, "config.json", None)
    assert ends(folder) == {eos}
