"""Lone surrogates: halves of characters, which have no UTF-8 form and which no tokenizer takes."""

import re
from typing import Any

_LONE = re.compile("[\ud800-\udfff]")


def encodable(text: str) -> str:
    """`text` with a question mark for each lone surrogate.

    Broken output of a model may hold one, and so may an error's message that quotes it.
    """
    return _LONE.sub("?", text)


def without_surrogates(value: Any) -> tuple[Any, int]:
    """A value as JSON has it, its texts made `encodable`; and how many surrogates it had."""
    if isinstance(value, str):
        return _LONE.subn("?", value)
    if isinstance(value, dict):
        pairs = {without_surrogates(key)[0]: without_surrogates(x) for key, x in value.items()}
        return {key: x for key, (x, _) in pairs.items()}, sum(n for _, n in pairs.values())
    if isinstance(value, list | tuple):
        items = [without_surrogates(x) for x in value]
        return type(value)(x for x, _ in items), sum(n for _, n in items)
    return value, 0
