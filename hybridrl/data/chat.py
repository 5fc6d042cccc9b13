"""Lists of messages through a tokenizer's chat template: roles, tools, who wrote which token."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.environments.task import ChatMessage

ROLES = ("system", "developer", "user", "assistant", "tool")

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value of a row stands, for the message of a refusal."""

    key: str
    """The config key of its source, with the setting that names the column."""
    column: str
    where: str
    """`row 3 of part-2.jsonl`; empty for what is no row's."""

    def refuse(self, allowed: str) -> ConfigError:
        """The refusal of the value: what is `allowed`."""
        at = f" ({self.where})" if self.where else ""
        return ConfigError(self.key, self.column, f"{allowed}{at}")


@dataclass(frozen=True, slots=True)
class Segments:
    """Tokens of a conversation, and for each whether the assistant wrote it."""

    ids: tuple[int, ...]
    written: tuple[bool, ...]

    @property
    def start(self) -> int:
        """The index of the first token that the assistant wrote."""
        return self.written.index(True)

    def cut(self) -> "Segments":
        """Without the tokens after the assistant's last one, which predict nothing."""
        stop = len(self.written) - self.written[::-1].index(True)
        return Segments(self.ids[:stop], self.written[:stop])


def read_messages(value: Any, place: Place) -> list[ChatMessage]:
    """The messages of a row: their roles are known, their contents text.

    Fields that are null are left out, since columns of Parquet and of datasets have them in every
    message. Raises ConfigError, which names the row.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise place.refuse("a list of one message or more, each with role and content")
    messages = []
    for entry in value:
        message = as_message(_without_null(entry)) if isinstance(entry, Mapping) else {}
        role = message.get("role")
        if role not in ROLES:
            raise place.refuse(f"messages with a role of {', '.join(ROLES)}, not {role!r}")
        content = content_text(message.get("content"))
        if content is None and not message.get("tool_calls"):
            raise place.refuse(f"messages whose content is text (one of {role} has none)")
        messages.append({**message, "content": content or ""})
    return messages


def as_message(entry: Mapping[str, Any]) -> ChatMessage:
    """A message with `role` and `content`; ShareGPT's has `from` and `value`, and its speakers."""
    if "from" not in entry or "role" in entry:
        return dict(entry)
    others = {key: x for key, x in entry.items() if key not in ("from", "value")}
    speaker = {"human": "user", "gpt": "assistant"}.get(entry["from"], entry["from"])
    return {"role": speaker, "content": entry.get("value"), **others}


def read_prompt(value: Any, place: Place) -> list[ChatMessage]:
    """As `read_messages`, for messages that the assistant is to answer."""
    messages = read_messages(value, place)
    if messages[-1]["role"] not in ("user", "tool"):
        last = messages[-1]["role"]
        raise place.refuse(f"messages that end with user or tool, not with {last}: it answers them")
    return messages


def read_tools(value: Any, place: Place) -> list[dict[str, Any]] | None:
    """The tools of a row, a list of JSON schemas or its text; None where there are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except json.JSONDecodeError as error:
            raise place.refuse(f"a list of tools, or its JSON ({error})") from None
    if value is None:
        return None
    tools = _without_null(value)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise place.refuse("a list of tools, each a JSON schema")
    return tools or None


def has_assistant(messages: Sequence[ChatMessage]) -> bool:
    """Whether any message is the assistant's."""
    return any(message["role"] == "assistant" for message in messages)


class ChatTemplate:
    """The chat template of a tokenizer. Raises ConfigError where it has none."""

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            allowed = f"false, since {tokenizer.name_or_path} has no chat template"
            raise ConfigError("data.chat", True, allowed)
        self.tokenizer = tokenizer
        self._marks = bool(_GENERATION.search(str(tokenizer.chat_template)))

    def text(
        self,
        messages: Sequence[ChatMessage],
        place: Place,
        tools: list[dict[str, Any]] | None = None,
        *,
        prompt: bool = False,
    ) -> str:
        """The text of messages; with `prompt` it ends where the assistant begins to write.

        Raises ConfigError where the template cannot take them, or leaves the tools out.
        """
        try:
            text = self._render(messages, tools, prompt)
            bare = self._render(messages, None, prompt) if tools else None
        except Exception as error:  # templates raise their errors in jinja's classes
            reason = " ".join(str(error).split())[:200]
            raise place.refuse(f"messages that the chat template takes: {reason}") from error
        if text == bare:
            raise ConfigError("model.path", self.tokenizer.name_or_path, _no_tools(place))
        return text

    def _render(self, messages: Any, tools: Any, prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            self._as_wanted(messages), tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return text

    def _as_wanted(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Messages whose calls have arguments in the form that the template writes out.

        In datasets they are an object, or its JSON: both mean the same.
        """
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        form = json.dumps if self.wants_text else _parsed
        return [with_arguments(message, form) for message in messages]

    @functools.cached_property
    def wants_text(self) -> bool:
        """Whether the template wants the arguments of a call as JSON, and would misprint an object.

        It is asked with a short conversation: DeepSeek's joins them to a text.
        """
        call = {"type": "function", "id": "call00001", "function": {"name": "f"}}
        answer = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "A"}
        texts = []
        for arguments in ({"xKEYx": "xVALUEx"}, '{"xKEYx": "xVALUEx"}'):
            call["function"] = {"name": "f", "arguments": arguments}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            messages = [{"role": "user", "content": "Q"}, turn, answer]
            try:
                texts.append(self.tokenizer.apply_chat_template(messages, tokenize=False))
            except Exception:  # templates raise their errors in jinja's classes
                texts.append("")
        as_object, as_text = texts
        return "xVALUEx" in as_text and ("xVALUEx" not in as_object or "'xKEYx'" in as_object)

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        place: Place,
        tools: list[dict[str, Any]] | None,
        end: int,
        after: int = 0,
    ) -> Segments:
        """The tokens of a whole conversation; a turn of the assistant's ends with the token `end`.

        Its first `after` messages are a prompt, whoever wrote them.

        Who wrote them is read off the template's `{% generation %}` marks. Without marks it is the
        text that a turn adds to the prompt before it. Raises ConfigError where the template
        rewrites earlier turns, so that there is no such text.
        """
        if self._marks and not after:
            return self._marked(messages, place, tools)
        whole, start = self.text(messages, place, tools), 0
        ids: list[int] = []
        written: list[bool] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < after:
                continue
            before = self.text(messages[:number], place, tools, prompt=True) if number else ""
            through = self.text(messages[: number + 1], place, tools)
            stays = whole.startswith(through) and through.startswith(before)
            if not stays or len(before) < start:
                raise place.refuse(
                    "a chat template with {% generation %} marks, or one that renders a"
                    f" conversation turn by turn: turn {number + 1} changes the text before it"
                )
            head, turn = self.ids(whole[start : len(before)]), self.ids(through[len(before) :])
            answered = turn.index(end) + 1 if end in turn else len(turn)
            ids += [*head, *turn]
            written += [False] * len(head) + [True] * answered + [False] * (len(turn) - answered)
            start = len(through)
        return Segments(tuple(ids), tuple(written))

    def _marked(
        self, messages: Sequence[ChatMessage], place: Place, tools: list[dict[str, Any]] | None
    ) -> Segments:
        self.text(messages, place, tools)  # for its refusals
        encoded = self.tokenizer.apply_chat_template(
            self._as_wanted(messages),
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        written = tuple(map(bool, encoded["assistant_masks"]))
        if not any(written):
            raise place.refuse("a chat template whose {% generation %} marks hold the answers")
        return Segments(tuple(encoded["input_ids"]), written)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text of this template, which has its own special tokens."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def with_arguments(message: ChatMessage, form: Callable[[Any], Any]) -> ChatMessage:
    """The message with the arguments of its calls in another form."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            arguments = form(_parsed(function["arguments"]))
            call = {**call, "function": {**function, "arguments": arguments}}
        changed.append(call)
    return {**message, "tool_calls": changed}


def _parsed(arguments: Any) -> Any:
    """Arguments as an object, where they are one or its JSON."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def _no_tools(place: Place) -> str:
    return (
        f"a model whose chat template takes tools, or rows without any: {place.key} has some"
        f" ({place.where})"
    )


def content_text(content: Any) -> str | None:
    """A message's text; parts of text are joined, others are none."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        texts = [entry.get("text") if isinstance(entry, Mapping) else None for entry in content]
        if all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    return None


def _without_null(value: Any) -> Any:
    """A nested value without the fields that are null."""
    if isinstance(value, Mapping):
        return {key: _without_null(x) for key, x in value.items() if x is not None}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_null(x) for x in value]
    return value
