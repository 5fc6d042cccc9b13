"""What a chat template puts between a turn of the model's and the opening of the next one."""

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.data.chat import ChatTemplate
from hybridrl.data.prompts import Ids
from hybridrl.environments.task import ChatMessage
from hybridrl.environments.tool_calls import CallForm
from hybridrl.models.control_tokens import ControlTokens, special_tokens

log = logging.getLogger(__name__)

_TURN = "xTURNENDx"
"""Stands for the end of the model's turn where a template is asked what follows it."""
_ID = "call00001"
"""The id of a call that has none in a reply; Mistral's templates want nine letters or digits."""

Calls = tuple[tuple[str, str], ...]
"""Names and ids of calls of tools."""


class TurnTemplate:
    """Composes the tokens between turns; those that the model wrote are never made anew.

    The template renders a short conversation: a question, a turn, the messages. What stands behind
    the turn are the tokens, from its end-of-turn token to where the model begins again. A template
    may render a turn otherwise once others follow it (Qwen3 leaves its reasoning out). That is not
    followed: the model's tokens stay what they are (`rewrites`).

    Without `chat` a reply is the text of its messages, and nothing is added.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[dict[str, Any]] = (),
        chat: bool = True,
        call_form: CallForm | None = None,
    ) -> None:
        """`tools` are those that the prompt tells of; `call_form` is how turns call them."""
        self.tokenizer, self.tools, self.chat = tokenizer, list(tools) or None, chat
        self.call_form = call_form or CallForm()
        self._special = special_tokens(tokenizer).keys()
        self._bases: dict[Calls, _Base] = {}
        self._ends: set[int] = set()
        self._template: ChatTemplate | None = None
        self._control, self._said = ControlTokens(tokenizer), False
        if chat:
            self._template = ChatTemplate(tokenizer)
            self._base(())
            if self.rewrites:
                log.info(
                    "the chat template of %s renders earlier turns otherwise than they were made; "
                    "a conversation keeps them as they were made", tokenizer.name_or_path,
                )  # fmt: skip

    @property
    def rewrites(self) -> bool:
        """Whether the template changes an earlier turn once another message follows it."""
        turn = {"role": "assistant", "content": f"<think>\nso\n</think>\n\n{_TURN}"}
        alone = self._render([_QUESTION, turn], opens=False)
        later = self._render([_QUESTION, turn, _QUESTION], opens=True)
        return alone.partition(_TURN)[0] != later.partition(_TURN)[0]

    def between(self, turn: Sequence[int], messages: Sequence[ChatMessage]) -> Ids:
        """The tokens after a turn, whose own tokens are `turn`, up to the opening of the next.

        They begin with the end-of-turn token where the turn has none, since it was cut off. Raises
        ValueError for messages that the template does not take.
        """
        if not self.chat:
            return self._ids(self._told("".join(str(m["content"]) for m in messages)))
        try:
            base = self._base(messages)
            text = self._render([_QUESTION, base.turn, *messages], opens=True)
        except Exception as error:  # templates raise their errors in jinja's classes
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"messages that the chat template does not take: {reason}") from error
        tail = text.split(_TURN, base.occurrences)[-1]
        if not tail.startswith(base.body):
            raise ValueError("messages after which the chat template renders a turn otherwise")
        ids = self._ids(tail[len(base.body) :])
        return ids[self._overlap(turn, ids) :]

    def _told(self, text: str) -> str:
        """A reply without a template, which keeps no control token from being one: said once."""
        token = self._control.spelled(text)
        if token and not self._said:
            self._said = True
            log.warning(
                "data.chat=false, and a reply has the control token %r, which is a token there",
                token,
            )
        return text

    def check(self, place: str) -> None:
        """Raise ConfigError, with the model's path, for a template that drops a tool's answer."""
        mark = "xANSWERx"
        message = {"role": "tool", "name": _name(self.tools), "content": mark}
        try:
            kept = mark in self._text(self.between((), [message]))
            reason = "its chat template leaves messages of tools out"
        except ValueError as error:
            kept, reason = False, str(error)
        if not kept:
            allowed = f"a model or data.chat_template for tools ({reason})"
            raise ConfigError("model.path", place, allowed)

    def reply(
        self, turn: Sequence[int], messages: Sequence[ChatMessage], most: int
    ) -> tuple[Ids, bool]:
        """As `between`, at most so many tokens, for which messages are cut; and whether they were.

        What the template itself puts there is not cut.
        """
        messages, was_cut = list(messages), False
        while len(ids := self.between(turn, messages)) > most:
            longest = max(range(len(messages)), key=lambda i: len(messages[i]["content"]))
            content = self._content_ids(messages[longest]["content"])
            if not content:
                break
            kept = content[: max(0, len(content) - (len(ids) - most))]
            text = self._text(kept)
            if len(text) >= len(messages[longest]["content"]):  # tokens that decode to more
                text = text[: len(messages[longest]["content"]) - 1]
            messages[longest] = {**messages[longest], "content": text}
            was_cut = True
        return ids, was_cut

    def _base(self, messages: Sequence[ChatMessage]) -> "_Base":
        """The turn that `messages` answer: one that calls what they are the answers of."""
        calls = tuple(
            (str(m.get("name") or _name(self.tools)), str(m.get("tool_call_id") or _ID))
            for m in messages
            if m["role"] == "tool"
        )
        if calls not in self._bases:
            self._bases[calls] = self._make_base(calls)
        return self._bases[calls]

    def _make_base(self, calls: Calls) -> "_Base":
        failure: Exception | None = None
        for turn in _turns(calls):
            try:
                text = self._render([_QUESTION, turn], opens=False)
            except Exception as error:  # as of templates that want arguments as text
                failure = error
                continue
            if occurrences := text.count(_TURN):
                return _Base(turn, occurrences, self._body(text.split(_TURN)[-1]))
        raise failure or ValueError("a turn of the assistant's is left out")

    def _body(self, tail: str) -> str:
        """What of a turn's `tail` is before the special tokens that end it."""
        ids = self._ids(tail)
        stop = len(ids)
        while stop and (ids[stop - 1] in self._special or self._is_space(ids[stop - 1])):
            stop -= 1
        while stop < len(ids) and ids[stop] not in self._special:
            stop += 1
        self._ends |= set(ids[stop:]) & self._special
        return self._text(ids[:stop])

    def _is_space(self, id: int) -> bool:
        return self._text([id]).isspace()

    def _overlap(self, turn: Sequence[int], ids: Ids) -> int:
        """How many of the tokens after a turn it has written itself: those that end it.

        A template may end a turn otherwise in mid-conversation: gpt-oss has `<|end|>` there, and
        `<|return|>` at the end.
        """
        for number in range(min(len(turn), len(ids)), 0, -1):
            if tuple(turn[-number:]) == ids[:number]:
                return number
        is_end = bool(turn) and turn[-1] in self._ends and ids[:1] and ids[0] in self._special
        return int(bool(is_end))

    def _render(self, messages: Sequence[ChatMessage], *, opens: bool) -> str:
        assert self._template is not None
        return self._template.render(messages, self.tools, opens)

    def _ids(self, text: str) -> Ids:
        """The tokens of a text; of control tokens that a message spells, the characters."""
        if self._template is not None:
            return tuple(self._template.ids(text))
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False)
        return tuple(encoded["input_ids"])

    def _content_ids(self, text: str) -> Ids:
        return self._ids(text if self._template is None else self._template.control.guard(text))

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


_QUESTION: ChatMessage = {"role": "user", "content": "Q"}


@dataclass(frozen=True, slots=True)
class _Base:
    """A turn in which `_TURN` is rendered so many times, and its text after the last of them."""

    turn: ChatMessage
    occurrences: int
    body: str


def _turns(calls: Calls) -> Iterator[ChatMessage]:
    """Turns of the assistant's that call tools, each by name and id, as templates take them.

    Gemma 4 renders a turn's text behind its calls and their answers, so that it has none here.
    Some want the arguments as text; some know no calls.
    """
    plain: ChatMessage = {"role": "assistant", "content": _TURN}
    if calls:
        for arguments in ({"x": _TURN}, json.dumps({"x": _TURN})):
            functions = [{"name": name, "arguments": arguments} for name, _ in calls]
            told = [
                {"type": "function", "id": id, "function": function}
                for (_, id), function in zip(calls, functions, strict=True)
            ]
            yield {**plain, "content": "", "tool_calls": told}
    yield plain


def _name(tools: Sequence[dict[str, Any]] | None) -> str:
    """The name of a tool that there is."""
    return str(tools[0]["function"]["name"]) if tools else "tool"
