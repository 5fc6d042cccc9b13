"""Stop texts, however they are tokenized. For any rollout engine."""

from collections.abc import Callable, Sequence
from itertools import takewhile

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # replaces bytes that are no character
_CHARACTER = 4  # bytes of the longest UTF-8 character


class StopStrings:
    """Checks after each token whether the text of a response contains one of `texts`.

    `decode` returns the text of token ids, at least a byte of every token: with special tokens, and
    without clean-up of spaces. The prompt does not count. There is no state between calls, so a
    response may be parked and resumed on another rank. Raises ValueError for an empty text.

    **Only a token that can close a text is a reason to decode.** A match ends within the text of
    the last token. `may_close` decodes a token by itself once, and remembers the answer; most
    tokens of a vocabulary close nothing.

    **Only a tail is decoded**, of B + 4 tokens if the longest text has B bytes in UTF-8. So the
    cost of a token does not grow with the response. It suffices, since the caller asks after every
    token and stops at the first match. A match ends in the last token and begins at most B - 1
    tokens before it. Four more tokens are needed because a decoder may treat the first tokens
    differently:

    - the first token may lose its space (SentencePiece);
    - if tokens are bytes, the tail may begin inside a character. A byte-level decoder replaces the
      incomplete character by U+FFFD. A byte-fallback decoder replaces the entire run of bytes, so
      on U+FFFD the check is repeated with up to three tokens less. One of these four tails begins
      with a character.

    Example: "END" with the tokens "E", "ND.", "." has B = 3. After "E" no, after "ND." yes: the
    response ends with "ND.". Of a response of 500 tokens the last 7 are decoded.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], texts: Sequence[str]) -> None:
        if not texts or "" in texts:
            raise ValueError(f"stop texts {list(texts)}: wanted one or more, none of them empty")
        self._decode, self._texts = decode, tuple(texts)
        self._tail = max(len(text.encode()) for text in texts) + _CHARACTER
        self._closing, self._others = set[int](), set[int]()  # token ids, of those seen

    def may_close(self, tokens: Sequence[int]) -> bool:
        """Whether a text may end within one of the `tokens`; else `ended` need not be asked."""
        for token in {*tokens} - self._others - self._closing:
            (self._closing if self._can_close(token) else self._others).add(token)
        return not self._closing.isdisjoint(tokens)

    def _can_close(self, token: int) -> bool:
        """Whether a text may end in `token`; True also where its text depends on other tokens.

        A token is decoded alone and behind itself, since the first token of a text may lose its
        space or keep a mark. A decoder may also put a space before any token. Other tokens decide
        where the token has incomplete characters, which decode to U+FFFD, or no text. A whole
        character as a single byte may become U+FFFD behind bytes that are none, which matters to a
        text that has U+FFFD.
        """
        alone, twice = self._decode([token]), self._decode([token, token])
        inside = twice.removeprefix(alone)
        if not alone or inside in ("", twice):
            return True
        if any(_REPLACEMENT in text for text in (alone, *self._texts)):
            return True
        pieces = (alone, inside, " " + alone)
        return any(_ends_within(text, piece) for text in self._texts for piece in pieces)

    def ended(self, response_ids: Sequence[int], min_tokens: int = 0) -> bool:
        """Whether a response ends with its last token; call it after every token.

        A text that the first `min_tokens` tokens complete does not end it.
        """
        if min_tokens and len(response_ids) <= min_tokens:
            return False
        first = max(0, len(response_ids) - self._tail)
        for start in range(first, first + _CHARACTER):
            text = self._decode(response_ids[start:])
            before = self._decode(response_ids[start:min_tokens]) if start < min_tokens else ""
            same = takewhile(lambda pair: pair[0] == pair[1], zip(text, before, strict=False))
            passed = sum(1 for _ in same)
            if any(text.find(stop, max(0, passed + 1 - len(stop))) >= 0 for stop in self._texts):
                return True
            if start == 0 or _REPLACEMENT not in text:
                return False
        return False


def _ends_within(text: str, piece: str) -> bool:
    """Whether `piece` contains `text`, or begins with the end of it."""
    first = max(1, len(text) - len(piece))  # an end that is longer is no beginning of the piece
    return text in piece or any(piece.startswith(text[i:]) for i in range(first, len(text)))
