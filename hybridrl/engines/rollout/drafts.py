"""Where draft tokens come from: a guess at how a response continues, which a pass then verifies.

A guess changes when a token is made, never which. So any source is right, and a good one is fast.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridrl.engines.rollout.interface import Request
from hybridrl.engines.rollout.suffix_automaton import ROOT, SuffixAutomaton

_SHORTEST = 1  # tokens of a context that is looked up
_LIKELY = 0.3  # of the texts that were at the same place: as many must have gone on as drafted
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

    def siblings(self, request: Request) -> dict[object, list[int]]:
        """What `Request.siblings` of a request that began is, if it goes on in another engine."""
        ...

    def draft(self, request: Request, most: int) -> Sequence[int]:
        """The tokens that may come next: at most `most` are used, none is an answer."""
        ...


@dataclass(slots=True)
class _Text:
    """A response, of which the first `indexed` tokens are in its group's automaton."""

    response: list[int]
    state: int
    indexed: int = 0
    runs: bool = True


class _Group:
    """The responses to one prompt."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.counted = 0  # of its tokens, in the sum over all groups
        self._prompt = prompt
        self._texts: dict[object, _Text] = {}
        self.forget()

    @property
    def runs(self) -> bool:
        """Whether a response of it is in progress."""
        return any(text.runs for text in self._texts.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that are indexed, or wait for it."""
        texts = self._texts.values()
        return self._indexed + sum(len(text.response) - text.indexed for text in texts)

    def forget(self) -> None:
        """Index what runs anew when a draft is asked for, without the texts of earlier steps."""
        self._automaton, self._begin = SuffixAutomaton(), ROOT
        self._indexed = 0
        self._texts = {id: text for id, text in self._texts.items() if text.runs}
        for text in self._texts.values():
            text.indexed = 0

    def begin(self, request: Request) -> None:
        """A resumed request has the tokens that are indexed, in another list.

        One that begins again has not: it is another text.
        """
        for id, tokens in request.siblings.items():
            if id not in self._texts:
                self._texts[id] = _Text(list(tokens), ROOT, runs=False)
        request.siblings = {}
        text = self._texts.get(request.id)
        if text is None or len(request.response_ids) < text.indexed:
            text = self._texts[request.id] = _Text(request.response_ids, ROOT)
        text.response, text.runs = request.response_ids, True

    def end(self, request: Request) -> None:
        """Its tokens stay as they are."""
        self._texts[request.id].runs = False

    def siblings(self, request: Request) -> dict[object, list[int]]:
        """The other responses, as far as they are."""
        others = self._texts.items()
        return {id: text.response for id, text in others if id != request.id and text.response}

    def draft(self, request: Request, most: int) -> list[int]:
        """How its response may go on."""
        if not self._indexed:
            self._begin = self._automaton.extend(ROOT, self._prompt)
            self._indexed = len(self._prompt)
        for text in self._texts.values():
            new = text.response[text.indexed :]
            if new:
                state = text.state if text.indexed else self._begin
                text.state = self._automaton.extend(state, new)
                text.indexed += len(new)
                self._indexed += len(new)
        own = self._texts[request.id]
        state = own.state if own.indexed else self._begin
        return self._automaton.continuation(state, most, _SHORTEST, _LIKELY)


class SeenTexts:
    """Continues a response as most texts did that came to the same place.

    The texts are the prompt, the response itself, the other responses, and those of earlier steps.
    Each prompt has a suffix automaton of them (SuffixDecoding, arXiv 2411.04975, has a suffix
    tree). The longest end of the response that went on anywhere is looked up. The most frequent
    next token is taken, and so on from there. A draft ends where less than `_LIKELY` of the texts
    at its beginning agree with it: a guess that is refused is time lost.

    Texts are indexed when a draft of their group is asked for, at some microseconds a token. At
    most `most_tokens` are kept: groups that were used longest ago are forgotten, running ones
    never.

    *Example.* A sibling is 2 4 6 8 9, the response so far 2 4. Its last two tokens are in the
    sibling, so 6 8 9 is the draft.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._groups: OrderedDict[tuple[int, ...], _Group] = OrderedDict()
        self._group_of: dict[object, _Group] = {}  # of running requests
        self.num_tokens = 0
        """Tokens that are indexed, or wait for it, as of the last end of a text in each group."""

    def begin(self, request: Request) -> None:
        """See `DraftSource`."""
        key = tuple(request.prompt_ids)
        group = self._groups.setdefault(key, _Group(key))
        self._groups.move_to_end(key)
        self._group_of[request.id] = group
        group.begin(request)

    def end(self, request: Request) -> None:
        """See `DraftSource`."""
        group = self._group_of.pop(request.id, None)
        if group is not None:
            group.end(request)
            self._count(group, group.num_tokens)
            self._forget()

    def siblings(self, request: Request) -> dict[object, list[int]]:
        """See `DraftSource`."""
        group = self._group_of.get(request.id)
        return request.siblings if group is None else group.siblings(request)

    def draft(self, request: Request, most: int) -> list[int]:
        """See `DraftSource`."""
        return self._group_of[request.id].draft(request, most)

    def _count(self, group: _Group, tokens: int) -> None:
        self.num_tokens += tokens - group.counted
        group.counted = tokens

    def _forget(self) -> None:
        """Keep to the bound, by the groups that were used longest ago."""
        if self.num_tokens <= self._most_tokens:
            return
        for key, group in list(self._groups.items()):
            if group.runs:
                group.forget()
                self._count(group, group.num_tokens)
            else:
                del self._groups[key]
                self._count(group, 0)
            if self.num_tokens <= self._most_tokens:
                return
