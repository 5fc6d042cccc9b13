"""Tools: plain functions that the model may call, told by their types and docstrings."""

import asyncio
import inspect
import json
import re
import types
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hybridrl.config import ConfigError
from hybridrl.environments.program import Environment, Model, result_of
from hybridrl.environments.task import ChatMessage, EpisodeTask
from hybridrl.environments.tool_calls import ToolCall, find_calls

Tool = Callable[..., Any]

_PRIMITIVES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    dict: "object",
    list: "array",
    type(None): "null",
}
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")


def with_tools(functions: Sequence[Tool], path: str) -> Environment:
    """The environment that calls what the model asks for, until a turn asks for nothing.

    Raises ConfigError for what is no function, has no types, or has the name of another.
    """
    schemas = tuple(schema_of(function, path) for function in functions)
    tools = {function.__name__: function for function in functions}
    if len(tools) < len(functions):
        names = ", ".join(function.__name__ for function in functions)
        raise ConfigError("environment.path", path, f"tools of different names, not {names}")

    async def program(task: EpisodeTask, model: Model, rng: Random) -> None:
        messages: Sequence[ChatMessage] = task.messages
        while True:
            turn = await model.turn(messages)
            calls = find_calls(turn.text, schemas)
            if not calls:
                return
            messages = await all_answered(calls, tools, model)

    return Environment(program, schemas)


async def all_answered(
    calls: Sequence[ToolCall], tools: dict[str, Tool], model: Model
) -> list[ChatMessage]:
    """The messages that answer the calls of a turn, in order.

    The calls run at the same time: tools that are `async` wait together. Plain functions run one
    after the other, in the order of their calls.
    """
    running = [asyncio.ensure_future(answered(call, tools, model)) for call in calls]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:  # the program ends where one of them raises
            task.cancel()


async def answered(call: ToolCall, tools: dict[str, Tool], model: Model) -> ChatMessage:
    """The message that answers a call: the function's value, or what is wrong with the call."""
    message: ChatMessage = {"role": "tool", "name": call.name, "content": ""}
    if call.id:
        message["tool_call_id"] = call.id
    model.replaced += call.replaced
    error = call.error
    if not error and call.name not in tools:
        error = f"there is no tool {call.name!r}, but {', '.join(sorted(tools))}"
    if not error:
        try:
            value = await result_of(tools[call.name](**bound(tools[call.name], call)))
            return {**message, "content": value if isinstance(value, str) else _as_json(value)}
        except Exception as raised:  # the model is told, as a user would be
            error = f"{type(raised).__name__}: {raised}"
    return {**message, "content": f"error: {error}"}


def bound(tool: Tool, call: ToolCall) -> dict[str, Any]:
    """The arguments of a call by name; raises TypeError where the function does not take them."""
    signature = inspect.signature(tool)
    arguments = signature.bind(**call.arguments).arguments
    hints = get_type_hints(tool)
    for name, value in arguments.items():
        if not fits(value, hints[name]):
            raise TypeError(f"{name}={value!r} is no {_as_json(type_schema(hints[name]))}")
    return dict(arguments)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type, less what is in its entries."""
    origin, options = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in options
    if origin in (Union, types.UnionType):
        return any(fits(value, option) for option in options)
    kind = origin or hint
    if kind is float:
        kind = (int, float)
    return isinstance(value, kind) and not (isinstance(value, bool) and hint is not bool)


def schema_of(function: Tool, path: str) -> dict[str, Any]:
    """The JSON schema of a tool, in OpenAI's form.

    Its description and those of its arguments are the docstring's, whose `Args:` may have a line
    `name: what it is` for each. Raises ConfigError for what cannot be told to a model.
    """
    if not callable(function) or not hasattr(function, "__name__"):
        raise ConfigError("environment.path", path, f"functions, not {function!r:.60}")
    name, hints = function.__name__, get_type_hints(function)
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            allowed = f"functions with parameters by name ({name} has {parameter})"
            raise ConfigError("environment.path", path, allowed)
        if parameter.name not in hints:
            allowed = f"functions whose parameters have types ({name}.{parameter.name} has none)"
            raise ConfigError("environment.path", path, allowed)
        try:
            schema = type_schema(hints[parameter.name])
        except TypeError as error:
            allowed = f"functions with types that JSON has ({name}.{parameter.name}: {error})"
            raise ConfigError("environment.path", path, allowed) from None
        if parameter.name in described:
            schema["description"] = described[parameter.name]
        properties[parameter.name] = schema
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties, "required": required}
    told = {"name": name, "description": summary, "parameters": parameters}
    return {"type": "function", "function": told}


def type_schema(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type; raises TypeError for one that JSON does not have."""
    origin, options = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if origin is Literal:
        return {**type_schema(type(options[0])), "enum": list(options)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [type_schema(option) for option in options]}
    kind = origin or hint
    if kind not in _PRIMITIVES:
        raise TypeError(getattr(hint, "__name__", str(hint)))
    schema: dict[str, Any] = {"type": _PRIMITIVES[kind]}
    if kind is list and options:
        schema["items"] = type_schema(options[0])
    return schema


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """What comes before `Args:`, in one line, and what is said of each argument."""
    before, _, after = text.partition("Args:")
    arguments: dict[str, str] = {}
    for line in after.splitlines()[1:]:
        if not line.startswith((" ", "\t")):
            break  # another section
        if match := _ARGUMENT.match(line):
            arguments[match[1]] = match[2].strip()
    return " ".join(before.split()), arguments


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
