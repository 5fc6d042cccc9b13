"""Control tokens that a text spells: within a chat template they stay text."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

_GUARD = "\U0010fffd"
"""A private character within a spelling, which keeps it from being a token."""


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Every special token by its id; `all_special_ids` has those alone that have a role."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    special = {int(id): str(token) for id, token in added if token.special}
    return special | dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))


class ControlTokens:
    """Encodes texts in which some spellings of control tokens are only text.

    `guard` marks a text of the user's; what it marks reaches `ids` through a chat template, and is
    encoded there as its characters. `plain` takes the marks out.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.spellings = frozenset(filter(None, special_tokens(tokenizer).values()))
        """Every control token as text."""
        self._any = _pattern(self.spellings)
        self._guarded = _pattern(map(_guard, self.spellings))
        self._either = _pattern({*self.spellings, *map(_guard, self.spellings)})
        self._id_of = {text: tokenizer.convert_tokens_to_ids(text) for text in self.spellings}
        self._as_text: dict[str, list[int]] = {}

    def spelled(self, text: str) -> str | None:
        """The first control token that a text spells."""
        match = self._any.search(text)
        return match and match.group()

    def escaped(self, text: str) -> str:
        """The text with a backslash before each control token that it spells."""
        return self._any.sub(r"\\\g<0>", text)

    def guard(self, value: Any, only: Collection[str] | None = None) -> Any:
        """A text, or all texts of a nested value, with the spellings of control tokens marked.

        With `only` these alone: a model's own markers stay tokens in what it wrote.
        """
        if isinstance(value, str):
            chosen = self.spellings if only is None else only
            return self._any.sub(lambda m: _guard(m[0]) if m[0] in chosen else m[0], value)
        if isinstance(value, Mapping):
            return {key: self.guard(x, only) for key, x in value.items()}
        if isinstance(value, list | tuple):
            return [self.guard(x, only) for x in value]
        return value

    def plain(self, text: str) -> str:
        """The text without marks."""
        return self._guarded.sub(lambda match: match[0].replace(_GUARD, ""), text)

    def ids(self, texts: Sequence[str], encode: Callable[[list[str]], Any]) -> list[list[int]]:
        """The tokens of texts by `encode`, where what is marked is encoded as its characters."""
        encoded = encode([self.plain(text) for text in texts])
        return [
            self._mended(text, list(ids)) if _GUARD in text else list(ids)
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _mended(self, text: str, ids: list[int]) -> list[int]:
        """The tokens with those replaced that are marked in `text`: both have the same order."""
        mended: list[int] = []
        for match in self._either.finditer(text):
            bare = match[0].replace(_GUARD, "")
            if self._id_of[bare] not in ids:  # one that the tokenizer takes only apart from words
                continue
            stop = ids.index(self._id_of[bare])
            own = ids[stop : stop + 1] if bare == match[0] else self._characters(bare)
            mended, ids = [*mended, *ids[:stop], *own], ids[stop + 1 :]
        return mended + ids

    def _characters(self, spelling: str) -> list[int]:
        """The tokens of a spelling as text: its first character apart, where nothing else helps."""
        if spelling not in self._as_text:
            encode = self.tokenizer
            options = {"add_special_tokens": False, "verbose": False}
            ids = encode(spelling, split_special_tokens=True, **options)["input_ids"]
            if self._id_of[spelling] in ids:
                apart = spelling[:1], spelling[1:]
                ids = [id for text in apart for id in encode(text, **options)["input_ids"]]
            self._as_text[spelling] = ids
        return self._as_text[spelling]


def _guard(spelling: str) -> str:
    return spelling[:1] + _GUARD + spelling[1:]


def _pattern(spellings: Any) -> re.Pattern[str]:
    longest = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest)) or r"(?!)")
