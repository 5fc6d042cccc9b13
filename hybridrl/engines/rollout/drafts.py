"""Where draft tokens come from: a guess at how a response continues, which a pass then verifies.

A guess changes when a token is made, never which. So any source is right, and a good one is fast.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hybridrl.engines.rollout.interface import Request

_ORDERS = (8, 4, 2)  # tokens of the contexts that are looked up, the longest first
_MOST_TOKENS = 2**17  # indexed tokens of an engine, some 400 bytes each


class DraftSource(Protocol):
    """Guesses tokens. All tensor-parallel ranks of an instance must guess alike.

    So a guess may follow from tokens and the order of calls, and from no clock and no hash seed.
    """

    def begin(self, request: Request) -> None:
        """A request runs; its `response_ids` grow in place until `end`. Again after it waited."""
        ...

    def end(self, request: Request) -> None:
        """A request that began has finished or was parked: its tokens stay as they are."""
        ...

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """The tokens that may come next: at most `most` are used, none is an answer."""
        ...


@dataclass(slots=True)
class _Text:
    """A response; the first `indexed` tokens are in its group's table."""

    response: list[int]
    indexed: int = 0
    runs: bool = True


@dataclass(slots=True)
class _Group:
    """The responses to one prompt. `table`: by hash of a context, the latest text and place.

    A place is the index of the token that follows the context.
    """

    prompt: list[int]
    texts: dict[object, _Text] = field(default_factory=dict)
    table: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    indexed: int = 0

    @property
    def runs(self) -> bool:
        """Whether a response of it is in progress."""
        return any(text.runs for text in self.texts.values())


class SeenTexts:
    """Continues a response as a text did that came to the same place: prompt lookup, by n-grams.

    The texts are the prompt, the response itself, the other responses to the prompt, and those of
    earlier steps (SuffixDecoding, arXiv 2411.04975, has a suffix tree for them). The last 8 tokens
    are looked up, then 4, then 2, and the place where they came last is copied from. Where a copy
    ends early, its own end is looked up.

    Texts are indexed when a draft of their group is asked for, at some microseconds a token. At
    most `most_tokens` are: groups that were used longest ago are forgotten, running ones never.

    *Example.* A sibling is 2 4 6 8 9, the response so far 2 4. Its last two tokens are in the
    sibling, so 6 8 9 is the draft.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._groups: OrderedDict[tuple[int, ...], _Group] = OrderedDict()
        self._group_of: dict[object, _Group] = {}  # of running requests

    @property
    def num_tokens(self) -> int:
        """Tokens that are indexed."""
        return sum(group.indexed for group in self._groups.values())

    def begin(self, request: Request) -> None:
        """See `DraftSource`."""
        key = tuple(request.prompt_ids)
        group = self._groups.setdefault(key, _Group(list(key)))
        self._groups.move_to_end(key)
        self._group_of[request.id] = group
        text = group.texts.setdefault(request.id, _Text(request.response_ids))
        # A resumed request has the tokens that are indexed, in another list.
        text.response, text.runs = request.response_ids, True

    def end(self, request: Request) -> None:
        """See `DraftSource`."""
        group = self._group_of.pop(request.id, None)
        if group is not None:
            group.texts[request.id].runs = False
            self._forget()

    def draft(self, request: Request, most: int) -> list[int]:
        """See `DraftSource`."""
        group = self._group_of[request.id]
        _index(group)
        longest = _ORDERS[0]
        context = request.response_ids[-longest:]
        if len(context) < longest:
            context = [*group.prompt[len(context) - longest :], *context]
        tokens: list[int] = []
        while len(tokens) < most:
            place = _look_up(group, context)
            if place is None:
                break
            text, start = place
            tokens += text[start : start + most - len(tokens)]
            context = [*context, *tokens[-longest:]][-longest:]
        return tokens

    def _forget(self) -> None:
        """Keep to the bound, by the groups that were used longest ago."""
        if self.num_tokens <= self._most_tokens:
            return
        for key, group in list(self._groups.items()):
            if not group.runs:
                del self._groups[key]
            else:  # what runs is indexed anew, without the texts of earlier steps
                group.texts = {id: text for id, text in group.texts.items() if text.runs}
                group.table, group.indexed = {}, 0
                for text in group.texts.values():
                    text.indexed = 0
            if self.num_tokens <= self._most_tokens:
                return


def _look_up(group: _Group, context: list[int]) -> tuple[list[int], int] | None:
    for order in _ORDERS:
        if order <= len(context):
            place = group.table.get(hash(tuple(context[-order:])))
            if place is not None:
                return place
    return None


def _index(group: _Group) -> None:
    """Enter the tokens that came since the last call; each is a continuation of those before."""
    table, longest = group.table, _ORDERS[0]
    if not group.indexed:
        _enter(table, group.prompt, group.prompt, 1)
        group.indexed = len(group.prompt)
    for text in group.texts.values():
        start, stop = text.indexed, len(text.response)
        if start < stop:
            before = max(0, start - longest)
            known = text.response[before:]
            if not before:
                known = [*group.prompt[-longest:], *known]
            _enter(table, known, text.response, start - (stop - len(known)))
            group.indexed += stop - start
            text.indexed = stop


def _enter(
    table: dict[int, tuple[list[int], int]], known: list[int], text: list[int], first: int
) -> None:
    """Enter the contexts of `known[first:]`, whose end is that of `text`."""
    shift = len(text) - len(known)
    for order in _ORDERS:
        for i in range(max(first, order), len(known)):
            table[hash(tuple(known[i - order : i]))] = text, i + shift
