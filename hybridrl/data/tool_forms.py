"""Which form a model writes its calls of tools in: asked of its chat template."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.data.foreign_parsers import vllm_parser
from hybridrl.environments.call_forms import FORMS, THOUGHTS
from hybridrl.environments.tool_calls import CallForm, ToolCall, Tools, find_calls
from hybridrl.models.control_tokens import special_tokens

log = logging.getLogger(__name__)

KEY = "environment.tool_calls"

_PROBE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "a word"},
                "number": {"type": "integer", "description": "a number"},
            },
            "required": ["word", "number"],
        },
    },
}
_ARGUMENTS = {"word": "xWORDx", "number": 7}


def call_form(setting: str, tokenizer: Any, chat: bool, tools: Tools) -> CallForm:
    """How the model writes calls of `tools`, by `environment.tool_calls` and its chat template.

    `auto` is the known form that reads what the template writes for a call, else the tokenizer's
    response schema. Where the template writes no calls, or there is none (`chat` false), it is any
    form. Raises ConfigError for a form that nothing here reads.
    """
    turn, begun = _probe(tokenizer) if chat and tools else ("", "")
    schema = getattr(tokenizer, "response_template", None)
    schema = schema or getattr(tokenizer, "response_schema", None)
    if setting != "auto":
        named = _named(setting, tokenizer)
        # An empty turn is read, too: a parser that wants tokens is refused here.
        if not _reads(turn, named) and turn:
            log.warning(
                "%s=%s does not read a call as the chat template writes it, %r",
                KEY, setting, turn[:200],
            )  # fmt: skip
        return replace(named, thoughts_end=begun)
    if not tools:
        return CallForm()
    known = [CallForm(name) for name in FORMS] + ([_of_schema(schema)] if schema else [])
    form = next((form for form in known if turn and _reads(turn, form)), None)
    if form is None and "xWORDx" in turn:
        allowed = (
            f"{_allowed()}, since none of these forms is that of the chat template: "
            f"{turn.strip()[:200]!r}"
        )
        raise ConfigError(KEY, setting, allowed)
    if form is None:
        form = _of_schema(schema) if schema else CallForm()
        if chat and not schema:
            log.warning(
                "the chat template of %s writes no calls of tools: they are read in any form that "
                "is known (%s)", tokenizer.name_or_path, KEY,
            )  # fmt: skip
    log.info("calls of tools are read in %s", form.name or form.parser or "any form")
    return replace(form, thoughts_end=begun)


def _named(setting: str, tokenizer: Any) -> CallForm:
    """The form that a user has named."""
    if setting in FORMS:
        return CallForm(setting)
    if setting.startswith("vllm:"):
        name = setting.removeprefix("vllm:")
        parser = vllm_parser(name)
        try:
            parser(tokenizer, None)
        except Exception as error:  # parsers refuse tokenizers without their tokens, each otherwise
            raise ConfigError(KEY, setting, f"a parser for this tokenizer ({error})") from error
        settings = {"name": name, "tokenizer": str(tokenizer.name_or_path)}
        return CallForm(parser="hybridrl.data.foreign_parsers:by_vllm", settings=settings)
    if not setting.endswith(".json"):
        raise ConfigError(KEY, setting, f"auto, {_allowed()}")
    try:
        schema = json.loads(Path(setting).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(KEY, setting, f"a file of JSON that can be read ({error})") from error
    if not isinstance(schema, dict):
        raise ConfigError(KEY, setting, "a response schema, which is a JSON object")
    return _of_schema(schema)


def _of_schema(schema: Mapping[str, Any]) -> CallForm:
    return CallForm(parser="hybridrl.data.foreign_parsers:by_schema", settings={"schema": schema})


def _allowed() -> str:
    return (
        f"one of {', '.join(FORMS)}, vllm:PARSER, or a .json file with a response schema of "
        "transformers"
    )


def _reads(turn: str, form: CallForm) -> bool:
    """Whether a form finds the probe's call in the turn."""
    try:
        calls = find_calls(turn, [_PROBE], form)
    # Some schemas want jmespath, and some of vLLM's parsers tokens in place of a text.
    except (ImportError, NotImplementedError) as error:
        name = f"vllm:{form.settings['name']}" if "name" in form.settings else "a response schema"
        raise ConfigError(KEY, name, f"one that reads a text here ({error})") from error
    return [replace(call, id="") for call in calls] == [ToolCall("probe_tool", _ARGUMENTS)]


def _probe(tokenizer: Any) -> tuple[str, str]:
    """A turn that calls the probe, and what ends the thoughts that every prompt has begun.

    Either is empty where there is none.
    """
    question = {"role": "user", "content": "Q"}
    answer = {"role": "tool", "name": "probe_tool", "tool_call_id": "call00001", "content": "A"}
    prompts = [_rendered(tokenizer, [question], opens=True)]
    turn = ""
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        function = {"name": "probe_tool", "arguments": arguments}
        call = {"type": "function", "id": "call00001", "function": function}
        asked: list[dict[str, Any]] = [
            question,
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        whole = _rendered(tokenizer, asked, opens=False)
        text = _added(prompts[0], whole)
        if "xWORDx" in text and "{'word'" not in text:  # Python's text of an object is no call
            turn = _without_end(text, tokenizer)
            prompts.append(_rendered(tokenizer, [*asked, answer], opens=True))
            break
    begun = {
        next((end for begin, end in THOUGHTS.items() if prompt.rstrip().endswith(begin)), "")
        for prompt in prompts
    }
    return turn, begun.pop() if len(begun) == 1 else ""


def _added(prompt: str, whole: str) -> str:
    """What a text has beyond the prompt, or beyond what both have; a marker is not cut in two."""
    pairs = enumerate(zip(prompt, whole, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(whole)))
    opened = max(whole.rfind("<", 0, start), whole.rfind("[", 0, start))
    if opened >= 0 and not set(whole[opened:start]) & set(">]"):
        start = opened
    return whole[start:]


def _rendered(tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, opens: bool) -> str:
    """The text of messages; empty where the template does not take them."""
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tools=[_PROBE], tokenize=False, add_generation_prompt=opens
        )
    except Exception:  # templates raise their errors in jinja's classes
        return ""
    return text


def _without_end(text: str, tokenizer: Any) -> str:
    """A turn without the special tokens that end it, which a response is read without."""
    text = text.rstrip()
    for end in (tokenizer.eos_token, *special_tokens(tokenizer).values()):
        if end and text.endswith(end):
            return text.removesuffix(end).rstrip()
    return text
