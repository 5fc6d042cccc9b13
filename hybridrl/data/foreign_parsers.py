"""Calls of tools as transformers' response schemas and vLLM's tool parsers read them."""

import functools
from collections.abc import Mapping
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.environments.tool_calls import Tools


def by_schema(text: str, tools: Tools, *, schema: Mapping[str, Any]) -> list[Any]:
    """The calls that a response schema, or from 5.13 on a response template, finds in a text.

    Raises what transformers raises for a text that the schema does not describe.
    """
    try:
        from transformers.utils.chat_parsing import parse_response
    except ImportError:
        from transformers.utils.chat_parsing_utils import recursive_parse

        parsed = recursive_parse(text, dict(schema))
    else:
        parsed = parse_response(text, dict(schema), prefix="", tools=list(tools))
    calls = parsed.get("tool_calls") if isinstance(parsed, dict) else parsed
    return list(calls or ())


def by_vllm(text: str, tools: Tools, *, name: str, tokenizer: str) -> list[Any]:
    """The calls that vLLM's tool parser `name`, of a folder's tokenizer, finds in a text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    messages = [{"role": "user", "content": ""}]
    request = ChatCompletionRequest(model="policy", messages=messages, tools=list(tools))
    parser = vllm_parser(name)(_tokenizer(tokenizer), request.tools)
    calls = parser.extract_tool_calls(text, request).tool_calls
    return [
        {"name": call.function.name, "arguments": call.function.arguments, "id": call.id}
        for call in calls
    ]


def vllm_parser(name: str) -> Any:
    """The class of vLLM's tool parser `name`. Raises ConfigError where there is none, or a package
    that it imports is missing.
    """
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        allowed = f"a form, or an installed vLLM ({error})"
        raise ConfigError("environment.tool_calls", f"vllm:{name}", allowed) from error
    try:
        return ToolParserManager.get_tool_parser(name)
    except KeyError:
        names = sorted({*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers})
        raise ConfigError(
            "environment.tool_calls", f"vllm:{name}", [f"vllm:{x}" for x in names]
        ) from None
    except (ImportError, RuntimeError) as error:  # several read the tokens of mistral-common
        allowed = f"a parser whose packages are installed ({error})"
        raise ConfigError("environment.tool_calls", f"vllm:{name}", allowed) from error


@functools.cache
def _tokenizer(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
