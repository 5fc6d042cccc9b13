"""The calls of tools in a model's text: where they are, and what they ask for."""

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.dotted import load_function
from hybridrl.config.surrogates import encodable, without_surrogates
from hybridrl.environments.call_forms import BARE, ENDS, FORMS, MARKERS, THOUGHTS, TRIED, Form


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call; where the model has written it wrongly, `error` says how."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str = ""
    replaced: int = 0
    """Lone surrogates that it had, each of which is a question mark."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """How the model writes its calls: in a form of `FORMS`, or as a foreign parser reads them."""

    name: str = ""
    """The form; empty: any form."""
    parser: str = ""
    """`package.module:function` in place of a form: of a text, the tools and its `settings`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    thoughts_end: str = ""
    """What ends the thoughts that a prompt has begun, such as `</think>`; empty without them."""


Tools = Sequence[Mapping[str, Any]]
"""JSON schemas in OpenAI's form."""

_of_process = CallForm()


def configure(form: CallForm) -> None:
    """Set the form in which the model of this process writes its calls."""
    global _of_process
    _of_process = form


def find_calls(text: str, tools: Tools, form: CallForm | None = None) -> list[ToolCall]:
    """The calls of `tools` in the text of a turn, in order; none where the model asks for nothing.

    Thoughts hold no calls. Without the marker of a form it is a call only where it names one of the
    tools. Otherwise it is an answer that looks like one. Behind a marker the model has tried to
    call: what cannot be read there is a call with an `error`.

    `form` is that of the process where it is None.
    """
    form = form or _of_process
    known = {str(tool["function"]["name"]): _properties(tool) for tool in tools}
    if form.thoughts_end:
        text = text.partition(form.thoughts_end)[2]
    if not known:
        return []
    if not form.parser:
        names = [form.name] if form.name else list(FORMS)
        return list(map(_sendable, _Reader(text, known, names).calls()))
    parse: Any = load_function("environment.tool_calls", form.parser)
    try:
        entries = parse(_without_thoughts(text), tools, **form.settings)
        return list(map(_sendable, map(_of_object, entries)))
    except (ImportError, NotImplementedError):  # it reads no text here: told before the run
        raise
    except Exception as error:  # foreign code
        return [ToolCall("", error=f"the call cannot be read ({str(error)[:200]})")]


class _Reader:
    """Reads a text from marker to marker, in the forms that are named."""

    def __init__(
        self, text: str, known: Mapping[str, Mapping[str, Any]], names: Sequence[str]
    ) -> None:
        self.text, self.known, self.names = text, known, names

    def calls(self) -> list[ToolCall]:
        """All calls that have a marker; without any those that need none."""
        calls: list[ToolCall] = []
        position = said = 0  # `said` is where the thoughts end
        while marker := MARKERS.search(self.text, position):
            position = marker.end()
            if closing := THOUGHTS.get(marker[0]):
                end = self.text.find(closing, position)
                position = said = len(self.text) if end < 0 else end + len(closing)
                continue
            if marker[0] in ENDS:  # the thoughts had begun without a mark
                calls, said = [], position
                continue
            forms = [FORMS[name] for name in self.names if marker[0] in FORMS[name].markers]
            heads = ((form, form.head.match(self.text, marker.start())) for form in forms)
            form, head = next((pair for pair in heads if pair[1]), (None, None))
            if form is not None and head is not None:
                behind, position = self._behind(form, head)
                calls += behind
            elif forms and (
                marker[0] != "to=functions." or TRIED.search(self.text, 0, marker.start())
            ):
                calls.append(ToolCall("", error="the call cannot be read"))
        return calls or self._bare(self.text[said:].strip())

    def _behind(self, form: Form, head: re.Match[str]) -> tuple[list[ToolCall], int]:
        """The calls behind a head, and where they end."""
        groups, position = head.groupdict(), head.end()
        name = (groups.get("name") or "").strip()
        if form.closing:
            return self._python(position, form.closing)
        if form.parameter is None:
            is_empty = self.text[position:].lstrip().startswith("<") or (
                position == len(self.text) and head[0].rstrip().endswith(_BEHIND_IS_A_STOP)
            )
            if name and is_empty:
                return [ToolCall(name, id=groups.get("id") or "")], position
            values, position, error = _json_values(self.text, position, once=bool(name))
            if name:
                values = [{**groups, "name": name, "arguments": value} for value in values]
            calls = list(map(_of_object, values))
            return [*calls, ToolCall(name, error=error)] if error else calls, position
        arguments = {}
        while pair := form.parameter.match(self.text, position):
            key, position = pair["key"].strip(), pair.end()
            is_text = pair.groupdict().get("string") == "true"
            kinds = {"string"} if is_text else _kinds(self.known.get(name, {}).get(key))
            arguments[key] = _value(pair["value"], kinds)
        if not _ENDED.match(self.text, position):
            behind = self.text[position : position + 80]
            return [ToolCall(name, error=f"the call cannot be read at {behind!r}")], position
        return [ToolCall(name, arguments)], position

    def _python(self, position: int, closing: str) -> tuple[list[ToolCall], int]:
        """A list of calls up to the text `closing`, which may stand in a string, too."""
        end, error = position, "it is empty"
        while end < len(self.text):
            stop = self.text.find(closing, end)
            stop = len(self.text) if stop < 0 else stop
            end = stop + len(closing)
            try:
                return self._of_python(self.text[position:stop]), end
            except ValueError as raised:
                error = str(raised)
        return [ToolCall("", error=f"the call cannot be read ({error})")], len(self.text)

    def _bare(self, said: str) -> list[ToolCall]:
        """Calls of tools that there are, without a marker: JSON first, or a list at the end."""
        if "llama3_json" in self.names and BARE["llama3_json"].match(said):
            values, _, error = _json_values(said, 0)
            if error:
                tried = re.findall(r'"name"\s*:\s*"([^"]*)"', said)
                return [ToolCall("", error=error)] if self._knows(tried) else []
            calls = list(map(_of_object, values))
            if self._knows(call.name for call in calls) and all(map(_is_call, values)):
                return calls
        if "pythonic" in self.names and (match := BARE["pythonic"].search(said)):
            try:
                calls = self._of_python(match[1])
                return calls if self._knows(call.name for call in calls) else []
            except ValueError as error:
                tried = re.findall(r"^\[\s*(\w+)\(", match[1])
                text = f"the call cannot be read ({error})"
                return [ToolCall("", error=text)] if self._knows(tried) else []
        return []

    def _knows(self, names: Iterable[str]) -> bool:
        return any(name in self.known for name in names)

    def _of_python(self, text: str) -> list[ToolCall]:
        """A list of calls in Python's syntax, with literals as arguments. Raises ValueError."""
        try:
            tree = _JsonNames().visit(ast.parse(text.strip(), mode="eval")).body
        except (SyntaxError, MemoryError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if not isinstance(tree, ast.List):
            raise ValueError("no list of calls")
        return [self._of_node(node) for node in tree.elts]

    def _of_node(self, node: ast.expr) -> ToolCall:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise ValueError("no call of a tool")
        name = node.func.id
        named = {str(x.arg): ast.literal_eval(x.value) for x in node.keywords}
        values = [ast.literal_eval(argument) for argument in node.args]
        places = list(self.known.get(name, ()))[: len(values)]
        if name in self.known and (len(places) < len(values) or named.keys() & set(places)):
            return ToolCall(name, error=f"{name} takes {', '.join(self.known[name]) or 'nothing'}")
        return ToolCall(name, dict(zip(places, values, strict=False)) | named)


class _JsonNames(ast.NodeTransformer):
    """Makes values of the names that JSON has for them, which models write in Python, too."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


_DECODER = json.JSONDecoder()
_BEHIND_IS_A_STOP = ("[ARGS]", "<|message|>")
"""Marks of arguments in forms whose calls have no mark of their end but a stop token."""
_ENDED = re.compile(r"\s*</")
"""What is behind the last parameter of a call."""
_ANOTHER = re.compile(r"\s*[;,]?\s*(?=\{)")


def _json_values(text: str, position: int, *, once: bool = False) -> tuple[list[Any], int, str]:
    """The JSON objects at a position, one after another or in a list; their end; what is wrong."""
    values: list[Any] = []
    while True:
        try:
            value, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            return values, position, f"the call is no JSON ({error})"
        values += value if isinstance(value, list) and not once else [value]
        another = _ANOTHER.match(text, position)
        if once or another is None:
            return values, position, ""
        position = another.end()


def _of_object(entry: Any) -> ToolCall:
    if isinstance(entry, Mapping) and isinstance(entry.get("function"), Mapping):
        entry = {**entry["function"], "id": entry.get("id", "")}
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        return ToolCall("", error="a call has a name and arguments")
    arguments = entry.get("arguments", entry.get("parameters"))
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(entry["name"], error=f"the arguments are no JSON ({error})")
    if not isinstance(arguments, dict):
        return ToolCall(entry["name"], error="the arguments are no object")
    return ToolCall(entry["name"], arguments, id=str(entry.get("id") or ""))


def _sendable(call: ToolCall) -> ToolCall:
    """The call as JSON can send it: a number that is not finite, or a set, is an error."""
    try:
        json.dumps(call.arguments, allow_nan=False)
        (name, arguments, call_id, error), replaced = without_surrogates(
            [call.name, call.arguments, call.id, call.error]
        )
    except (ValueError, TypeError, RecursionError) as raised:
        return ToolCall(encodable(call.name), error=f"the arguments are no JSON ({raised})")
    return ToolCall(name, arguments, call_id, error, replaced)


def _is_call(entry: Any) -> bool:
    """Whether an object has what calls have, and nothing else."""
    keys = {"id", "type", "function", "name", "arguments", "parameters"}
    return isinstance(entry, dict) and entry.keys() <= keys


def _kinds(schema: Any) -> set[str]:
    """The types that a parameter's JSON schema allows, as far as it names them."""
    if not isinstance(schema, Mapping):
        return set()
    named = schema.get("type") or []
    kinds = {named} if isinstance(named, str) else set(map(str, named))
    for options in (schema.get(key) or () for key in ("anyOf", "oneOf", "allOf")):
        kinds = kinds.union(*map(_kinds, options))
    if not kinds and all(isinstance(value, str) for value in schema.get("enum") or [0]):
        kinds = {"string"}
    return kinds


def _value(text: str, kinds: set[str]) -> Any:
    """A parameter in tags: text where the tool wants a text alone, else JSON where it is.

    Templates write some values as Python does: `True`, `None`, `['a']`.
    """
    if kinds == {"string"}:
        return text
    if kinds == {"string", "null"}:
        return None if text.strip() in ("null", "None") else text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    if "string" not in kinds:
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return text
        if isinstance(value, bool | list | dict | None):
            return value
    return text


def _without_thoughts(text: str) -> str:
    for begin, end in THOUGHTS.items():
        pattern = f"{re.escape(begin)}.*?(?:{re.escape(end)}|\\Z)"
        text = re.sub(pattern, "", text, flags=re.DOTALL)
    return text


def _properties(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict((tool["function"].get("parameters") or {}).get("properties") or {})
