"""The form of a model's calls of tools, asked of its chat template."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hybridrl.config import ConfigError
from hybridrl.data.tool_forms import call_form
from hybridrl.environments.tool_calls import CallForm, ToolCall, find_calls
from hybridrl.models.tiny import make_char_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>"]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
QWEN3 = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls %}<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (  # it wants the arguments as JSON
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls %}"
    "{{ '<~tool▁call▁begin~>' + c.type + '<~tool▁sep~>' + c.function.name + '\n```json\n'"
    " + c.function.arguments + '\n```<~tool▁call▁end~>' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
).replace("~", "\uff5c")
OPENS = QWEN3.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
EMPTY = QWEN3.replace("assistant\n{% endif", "assistant\n<think>\n\n</think>{% endif")
LLAMA = QWEN3.replace("<tool_call>\n", "").replace("\n</tool_call>", "")
CALLS_NONE = QWEN3.split("{% for c")[0] + QWEN3.split("{% endfor %}", 1)[1]
UNKNOWN = QWEN3.replace("tool_call>", "do>")


def tokenizer_of(template: str) -> Any:
    tokenizer = make_char_tokenizer("".join(map(chr, range(32, 127))) + "\n", 4096)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


def form_of(template: str, setting: str = "auto", **attributes: Any) -> CallForm:
    tokenizer = tokenizer_of(template)
    for name, value in attributes.items():
        setattr(tokenizer, name, value)
    return call_form(setting, tokenizer, True, TOOLS)


@pytest.mark.parametrize(
    ("template", "name", "thoughts_end"),
    [
        (QWEN3, "hermes", ""),
        (OPENS, "hermes", "</think>"),
        (EMPTY, "hermes", ""),
        (LLAMA, "llama3_json", ""),
        (DEEPSEEK, "deepseek_v3", "</think>"),
    ],
)
def test_it_is_the_form_that_the_template_writes(
    template: str, name: str, thoughts_end: str
) -> None:
    form = form_of(template)
    assert (form.name, form.thoughts_end, form.parser) == (name, thoughts_end, "")


def test_a_template_that_writes_no_calls_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert form_of(CALLS_NONE) == CallForm()
    assert "writes no calls of tools" in caplog.text
    caplog.clear()
    assert call_form("auto", tokenizer_of(CALLS_NONE), True, ()) == CallForm()
    assert call_form("auto", tokenizer_of(UNKNOWN), False, TOOLS) == CallForm()
    assert not caplog.records


SCHEMA = {
    "type": "array",
    "x-regex-iterator": r"<do>(.*?)</do>",
    "items": {"type": "object", "x-parser": "json"},
}
SCHEMA_CALL = '<do>{"name": "add", "arguments": {"a": 1}}</do>'


def test_an_unknown_form_is_refused_and_read_by_a_schema(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"environment\.tool_calls=auto: .*hermes.*'<do>"):
        form_of(UNKNOWN)
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for form in (form_of(UNKNOWN, response_schema=SCHEMA), form_of(UNKNOWN, str(file))):
        assert find_calls(SCHEMA_CALL, TOOLS, form) == [ToolCall("add", {"a": 1})]


def test_a_form_that_is_named_holds(caplog: pytest.LogCaptureFixture) -> None:
    assert form_of(LLAMA, "pythonic").name == "pythonic"
    assert "environment.tool_calls=pythonic does not read a call as the chat template" in (
        caplog.text
    )


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("qwen", r"tool_calls=qwen: wanted auto, one of qwen3_coder, "),
        ("missing.json", "a file of JSON that can be read"),
        ("vllm:hermes", "an installed vLLM"),
    ],
)
def test_settings_that_are_none(setting: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.tool_parsers", None)
    with pytest.raises(ConfigError, match=error):
        form_of(QWEN3, setting)


def test_a_parser_of_vllm_reads_with_tokenizer_and_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in with vLLM's interface, which `make test-contracts` compares with the sources."""

    class Parser:
        def __init__(self, tokenizer: Any, tools: Any) -> None:
            assert tokenizer.get_vocab()
            self.tools = tools

        def extract_tool_calls(self, text: str, request: Any) -> Any:
            assert request.tools is self.tools
            if text == "broken":
                raise AttributeError("no group")
            function = SimpleNamespace(name="add", arguments=json.dumps({"a": len(text)}))
            call = SimpleNamespace(id="call1", function=function)
            return SimpleNamespace(tool_calls=[call])

    class ReadsTokens(Parser):
        def extract_tool_calls(self, text: str, request: Any) -> Any:
            raise NotImplementedError("it reads tokens")

    class Manager:
        tool_parsers, lazy_parsers = {}, {"mine": ()}

        @staticmethod
        def get_tool_parser(name: str) -> Any:
            if name == "mistral":
                raise ImportError("No module named 'mistral_common'")
            return {"mine": Parser, "openai": ReadsTokens}[name]

    protocol = "vllm.entrypoints.openai.chat_completion.protocol"
    for name, parts in {
        "vllm.tool_parsers": {"ToolParserManager": Manager},
        protocol: {"ChatCompletionRequest": SimpleNamespace},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    tokenizer = tokenizer_of(QWEN3)
    tokenizer.save_pretrained(tmp_path)
    tokenizer.name_or_path = str(tmp_path)
    form = call_form("vllm:mine", tokenizer, True, TOOLS)
    for thought in ("<think>so</think>", "[THINK]so[/THINK]", "<seed:think>so</seed:think>"):
        call = ToolCall("add", {"a": 4}, id="call1")
        assert find_calls(f"{thought}four", TOOLS, form) == [call]
    (call,) = find_calls("broken", TOOLS, form)
    assert call.error == "the call cannot be read (no group)"
    with pytest.raises(
        ConfigError, match=r"vllm:openai: wanted one that reads a text here \(it re"
    ):
        call_form("vllm:openai", tokenizer, True, TOOLS)
    with pytest.raises(ConfigError, match=r"vllm:other: wanted one of vllm:mine"):
        call_form("vllm:other", tokenizer, True, TOOLS)
    with pytest.raises(ConfigError, match=r"vllm:mistral: wanted a parser whose packages are in"):
        call_form("vllm:mistral", tokenizer, True, TOOLS)
