"""The calls of tools in a model's text, in the forms that families of models write."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call; where the model has written it wrongly, `error` says how."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    id: str = ""
    error: str = ""


def find_calls(text: str) -> list[ToolCall]:
    """The calls in the text of a turn, in order; none where the model asks for nothing.

    The forms: `<tool_call>{...}</tool_call>` (Qwen, Hermes), with `<function=name>` in it (Qwen3
    Coder), `[TOOL_CALLS][{...}]` (Mistral), `<|python_tag|>{...}` or an object alone (Llama 3), and
    `[name(a=1)]` (Llama 4 and 3.2). A form that has begun and is none gives a call with an `error`.
    """
    for begin, end in _TAGGED:
        if begin in text:
            return [call for body in _bodies(text, begin, end) for call in _of_body(body)]
    stripped = text.strip()
    if _OBJECT.match(stripped):
        return list(_of_body(stripped))
    if match := _PYTHONIC.search(stripped):
        return _of_python(match[1])
    return []


_TAGGED = (
    ("<tool_call>", "</tool_call>"),
    ("[TOOL_CALLS]", ""),
    ("<|python_tag|>", "<|eom_id|>"),
)
_OBJECT = re.compile(r'\[?\s*\{\s*"(name|type|function)"\s*:')
_PYTHONIC = re.compile(r"(\[\s*[A-Za-z_]\w*\(.*\)\s*\])\s*$", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>]+)>(.*?)(?:</function>\s*)?$", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _bodies(text: str, begin: str, end: str) -> Iterator[str]:
    for piece in text.split(begin)[1:]:
        yield (piece.partition(end)[0] if end else piece).strip()


def _of_body(body: str) -> Iterator[ToolCall]:
    if match := _FUNCTION.match(body):
        arguments = {name.strip(): _value(text) for name, text in _PARAMETER.findall(match[2])}
        yield ToolCall(match[1].strip(), arguments)
        return
    try:
        value, _ = json.JSONDecoder().raw_decode(body)
    except (ValueError, RecursionError) as error:
        yield ToolCall("", error=f"the call is no JSON ({error})")
        return
    for entry in value if isinstance(value, list) else [value]:
        yield _of_object(entry)


def _of_object(entry: Any) -> ToolCall:
    if isinstance(entry, dict) and isinstance(entry.get("function"), dict):
        entry = {**entry["function"], "id": entry.get("id", "")}
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return ToolCall("", error="a call has a name and arguments")
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(entry["name"], error=f"the arguments are no JSON ({error})")
    if not isinstance(arguments, dict):
        return ToolCall(entry["name"], error="the arguments are no object")
    return ToolCall(entry["name"], arguments, id=str(entry.get("id") or ""))


def _of_python(text: str) -> list[ToolCall]:
    """Calls in Python's syntax, with literals as arguments."""
    try:
        tree = ast.parse(text, mode="eval").body
        assert isinstance(tree, ast.List)
        return [_of_node(node) for node in tree.elts]
    except (SyntaxError, ValueError, MemoryError, RecursionError, AssertionError) as error:
        return [ToolCall("", error=f"the call cannot be read ({error})")]


def _of_node(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError("no call of a tool")
    positional = tuple(ast.literal_eval(argument) for argument in node.args)
    named = {str(x.arg): ast.literal_eval(x.value) for x in node.keywords}
    return ToolCall(node.func.id, named, positional)


def _value(text: str) -> Any:
    """A parameter in tags: JSON where it is, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
