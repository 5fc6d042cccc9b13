"""Calls of tools in a model's text: the forms of families, thoughts, and answers that are none."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.environments.call_forms import FORMS, THOUGHTS
from hybridrl.environments.endpoint import answer_of
from hybridrl.environments.task import ModelTurn
from hybridrl.environments.tool_calls import CallForm, ToolCall, find_calls


def tool(name: str, **kinds: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    return {"function": {"name": name, "parameters": {"properties": properties}}}


TOOLS = [tool("f", a="integer", b="string"), tool("g", a="string"), tool("ping")]
F = ToolCall("f", {"a": 1, "b": "x y"})
JSON = '{"a": 1, "b": "x y"}'

WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "f", "arguments": {JSON}}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x y</arg_value>\n</tool_call>",
    "mistral": "[TOOL_CALLS]f[ARGS]" + JSON,
    "deepseek_v3": "<~tool▁calls▁begin~><~tool▁call▁begin~>function<~tool▁sep~>f\n```json\n"
    f"{JSON}\n```<~tool▁call▁end~><~tool▁calls▁end~>",
    "deepseek_v31": "<~tool▁calls▁begin~><~tool▁call▁begin~>f<~tool▁sep~>"
    f"{JSON}<~tool▁call▁end~><~tool▁calls▁end~>",
    "deepseek_v32": '<~DSML~function_calls>\n<~DSML~invoke name="f">\n'
    '<~DSML~parameter name="a" string="false">1</~DSML~parameter>\n'
    '<~DSML~parameter name="b" string="true">x y</~DSML~parameter>\n'
    "</~DSML~invoke>\n</~DSML~function_calls>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">x y</parameter>\n</invoke>\n</minimax:tool_call>',
    "minimax": f'<tool_calls>\n{{"name": "f", "arguments": {JSON}}}\n</tool_calls>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    f"<|tool_call_argument_begin|>{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "openai": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + JSON,
    "llama3_json": f'{{"name": "f", "parameters": {JSON}}}',
    "pythonic": "[f(1, b='x y')]",
    "lfm2": "<|tool_call_start|>[f(a=1, b='x y')]<|tool_call_end|>",
}  # fmt: skip
# DeepSeek's tokens have a bar of full width.
WRITTEN = {form: text.replace("~", "\uff5c") for form, text in WRITTEN.items()}


def calls(text: str, form: str = "") -> list[ToolCall]:
    return find_calls(text, TOOLS, CallForm(form))


def test_every_form_is_written_here() -> None:
    assert WRITTEN.keys() == FORMS.keys()


@pytest.mark.parametrize("form", WRITTEN)
@pytest.mark.parametrize("named", [True, False], ids=["named", "any"])
def test_a_call_is_read_in_its_form(form: str, named: bool) -> None:
    text = WRITTEN[form]
    (call,) = calls(text, form if named else "")
    assert (call.name, call.arguments, call.error) == ("f", F.arguments, "")


@pytest.mark.parametrize("form", WRITTEN)
def test_no_other_form_reads_it(form: str) -> None:
    """Forms that share a marker with it say that they cannot read it; other forms find nothing."""
    for other in WRITTEN.keys() - {form}:
        assert all(call.error for call in calls(WRITTEN[form], other)), other


@pytest.mark.parametrize("form", WRITTEN)
def test_thoughts_are_no_calls(form: str) -> None:
    begin, end = "<think>", "</think>"
    if form == "openai":
        begin, end = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant"
    text = WRITTEN[form]
    thought = f"{begin}I need <tool_call>, say {text.replace(JSON, '{}')}{end}\n"
    assert [call.arguments for call in calls(thought + text, form)] == [F.arguments]
    assert calls(f"{begin}I may need {text}", form) == []
    assert calls(f"{thought}It is 5.", form) == []


def test_thoughts_that_the_prompt_has_begun_end_once() -> None:
    form = CallForm("hermes", thoughts_end="</think>")
    text = f"I need <tool_call> ...</think>{WRITTEN['hermes']}"
    assert find_calls(text, TOOLS, form) == [F]
    assert find_calls(WRITTEN["hermes"], TOOLS, form) == []  # still in thought
    inside = '<tool_call>{"name": "g", "arguments": {"a": "a </think> b"}}</tool_call>'
    assert calls(inside, "hermes") == [ToolCall("g", {"a": "a </think> b"})]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bingo", "age": 30}',
        '{"name": "f", "age": 30}',
        '{"name": "Bingo", "arguments": {}}',
        '{"type": "dog", "name": "Bingo"}',
        '{"name": "Bingo", "age": 3',
        "[h(1), h(2)]",
        "a list [1, 2] of numbers",
        "[f(1, 2",
        "so h(1) and [see below](f)",
        "It is 5.",
        "",
    ],
)
def test_an_answer_that_looks_like_a_call_is_an_answer(text: str) -> None:
    assert calls(text) == []


@pytest.mark.parametrize("text", ["[f(1), f(2)]", WRITTEN["llama3_json"]])
def test_a_form_without_a_marker_is_read_where_it_is_the_models(text: str) -> None:
    assert calls(text, "hermes") == []
    assert calls(text)


@pytest.mark.parametrize(
    ("text", "form", "expected"),
    [
        ('{"name": "f", "parameters": {"a": 1}}; {"name": "ping", "parameters": {}}',
         "llama3_json", [ToolCall("f", {"a": 1}), ToolCall("ping")]),
        ('<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "ping", "parameters": {}}',
         "llama3_json", [ToolCall("f", {"a": 1}), ToolCall("ping")]),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "123456789"}, {"name": "ping"}]',
         "mistral", [ToolCall("f", {"a": 1}, id="123456789"), ToolCall("ping")]),
        ('[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": 1}[TOOL_CALLS]ping[ARGS]{}',
         "mistral", [ToolCall("f", {"a": 1}, id="123456789"), ToolCall("ping")]),
        (WRITTEN["hermes"] + "\nand\n" + WRITTEN["hermes"], "hermes", [F, F]),
        (WRITTEN["glm45"] + "<tool_call>ping\n</tool_call>", "glm45", [F, ToolCall("ping")]),
        (WRITTEN["minimax_m2"].replace("</minimax", '<invoke name="ping">\n</invoke>\n</minimax'),
         "minimax_m2", [F, ToolCall("ping")]),
        ("<|tool_call_start|>[f(1), g(a='<|tool_call_end|>')]<|tool_call_end|>", "lfm2",
         [ToolCall("f", {"a": 1}), ToolCall("g", {"a": "<|tool_call_end|>"})]),
        ("<function=ping>\n</function>", "qwen3_coder", [ToolCall("ping")]),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [ToolCall("f", {"a": 1})]),
        ('{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}', "",
         [ToolCall("f", {"a": 1})]),
    ],
)  # fmt: skip
def test_several_calls(text: str, form: str, expected: list[ToolCall]) -> None:
    assert calls(text, form) == expected


@pytest.mark.parametrize(
    "form", ["hermes", "mistral", "deepseek_v3", "deepseek_v31", "kimi_k2", "openai", "minimax"]
)
def test_the_end_of_a_call_in_a_json_string_does_not_end_it(form: str) -> None:
    """Nor does the beginning of another one, or a thought."""
    value = 'a</tool_call><tool_call>"}\n```<|call|>[TOOL_CALLS]<think> b'
    text = WRITTEN[form].replace(JSON, json.dumps({"a": 1, "b": value}))
    (call,) = calls(text, form)
    assert (call.arguments, call.error) == ({"a": 1, "b": value}, "")


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "deepseek_v32", "minimax_m2"])
def test_a_text_stays_text_where_the_tool_wants_one(form: str) -> None:
    (call,) = calls(WRITTEN[form].replace("x y", "72"), form)
    assert call.arguments == {"a": 1, "b": "72"}


def test_a_name_that_may_be_cut_off_is_no_call() -> None:
    for text, form in (
        ("[TOOL_CALLS]ping", "mistral"),
        ("<tool_call>\n<function=ping>\n", "qwen3_coder"),
        (WRITTEN["kimi_k2"].split("{")[0], "kimi_k2"),
    ):
        (call,) = calls(text, form)
        assert call.error, text


@pytest.mark.parametrize("form", ["qwen3_coder", "glm45", "deepseek_v32", "minimax_m2"])
def test_a_call_in_tags_is_read_as_a_whole_or_not(form: str) -> None:
    """It never runs with those of its arguments that can be read."""
    text = WRITTEN[form]
    end = re.findall(r"x y\s*(</.*?>)", text)[0]
    before_b = {"qwen3_coder": "<parameter=b", "glm45": "<arg_key>b"}.get(form, 'parameter name="b')
    cut_off = [text[: text.index("x y") + 2], text[: text.index(before_b)].rstrip("<\uff5cDSML")]
    for harmed in (*cut_off, text.replace("x y", f"x {end} y")):
        assert [(call.arguments, bool(call.error)) for call in calls(harmed, form)] == [({}, True)]
    (call,) = calls('<function=f>{"a": 1}</function>', "qwen3_coder")  # Llama 3.1's form
    assert call.error.startswith("the call cannot be read at '{")


TYPED = {
    "text": ({"type": "string"}, {"72": "72", "null": "null", "[1]": "[1]"}),
    "chosen": ({"enum": ["1", "2"]}, {"1": "1"}),
    "perhaps": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"72": "72", "None": None}),
    "listed": ({"type": ["string", "null"]}, {"72": "72", "null": None, "true": "true"}),
    "either": ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, {"72": 72, "True": "True"}),
    "flag": ({"type": "boolean"}, {"True": True, "false": False, "yes": "yes"}),
    "array": ({"type": "array"}, {"['a']": ["a"], "[1, 2]": [1, 2], "[f(": "[f("}),
    "number": ({"type": "number"}, {"1.5": 1.5, "1e3": 1000.0}),
    "any": (True, {"1": 1, "x": "x", "None": None}),
}


@pytest.mark.parametrize("name", TYPED)
def test_a_parameter_in_tags_has_the_type_that_the_tool_wants(name: str) -> None:
    """Templates write `True` for a boolean of Python's, and no quotes around a text."""
    schema, values = TYPED[name]
    typed = [{"function": {"name": "f", "parameters": {"properties": {name: schema}}}}]
    for written, value in values.items():
        text = f"<tool_call><function=f><parameter={name}>{written}</parameter></function>"
        assert find_calls(text, typed) == [ToolCall("f", {name: value})]


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('<tool_call>{"name": "ping", "arguments": null}</tool_call>', "hermes"),
        ('<tool_call>{"name": "ping", "arguments": ""}</tool_call>', "hermes"),
        ("<|channel|>commentary to=functions.ping <|constrain|>json<|message|><|call|>", "openai"),
        ("[TOOL_CALLS]ping[ARGS]", "mistral"),
    ],
)
def test_a_call_without_arguments(text: str, form: str) -> None:
    assert calls(text, form) == [ToolCall("ping")]


@pytest.mark.parametrize("form", WRITTEN)
def test_thoughts_that_have_begun_without_a_mark_end(form: str) -> None:
    """A template may begin them in some of its prompts alone."""
    thought = f"I say {WRITTEN[form].replace(JSON, '{}')}</think>\n"
    assert [call.arguments for call in calls(thought + WRITTEN[form], form)] == [F.arguments]
    assert calls(f"{thought}It is 5.", form) == []


def test_a_form_of_gpt_oss_that_is_cut_off_is_a_call() -> None:
    (call,) = calls("<|channel|>commentary to=functions.f <|constr", "openai")
    assert call.error == "the call cannot be read"
    assert calls("<|channel|>final<|message|>You can write to=functions.f there", "openai") == []


def test_names_of_json_in_a_list_of_python_are_values() -> None:
    assert calls("[g(a=true), g(a=[null])]") == [ToolCall("g", {"a": x}) for x in (True, [None])]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>f 2 and 3", "the call is no JSON"),
        ('<tool_call>{"name": "f", "arguments": {"a"</tool_call>', "the call is no JSON"),
        ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "the arguments are no object"),
        ('<tool_call>{"a": 1}</tool_call>', "a call has a name and arguments"),
        ('{"name": "f", "parameters": {"a": ', "the call is no JSON"),
        ("[f(open('x'))]", "the call cannot be read"),
        ("[f(1, 2, 3)]", "f takes a, b"),
        ("[f(1, a=2)]", "f takes a, b"),
        ("<|tool_call_start|>f", "the call cannot be read"),
        ("<invoke name=>", "the call cannot be read"),
        ('<tool_call>{"name": "f", "arguments": {"b": [1e999]}}', "the arguments are no JSON (Out"),
        ("[g({1})]", "the arguments are no JSON (Object of type set"),
        (WRITTEN["glm45"].replace(">1<", ">NaN<"), "the arguments are no JSON (Out of range"),
    ],
)
def test_a_call_that_has_begun_and_is_none_says_so(text: str, error: str) -> None:
    (call,) = calls(text)
    assert call.error.startswith(error)


@pytest.mark.parametrize("arguments", [r'{"a": "\ud83d."}', r'"{\"a\": \"\\ud83d.\"}"'])
def test_lone_surrogates_of_escapes_are_replaced_and_counted(arguments: str) -> None:
    written = f'<tool_call>{{"name": "g", "arguments": {arguments}}}</tool_call>'
    assert calls(written) == [ToolCall("g", {"a": "?."}, replaced=1)]
    message = answer_of(ModelTurn(written), calls(written), 1, TOOLS)
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": "?."}'


def test_calls_that_are_nested_too_deeply_are_told() -> None:
    deep = "[" * 5000
    (call,) = calls(f"<tool_call>{deep}</tool_call>")
    assert call.error.startswith("the call is no JSON (maximum recursion depth")
    (call,) = calls(json.dumps({"name": "f", "arguments": deep}))
    assert call.error.startswith("the arguments are no JSON (maximum recursion depth")
    tagged = f"<tool_call><function=f><parameter=c>{deep}</parameter></function></tool_call>"
    assert calls(tagged) == [ToolCall("f", {"c": deep})]


def test_a_long_turn_of_nothing_but_markers_is_read_at_once() -> None:
    assert len(calls("<tool_call>" * 20_000)) == 20_000


def test_without_tools_nothing_is_a_call() -> None:
    assert find_calls(WRITTEN["hermes"], []) == []


GEMMA = {
    "type": "object",
    "properties": {
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"<\|tool_call>(.*?)<tool_call\|>",
            "items": {
                "type": "object",
                "properties": {
                    "function": {
                        "type": "object",
                        "x-regex": r"call:(?P<name>\w+)(?P<arguments>\{.*\})",
                        "properties": {
                            "name": {"type": "string"},
                            "arguments": {
                                "type": "object",
                                "x-parser": "gemma4-tool-call",
                                "additionalProperties": {},
                            },
                        },
                    }
                },
            },
        }
    },
}
"""A response schema of transformers below 5.13, as Gemma 4's tokenizer has it."""


def test_a_response_schema_reads_what_transformers_reads() -> None:
    from transformers.utils.chat_parsing_utils import recursive_parse

    text = 'Well <|tool_call>call:f{a:1,b:<|"|>x y<|"|>}<tool_call|>'
    assert recursive_parse(text, GEMMA)["tool_calls"][0]["function"]["arguments"] == F.arguments
    form = CallForm(parser="hybridrl.data.foreign_parsers:by_schema", settings={"schema": GEMMA})
    assert find_calls(text, TOOLS, form) == [F]
    assert find_calls(f"<think>{text}</think>It is 5.", TOOLS, form) == []
    (call,) = find_calls(text.replace("b:", "b"), TOOLS, form)
    assert call.error.startswith("the call cannot be read (Node has JSON parser")


def test_a_client_sees_the_calls_that_are_right_and_the_text_of_others() -> None:
    right, wrong = WRITTEN["hermes"], "<tool_call>{</tool_call>"
    unknown = '<tool_call>{"name": "h", "arguments": {}}</tool_call>'

    def shown(text: str) -> tuple[Any, list[str]]:
        message = answer_of(ModelTurn(text), calls(text), 1, TOOLS)
        names = [call["function"]["name"] for call in message.get("tool_calls", ())]
        return message["content"], names

    assert shown(right) == (None, ["f"])
    assert shown(right + wrong) == (right + wrong, ["f"])
    assert shown(unknown) == (unknown, [])
    assert shown(f"<think>{right}</think>No.") == (f"<think>{right}</think>No.", [])


FRAGMENT = st.sampled_from(
    [*WRITTEN.values(), *(mark for form in FORMS.values() for mark in form.markers), *THOUGHTS,
     *THOUGHTS.values(), "</tool_call>", "<arg_key>", "[ARGS]", "{", "}", "[", "]", '"', ";", JSON,
     "f(", '{"name": ', "</parameter>", "\n", " "]
) | st.text(max_size=5)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(FRAGMENT, max_size=6), form=st.sampled_from(["", *FORMS]))
def test_any_text_has_calls_or_none(pieces: list[str], form: str) -> None:
    """A call that is right names what it asks for; one that is wrong says how."""
    for call in calls("".join(pieces), form):
        assert bool(call.error) or (call.name and isinstance(call.arguments, dict))
