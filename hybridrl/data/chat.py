"""Lists of messages through a tokenizer's chat template: roles, tools, who wrote which token."""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError, DataConfig
from hybridrl.data.left_out import REASONING, left_out
from hybridrl.environments.task import ChatMessage
from hybridrl.models.control_tokens import ControlTokens

ROLES = ("system", "developer", "user", "assistant", "tool")

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPENED = re.compile(r"<think>\s*$")
"""A thought that a prompt opens for the assistant."""
_CLOSED = re.compile(r"</think>\s*$")
_WRITTEN_BY_MODELS = re.compile("think|thought|reason|tool|call|arg|channel|python", re.IGNORECASE)
"""Control tokens with these words are a model's own markers, not a template's structure."""
_QUESTION: ChatMessage = {"role": "user", "content": "Q"}
_ANSWER: ChatMessage = {"role": "assistant", "content": "xANSWERx"}


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
        if message.get("weight") == 0:  # OpenAI's files leave out a turn by it
            raise place.refuse("messages without weight=0: every turn of the assistant is trained")
        _check_calls(message, place)
        messages.append({**message, "content": content or ""})
    return messages


def _check_calls(message: ChatMessage, place: Place) -> None:
    """Raise ConfigError for a call whose arguments are neither an object nor the JSON of one."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        if arguments and not isinstance(_parsed(arguments), Mapping):
            raise place.refuse(
                f"calls whose arguments are an object or its JSON, not {str(arguments)[:60]!r}"
            )


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


def template_text(config: DataConfig) -> str | None:
    """The text of `data.chat_template`, which names a file or is the template itself.

    Raises ConfigError for a file that cannot be read.
    """
    key, wanted = "data.chat_template", config.chat_template
    if wanted is None:
        return None
    if not config.chat:
        raise ConfigError(key, wanted, "null with data.chat=false, which uses no template")
    text = wanted
    if "{" not in wanted and "\n" not in wanted:
        try:
            text = Path(wanted).expanduser().read_text("utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                key, wanted, f"a file with a template, or its text ({reason})"
            ) from None
    return text


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
        self.control = ControlTokens(tokenizer)
        self.tools_place = Place("", "", "")
        """Where the tools come from that it is given, for the message of a refusal."""
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

        Control tokens that the messages spell are marked: `ids` makes text of them, and
        `control.plain` takes the marks out. Raises ConfigError where the template cannot take the
        messages, or leaves the tools out.
        """
        try:
            text = self.render(messages, tools, prompt)
            bare = self.render(messages, None, prompt) if tools else None
        except Exception as error:  # templates raise their errors in jinja's classes
            reason = " ".join(str(error).split())[:200]
            raise place.refuse(f"messages that the chat template takes: {reason}") from error
        if text == bare:
            raise ConfigError(
                "model.path", self.tokenizer.name_or_path, _no_tools(self.tools_place)
            )
        return text

    def check_system(self, prompt: str | None) -> None:
        """Raise ConfigError where the template leaves out `data.system_prompt`."""
        message = {"role": "system", "content": "xSYSTEMx"}
        if prompt is not None and (
            self._probe([_QUESTION]) and "xSYSTEMx" not in self._probe([message, _QUESTION])
        ):
            name = self.tokenizer.name_or_path
            allowed = f"null: the chat template of {name} has no system messages"
            raise ConfigError("data.system_prompt", prompt, allowed)

    def render(self, messages: Sequence[ChatMessage], tools: Any, prompt: bool) -> str:
        """As `text`, with the template's own errors."""
        guarded = [self._guarded(message) for message in self._as_wanted(messages)]
        text = self._apply(guarded, self.control.guard(tools), prompt)
        return text + self.header if prompt else text

    def _apply(self, messages: Any, tools: Any, prompt: bool) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt
        )
        return text

    def _probe(self, messages: Sequence[ChatMessage], prompt: bool = False) -> str:
        """The template's text of a short conversation; empty where it does not take it."""
        try:
            return self._apply(messages, None, prompt)
        except Exception:  # templates raise their errors in jinja's classes
            return ""

    @functools.cached_property
    def header(self) -> str:
        """What the template writes before an answer and leaves out of a prompt, though it is asked.

        Without it, a model would have to write the header of its own turn.
        """
        asked, prompt = self._probe([_QUESTION]), self._probe([_QUESTION], prompt=True)
        whole = self._probe([_QUESTION, _ANSWER])
        if asked != prompt or not whole.startswith(asked):
            return ""
        header, answer, _ = whole[len(asked) :].partition(_ANSWER["content"])
        return header if header.strip() and answer else ""

    @functools.cached_property
    def _structure(self) -> frozenset[str]:
        """Control tokens that the template writes around turns: never part of an answer."""
        named = self.tokenizer.special_tokens_map.values()
        own = {token for token in named if isinstance(token, str)}
        texts = self._probe([_QUESTION], prompt=True), self._probe([_QUESTION, _ANSWER])
        own |= {token for token in self.control.spellings if any(token in x for x in texts)}
        return frozenset(token for token in own if not _WRITTEN_BY_MODELS.search(token))

    def _guarded(self, message: ChatMessage) -> ChatMessage:
        """The message with control tokens that it spells marked as text.

        Of an assistant's, those alone that the template writes around turns.
        """
        only = self._structure if message["role"] == "assistant" else None
        role = {"role": message["role"]}
        return {**self.control.guard(message, only), **role}

    def without_end(self, content: str) -> str:
        """What an assistant wrote, without a token of the template's at its end."""
        text = content.rstrip()
        end = next((token for token in self._structure if text.endswith(token)), None)
        return content if end is None else text.removesuffix(end)

    def misfit(self, prompt: str, content: str) -> str | None:
        """Why an assistant's content does not go on where the text of its prompt ends."""
        if _OPENED.search(prompt) and "</think>" not in content:
            return (
                "the chat template opens a thought with <think>, which the response does not close"
            )
        if _CLOSED.search(prompt) and "<think>" in content:
            return (
                "the chat template closes a thought with </think>, and the response opens another"
            )
        return None

    def answer(self, prompt: str, content: str) -> str:
        """What follows the text of a prompt where the assistant writes `content`, as a text.

        A thought that the prompt opens is not opened twice.
        """
        content = self.control.guard(content, self._structure)
        opened = _OPENED.search(prompt)
        if opened and content.lstrip().startswith("<think>"):
            inner = content.lstrip().removeprefix("<think>")
            return inner.removeprefix(opened[0].removeprefix("<think>"))
        return content

    def _as_wanted(self, messages: Sequence[ChatMessage]) -> list[ChatMessage]:
        """Messages whose calls have arguments in the form that the template writes out.

        In datasets they are an object, or its JSON: both mean the same.
        """
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        form = json.dumps if self.wants_text else _parsed
        return [with_arguments(message, form) for message in messages]

    @functools.cached_property
    def _calls(self) -> tuple[str, str]:
        """A short conversation with a call, with its arguments as an object and as JSON."""
        call = {"type": "function", "id": "call00001", "function": {"name": "xNAMEx"}}
        answer = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "A"}
        texts = []
        for arguments in ({"xKEYx": "xVALUEx"}, '{"xKEYx": "xVALUEx"}'):
            call["function"] = {"name": "xNAMEx", "arguments": arguments}
            turn = {"role": "assistant", "content": "", "tool_calls": [call]}
            texts.append(self._probe([_QUESTION, turn, answer]))
        return texts[0], texts[1]

    @property
    def wants_text(self) -> bool:
        """Whether the template wants the arguments of a call as JSON, and would misprint an object.

        DeepSeek's joins them to a text.
        """
        as_object, as_text = self._calls
        return "xVALUEx" in as_text and ("xVALUEx" not in as_object or "'xKEYx'" in as_object)

    @property
    def takes_calls(self) -> bool:
        """Whether `tool_calls` of a turn are in its text, as far as the template can be asked."""
        texts = [text for text in self._calls if text]
        return not texts or any("xVALUEx" in x or "xNAMEx" in x for x in texts)

    def left_out(self, messages: Sequence[ChatMessage], text: str) -> list[str]:
        """Names of what of `messages` is not in their rendered `text`."""
        calls = any(message.get("tool_calls") for message in messages)
        names = left_out(messages, text)
        return [*names, "tool_calls"] if calls and not self.takes_calls else names

    def conversation(
        self,
        messages: Sequence[ChatMessage],
        place: Place,
        tools: list[dict[str, Any]] | None,
        end: int,
        after: int = 0,
    ) -> Segments:
        """The tokens of a whole conversation; a turn of the assistant's ends with the token `end`.

        Its first `after` messages are a prompt, whoever wrote them, and nothing follows its last
        turn of the assistant's.

        Who wrote them is read off the template's `{% generation %}` marks. Without marks, or where
        they hold less than was written, it is the text that a turn adds to the prompt before it.
        Where the template leaves out what the assistant wrote, a last turn of plain text is encoded
        as it is. Raises ConfigError where another turn is rewritten or left out.
        """
        turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= after]
        if self._marks and not after:
            marked = self._marked(messages, place, tools)
            if marked is not None:
                return marked
        messages = messages[: turns[-1] + 1]
        whole, done = self.text(messages, place, tools), ""
        ids: list[int] = []
        written: list[bool] = []
        for number in turns:
            before = self.text(messages[:number], place, tools, prompt=True) if number else ""
            through = self.text(messages[: number + 1], place, tools)
            stays = whole.startswith(through) and through.startswith(before)
            lost = self.left_out([messages[number]], through[len(before) :]) if stays else []
            if not before.startswith(done) or ((lost or not stays) and number < turns[-1]):
                raise place.refuse(_not_by_turns(number, lost))
            head = self.ids(before[len(done) :])
            if lost or not stays:
                turn = [*self.ids(self._own_turn(messages[number], before, place, lost)), end]
            else:
                turn = self.ids(through[len(before) :])
            answered = turn.index(end) + 1 if end in turn else len(turn)
            ids += [*head, *turn]
            written += [False] * len(head) + [True] * answered + [False] * (len(turn) - answered)
            done = through
        return Segments(tuple(ids), tuple(written))

    def _own_turn(
        self, message: ChatMessage, before: str, place: Place, lost: Sequence[str]
    ) -> str:
        """A last turn that the template does not render as it was written: its own text.

        Raises ConfigError where it is more than text, or does not go on where its prompt ends.
        """
        content = str(message["content"])
        if message.get("tool_calls") or any(message.get(name) for name in REASONING):
            what = (
                f"leaves out {', '.join(lost)}" if lost else "changes the text before such a turn"
            )
            raise place.refuse(
                "turns of text, with thoughts in the content as <think>...</think>: the chat "
                f"template {what}"
            )
        if misfit := self.misfit(before, content):
            raise place.refuse(f"responses that go on where their prompt ends: {misfit}")
        return self.answer(before, content)

    def _marked(
        self, messages: Sequence[ChatMessage], place: Place, tools: list[dict[str, Any]] | None
    ) -> Segments | None:
        """The tokens by the template's marks; None where these do not hold all that was written.

        So where messages spell control tokens, which transformers' mask would take as such.
        """
        text = self.text(messages, place, tools)
        if self.control.plain(text) != text:
            return None
        encoded = self.tokenizer.apply_chat_template(
            self._as_wanted(messages),
            tools=tools,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, written = encoded["input_ids"], tuple(map(bool, encoded["assistant_masks"]))
        if not any(written):
            raise place.refuse("a chat template whose {% generation %} marks hold the answers")
        told = self.tokenizer.decode([id for id, own in zip(ids, written, strict=True) if own])
        assistants = [message for message in messages if message["role"] == "assistant"]
        return None if self.left_out(assistants, told) else Segments(tuple(ids), written)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text of this template, which has its own special tokens."""
        return self.ids_of([text])[0]

    def ids_of(self, texts: Sequence[str]) -> list[list[int]]:
        """As `ids`, of many texts."""
        options = {"add_special_tokens": False, "verbose": False}
        return self.control.ids(texts, lambda plain: self.tokenizer(plain, **options)["input_ids"])


def _not_by_turns(number: int, lost: Sequence[str]) -> str:
    """What is allowed where an earlier turn is not trained as it was written."""
    if lost:
        told = f"leaves out {', '.join(lost)}, which only a last turn can keep"
    else:
        told = "changes the text before it"
    return (
        "a chat template with {% generation %} marks, or one that renders a conversation turn by "
        f"turn: turn {number + 1} {told}"
    )


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
    row = f" ({place.where})" if place.where else ""
    return (
        "a model whose chat template takes tools, or data.chat_template with one that does, or no"
        f" tools: {place.key}={place.column} has some{row}"
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
