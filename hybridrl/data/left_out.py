"""What a chat template leaves out of the messages that it renders, and what is said of it."""

import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hybridrl.environments.task import ChatMessage

log = logging.getLogger(__name__)

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Fields in which datasets have an assistant's thoughts."""


def left_out(messages: Sequence[ChatMessage], text: str) -> list[str]:
    """Names of the parts of `messages` that are not in the rendered `text`, each once.

    Letters and digits alone are compared: templates trim, and some write a content as JSON.
    """
    squeezed = _squeezed(text)
    parts = itertools.chain.from_iterable(map(_parts, messages))
    lost = (name for name, *forms in parts if not any(_squeezed(x) in squeezed for x in forms))
    return list(dict.fromkeys(lost))


def _parts(message: ChatMessage) -> Iterator[tuple[str, ...]]:
    """What a message says: the name of each part, and the texts of which one shows it."""
    content = str(message.get("content") or "")
    if message["role"] != "assistant":
        yield f"messages of the role {message['role']}", content
        return
    *thoughts, answer = re.split(r"</?think>", content)
    yield from (("<think>...</think> in assistant messages", thought) for thought in thoughts)
    yield "the content of assistant messages", answer
    for name in REASONING:
        if isinstance(message.get(name), str):
            yield name, message[name]
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping):
            arguments = function.get("arguments")
            told = arguments if isinstance(arguments, str) else json.dumps(arguments)
            yield "tool_calls", str(function.get("name", "")), told


def _squeezed(text: str) -> str:
    return re.sub(r"\\[nrt]|\W+", "", text)


class RowNotes:
    """What was noticed about the rows of a source, to say once: how many rows, and the first."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def add(self, what: str, place: str) -> None:
        """Count a row at `place`."""
        self._counts[what] += 1
        self._first.setdefault(what, place)

    def say(self, key: str) -> None:
        """Log a warning for each thing that was noticed in the rows at `key`."""
        for what, number in self._counts.items():
            log.warning("%s: %s (%d rows, the first is %s)", key, what, number, self._first[what])
