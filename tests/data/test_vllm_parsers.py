"""vLLM's own parsers read calls of tools as the forms of this package do."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
from environments.test_tool_calls import TOOLS, WRITTEN, F
from transformers import AutoTokenizer

from hybridrl.data.tool_forms import call_form
from hybridrl.environments.tool_calls import CallForm, ToolCall, find_calls
from hybridrl.models.tiny import make_char_tokenizer

pytestmark = pytest.mark.vllm

NONE_IN_VLLM = {"minimax", "openai"}
"""The first has no parser there, and the parser of the second reads tokens."""
WRITTEN_THERE = WRITTEN | {"pythonic": "[f(a=1, b='x y')]"}
"""Its parser wants names of arguments."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer that has the marks of all forms as tokens, as their models do."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    texts = "".join(WRITTEN_THERE.values())
    marks = re.findall(r"<\|?[^<>\n=\" ]+>|\[[A-Z_]+\]", texts)
    tokenizer = make_char_tokenizer("".join(sorted({*map(chr, range(32, 127)), *texts})), 4096)
    tokenizer.add_special_tokens({"additional_special_tokens": [*dict.fromkeys(marks), "<think>"]})
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>", "<|python_tag|>"]})
    tokenizer.save_pretrained(path)
    return AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("form", sorted(WRITTEN.keys() - NONE_IN_VLLM))
def test_a_parser_reads_what_the_form_reads(form: str, tokenizer: Any) -> None:
    tools = [{"type": "function", **copy.deepcopy(tool)} for tool in TOOLS]
    for tool in tools:
        tool["function"]["parameters"].setdefault("type", "object")
    of_vllm = call_form(f"vllm:{form}", tokenizer, False, tools)

    def read(text: str, by: CallForm) -> list[ToolCall]:
        return [ToolCall(x.name, x.arguments) for x in find_calls(text, tools, by)]

    text = WRITTEN_THERE[form]
    assert read(text, of_vllm) == read(text, CallForm(form)) == [F]
    for none in ("It is 5.", f"<think>{text}</think>It is 5."):
        assert read(none, of_vllm) == read(none, CallForm(form)) == []
