"""What a chat template leaves out of the messages that it renders, and what is said of it."""

import itertools
import logging
import re
from collections import Counter
from collections.abc import Iterator, Sequence

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
    return list(dict.fromkeys(name for name, text in parts if _squeezed(text) not in squeezed))


def _parts(message: ChatMessage) -> Iterator[tuple[str, str]]:
    """What a message says, each part with its name; calls of tools apart (`takes_calls`)."""
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

    def join(self, later: "RowNotes") -> None:
        """Count the rows of `later`, too."""
        self._counts += later._counts
        self._first = {**later._first, **self._first}

    def say(self, key: str) -> None:
        """Log a warning for each thing that was noticed in the rows at `key`."""
        for what, number in self._counts.items():
            log.warning("%s: %s (%d rows, the first is %s)", key, what, number, self._first[what])
