"""The forms in which families of models write a call of a tool, by vLLM's names for them."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Form:
    """A form: one of its `markers`, then a head, then the arguments.

    They are JSON (the arguments of the head's `name`, or whole calls where it has none), pairs that
    `parameter` matches, or a list in Python's syntax up to the text `closing`.
    """

    markers: tuple[str, ...]
    head: re.Pattern[str]
    parameter: re.Pattern[str] | None = None
    closing: str = ""


def _form(*markers: str, head: str, parameter: str = "", closing: str = "") -> Form:
    pairs = re.compile(parameter, re.DOTALL) if parameter else None
    return Form(markers, re.compile(head), pairs, closing)


_NAME = r"(?P<name>[\w.-]+)"
_BEGIN, _SEPARATOR = "<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁sep\uff5c>"  # DeepSeek's
_DSML = "\uff5cDSML\uff5c"
_INVOKE = r'invoke name="?(?P<name>[^">]+)"?>\s*'

FORMS = {
    "qwen3_coder": _form(
        "<tool_call>", "<function=",
        head=r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]+)>\s*",
        parameter=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*",
    ),
    "glm45": _form(
        "<tool_call>",
        head=rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>)",
        parameter=r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>\s*",
    ),
    "hermes": _form("<tool_call>", head=r"<tool_call>\s*"),  # Qwen 2.5 and 3, too
    "mistral": _form(
        "[TOOL_CALLS]",
        head=rf"\[TOOL_CALLS\]\s*(?:{_NAME}\s*(?:\[CALL_ID\](?P<id>\w+)\s*)?(?:\[ARGS\])?\s*)?",
    ),
    "deepseek_v3": _form(
        _BEGIN, head=rf"{_BEGIN}\s*function{_SEPARATOR}(?P<name>[^\n<]+)\s*```json\s*"
    ),
    "deepseek_v31": _form(
        _BEGIN, head=rf"{_BEGIN}(?P<name>[^\n<]+){_SEPARATOR}\s*(?!\w+\s*```)"
    ),
    "deepseek_v32": _form(
        f"<{_DSML}invoke name=",
        head=f"<{_DSML}{_INVOKE}",
        parameter=rf'<{_DSML}parameter name="(?P<key>[^"]+)"(?: string="(?P<string>\w+)")?>'
        rf"(?P<value>.*?)</{_DSML}parameter>\s*",
    ),
    "minimax_m2": _form(
        "<invoke name=",
        head="<" + _INVOKE,
        parameter=r'<parameter name="(?P<key>[^"]+)">(?P<value>.*?)</parameter>\s*',
    ),
    "minimax": _form("<tool_calls>", head=r"<tool_calls>\s*"),  # MiniMax-M1
    "kimi_k2": _form(
        "<|tool_call_begin|>",
        head=r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+)(?::\d+)?)\s*"
        r"<\|tool_call_argument_begin\|>\s*",
    ),
    "openai": _form(  # gpt-oss
        "to=functions.",
        head=rf"to=functions\.{_NAME}[^<{{]*(?:<\|(?:channel|constrain)\|>[^<{{]*)*<\|message\|>\s*",
    ),
    "llama3_json": _form("<|python_tag|>", head=r"<\|python_tag\|>\s*"),
    "pythonic": _form("<|python_start|>", head=r"<\|python_start\|>", closing="<|python_end|>"),
    "lfm2": _form(
        "<|tool_call_start|>", head=r"<\|tool_call_start\|>", closing="<|tool_call_end|>"
    ),
}  # fmt: skip
"""Where several forms match a marker, the first counts."""

BARE = {
    "llama3_json": re.compile(r'\[?\s*\{\s*"(?:name|type|function)"\s*:'),
    "pythonic": re.compile(r"(\[\s*[A-Za-z_]\w*\(.*\)\s*\])\s*$", re.DOTALL),
}
"""Forms that need no marker: what begins, or ends, all that is said."""

THOUGHTS = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|channel|>analysis<|message|>": "<|end|>",  # gpt-oss
    "<|channel>thought": "<channel|>",  # Gemma 4
}
"""What begins thoughts, and what ends them."""

ENDS = ("</think>", "[/THINK]", "</seed:think>")
"""What ends nothing but thoughts, which some templates begin in some of their prompts only."""

TRIED = re.compile(r"(?:<\|start\|>assistant|<\|channel\|>\w+)\s*\Z")
"""What stands before `to=functions.` where a model calls; elsewhere it may stand in any text."""

MARKERS = re.compile(
    "|".join(
        sorted(
            map(
                re.escape,
                {*THOUGHTS, *ENDS, *(mark for form in FORMS.values() for mark in form.markers)},
            )
        )
    )
)
"""All that begins a call or thoughts, or ends these."""
