"""Tokens between turns against full renderings, with the chat templates that TRL ships."""

import ast
import re
from typing import Any

import pytest
from foreign import Sources

from hybridrl.config import ConfigError
from hybridrl.data.tool_forms import call_form
from hybridrl.data.turns import TurnTemplate
from hybridrl.environments.tool_calls import CallForm, ToolCall, find_calls
from hybridrl.models.tiny import make_char_tokenizer

pytestmark = pytest.mark.contracts

SPECIAL = re.compile(
    r"<\|?[a-z_]*\|?(?:start|end|tool|turn|im|call|channel)[a-z_]*\|?>|<\|[\w▁]+\|>|<\uff5c[\w▁]+\uff5c>"
    r"|</?s>|\[/?[A-Z_]{3,}\]"
)
WITHOUT_CALLS = (
    "cohere", "deepseek_r1_distill", "gemma", "gemma3", "llama3", "phi3", "phi3_5",
)  # fmt: skip
WITH_CALLS = (
    "gemma4", "glm4moe", "gptoss", "lfm2_v2", "llama3_1", "llama3_2", "nemotron_3_nano",
    "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_8", "qwen3_instruct_2507",
)  # fmt: skip
ONE_CALL = ("llama3_1", "llama3_2")
MARK = "777"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "a number"}},
            "required": ["a"],
        },
    },
}


def tokenizer_of(template: str) -> Any:
    """A character tokenizer with the special tokens that a template writes."""
    tokenizer = make_char_tokenizer("".join(map(chr, range(32, 127))) + "\n", 4096)
    tokenizer.bos_token = "<s>"
    special = {*SPECIAL.findall(template), "<|user|>", "<|assistant|>"}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(special)})
    tokenizer.chat_template = template
    return tokenizer


def call(id: str) -> dict[str, Any]:
    return {"type": "function", "id": id, "function": {"name": "add", "arguments": {"a": 777}}}


def answer(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "add", "tool_call_id": id, "content": content}


ASKED = [{"role": "user", "content": "Q?"}]
IDS = ["call00001", "call00002"]
CASES = {
    "text": ({"content": MARK}, [{"role": "user", "content": "More"}], None),
    "text, tools": ({"content": MARK}, [{"role": "user", "content": "More"}], [TOOL]),
    "one result": ({"content": "", "tool_calls": [call(IDS[0])]}, [answer(IDS[0], "3")], [TOOL]),
    "two results": (
        {"content": "", "tool_calls": [call(id) for id in IDS]},
        [answer(id, "34"[i]) for i, id in enumerate(IDS)],
        [TOOL],
    ),
}


@pytest.mark.parametrize(
    ("family", "case"),
    [(family, "text") for family in WITHOUT_CALLS]
    + [
        (family, case)
        for family in WITH_CALLS
        for case in CASES
        if case != "two results" or family not in ONE_CALL
    ],
)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut off"])
def test_what_follows_a_turn_is_what_the_template_puts_there(
    trl: Sources, family: str, case: str, cut: bool
) -> None:
    """From the last text of the turn on; a turn cut off lacks the tokens that end it."""
    tokenizer = tokenizer_of((trl.root / f"trl/chat_templates/{family}.jinja").read_text())
    turn, reply, tools = CASES[case]
    messages = [*ASKED, {"role": "assistant", **turn}]

    def tail(messages: list[Any], opens: bool) -> str:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=opens
        )
        return text.rpartition(MARK)[2]

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    special = set(tokenizer.all_special_ids)
    written = ids(tail(messages, False).removesuffix("<eos>").rstrip())
    wanted = ids(tail([*messages, *reply], True))
    while cut and written and written[-1] in special:
        written.pop()
    turn_ids = [*ids(MARK), *written]
    composed = [*written, *TurnTemplate(tokenizer, tools or ()).between(turn_ids, reply)]
    if family == "gptoss" and not cut and not turn.get("tool_calls"):
        # It ends its last turn otherwise than earlier ones; what was written stays.
        assert tokenizer.decode(composed[:1]) == "<|return|>"
        assert tokenizer.decode(wanted[:1]) == "<|end|>"
        composed[0] = wanted[0]
    assert tokenizer.decode(composed) == tokenizer.decode(wanted)
    assert composed == wanted


def test_templates_without_tools_are_known(trl: Sources) -> None:
    for family in WITHOUT_CALLS:
        tokenizer = tokenizer_of((trl.root / f"trl/chat_templates/{family}.jinja").read_text())
        if family in ("cohere", "gemma", "gemma3", "phi3", "phi3_5"):
            with pytest.raises(ConfigError, match=r"a model or data\.chat_template for tools"):
                TurnTemplate(tokenizer, [TOOL]).check(family)


FORMS = {
    "deepseekv3": "deepseek_v3",
    "glm4moe": "glm45",
    "gptoss": "openai",
    "lfm2_v2": "lfm2",
    "llama3_1": "llama3_json",
    "llama3_2": "llama3_json",
    "nemotron_3_nano": "qwen3_coder",
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "qwen3_5_think": "qwen3_coder",
    "qwen3_8": "qwen3_coder",
    "qwen3_instruct_2507": "hermes",
}
OPENING = ("nemotron_3_nano", "qwen3_5_think", "qwen3_8")
"""Templates whose prompts begin the model's thoughts."""


@pytest.mark.parametrize("family", FORMS)
def test_calls_are_read_in_the_form_that_a_family_writes(trl: Sources, family: str) -> None:
    tokenizer = tokenizer_of((trl.root / f"trl/chat_templates/{family}.jinja").read_text())
    form = call_form("auto", tokenizer, True, [TOOL])
    assert form.name == FORMS[family]
    assert form.thoughts_end == ("</think>" if family in OPENING else "")


def test_gemma_4_wants_a_response_schema(trl: Sources) -> None:
    tokenizer = tokenizer_of((trl.root / "trl/chat_templates/gemma4.jinja").read_text())
    with pytest.raises(ConfigError, match=r"environment\.tool_calls=auto: .*call:probe_tool"):
        call_form("auto", tokenizer, True, [TOOL])


def test_a_schema_of_trl_reads_what_its_family_writes(trl: Sources) -> None:
    """GLM's: the others want jmespath, which is not installed."""
    tree = trl.tree("trl.chat_template_utils")
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "glm4moe_schema"
    )
    schema = {"schema": ast.literal_eval(value)}
    form = CallForm(parser="hybridrl.data.foreign_parsers:by_schema", settings=schema)
    text = (
        "\n<think>hm</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>777</arg_value>\n"
        "</tool_call>"
    )
    for each in (form, CallForm("glm45")):
        assert find_calls(text, [TOOL], each) == [ToolCall("add", {"a": 777})]
