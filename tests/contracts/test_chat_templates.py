"""Tokens between turns against full renderings, with the chat templates that TRL ships."""

import re
from typing import Any

import pytest
from foreign import Sources

from hybridrl.data.turns import TurnTemplate
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
    from hybridrl.config import ConfigError

    for family in WITHOUT_CALLS:
        tokenizer = tokenizer_of((trl.root / f"trl/chat_templates/{family}.jinja").read_text())
        if family in ("cohere", "gemma", "gemma3", "phi3", "phi3_5"):
            with pytest.raises(ConfigError, match="a model for tools"):
                TurnTemplate(tokenizer, [TOOL]).check(family)
