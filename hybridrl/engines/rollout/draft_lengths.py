"""How many tokens to draft: a fixed number, or what pays by measured times and acceptance."""

import math
import statistics
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

LONGEST = 16
"""The longest draft of `auto`."""

_KEPT = 15  # passes of a size whose times are kept: their median is its time
_ENOUGH = 3  # passes of a size, without which its time is not known
_FEW = 8.0  # drafts; with less known, a choice of drafts is for one pass
_CHOSEN_FOR = 8  # passes for which a choice holds
_REMEASURED = 25  # choices after which everything is timed again
_GUESSED_TOKEN = 0.2  # of a pass, for a further token a row: until drafts were timed
_MOST_TRIED = 32.0  # drafts by which a share is known; older ones count half
_FADES = 0.93  # of what is known, at each choice against drafts: so they are tried again
_LIKELY = 0.8  # the share of right guesses, before any was verified
_GROUPS = 4096


class PromptGroup(NamedTuple):
    """The samples of a prompt, and the prompt's task: the source that it is from."""

    task: str
    prompt: object


class DraftLengths(ABC):
    """Decides how many tokens are drafted for each row of a pass, and may learn from the passes.

    All tensor-parallel ranks of an instance must decide alike.
    """

    @abstractmethod
    def choose(self, groups: Sequence[PromptGroup]) -> list[int]:
        """Tokens to draft for each row, by its prompt group."""

    def saw_draft(self, group: PromptGroup, drafted: int, accepted: int) -> None:  # noqa: B027
        """A draft was verified; its first `accepted` tokens were drawn."""

    def saw_pass(self, rows: int, tokens: int, seconds: float) -> None:  # noqa: B027
        """A pass of `rows` rows and so many tokens, drafts included, took so long."""


class FixedLength(DraftLengths):
    """`rollout.speculate=K`: K tokens for every row, whatever comes of it."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def choose(self, groups: Sequence[PromptGroup]) -> list[int]:
        """See `DraftLengths`."""
        return [self._tokens] * len(groups)


class BestLength(DraftLengths):
    """`rollout.speculate=auto`: the lengths with the most expected tokens a second.

    A row whose draft of k tokens has survived to token j with probability S(j) makes 1 + S(1) + ...
    + S(k) tokens in a pass. S follows from how often a group's tokens were accepted at each place
    of a draft (`Acceptance`). A new group begins with what its task has shown. The time of a pass
    follows from its number of tokens (`PassTimes`). Of all rows' tokens, the likeliest are drafted:
    as many as give the most expected tokens a second. So where rows cost what they yield, nothing
    is drafted.

    A choice holds for 8 passes, of drafts for one where few were verified. Without drafts a pass is
    timed first, and again now and then. Drafts that do not pay are tried again after some hundred
    passes. `agree` gives all ranks of an instance the times that one of them has measured. So their
    choices, at counted passes and from the same numbers, are the same.

    *Example.* A pass takes 10 ms for a token and 0.5 ms for each further one; every token is
    accepted with probability 0.8. Drafts of 0, 1, 2, 4, 8 tokens give 100, 171, 222, 280, 309
    tokens a second, 16 give 272: eight are drafted.
    """

    def __init__(self, agree: Callable[[list[float]], list[float]] = lambda times: times) -> None:
        self._agree = agree
        self._times = PassTimes()
        self._tasks: dict[str, Acceptance] = {}
        self._groups: OrderedDict[PromptGroup, Acceptance] = OrderedDict()
        self._chosen: dict[PromptGroup, int] = {}
        self._rows = self._left = self._num_choices = 0

    def choose(self, groups: Sequence[PromptGroup]) -> list[int]:
        """See `DraftLengths`."""
        self._left -= 1
        known = self._rows == len(groups) and all(group in self._chosen for group in groups)
        if self._left < 0 or not known:
            self._chosen = self._best(groups)
            # Drafts of which little is known are for one pass.
            drafting = [group for group, length in self._chosen.items() if length]
            holds = all(self._of_task(group).num_tried >= _FEW for group in drafting)
            self._rows, self._left = len(groups), _CHOSEN_FOR - 1 if holds else 0
        return [self._chosen[group] for group in groups]

    def _best(self, groups: Sequence[PromptGroup]) -> dict[PromptGroup, int]:
        rows: dict[PromptGroup, int] = {}
        for group in groups:
            rows[group] = rows.get(group, 0) + 1
        self._num_choices += 1
        if self._num_choices % _REMEASURED == 0:
            self._times.forget()
        if not self._times.knows(len(groups)):
            return dict.fromkeys(rows, 0)  # first, and again, the time without drafts
        # The ranks agree on the times of 1, 2, ... tokens a row; between them lines are straight.
        times = self._agree(self._times.of(len(groups)))
        survival = {group: self._of(group).survival(self._of_task(group)) for group in rows}
        layers = sorted(
            ((s[j], -j, group) for group, s in survival.items() for j in range(LONGEST)),
            key=lambda layer: layer[:2],
            reverse=True,
        )
        # Every number of likeliest tokens, since a second token may cost more than a third.
        tokens, expected = len(groups), float(len(groups))
        best, taken = expected / times[0], 0
        for number, (share, _, group) in enumerate(layers, 1):
            tokens, expected = tokens + rows[group], expected + share * rows[group]
            rate = expected / _between(times, tokens / len(groups))
            if rate > best:
                best, taken = rate, number
        chosen = dict.fromkeys(rows, 0)
        for _, _, group in layers[:taken]:
            chosen[group] += 1
        for group, length in chosen.items():
            if not length:
                self._of(group).fade()
        drafting = {group.task for group, length in chosen.items() if length}
        for task in dict.fromkeys(group.task for group in rows):
            if task not in drafting:
                self._tasks[task].fade()
        return chosen

    def _of_task(self, group: PromptGroup) -> "Acceptance":
        return self._tasks.setdefault(group.task, Acceptance())

    def _of(self, group: PromptGroup) -> "Acceptance":
        acceptance = self._groups.setdefault(group, Acceptance())
        self._groups.move_to_end(group)
        if len(self._groups) > _GROUPS:
            self._groups.popitem(last=False)
        return acceptance

    def saw_draft(self, group: PromptGroup, drafted: int, accepted: int) -> None:
        """See `DraftLengths`."""
        self._of_task(group).saw(drafted, accepted)
        self._of(group).saw(drafted, accepted)

    def saw_pass(self, rows: int, tokens: int, seconds: float) -> None:
        """See `DraftLengths`."""
        self._times.saw(rows, tokens, seconds)


class Acceptance:
    """How often the token at each place of a draft was drawn, once those before it were."""

    def __init__(self) -> None:
        self._tried = [0.0] * LONGEST
        self._drawn = [0.0] * LONGEST

    @property
    def num_tried(self) -> float:
        """Drafts that were verified, of which old ones count less."""
        return self._tried[0]

    def saw(self, drafted: int, accepted: int) -> None:
        """The first `accepted` tokens of a draft were drawn, and the next one, if any, was not."""
        for place in range(min(accepted + 1, drafted, LONGEST)):
            if self._tried[place] >= _MOST_TRIED:
                self._tried[place] /= 2
                self._drawn[place] /= 2
            self._tried[place] += 1
            self._drawn[place] += place < accepted

    def fade(self) -> None:
        """Know less, so that drafts are tried again after some hundred passes without."""
        self._tried = [tried * _FADES for tried in self._tried]
        self._drawn = [drawn * _FADES for drawn in self._drawn]

    def shares(self, others: "Acceptance | None" = None) -> list[float]:
        """The share at each place. What is not known is taken from `others`, else from before."""
        shares, before = [], _LIKELY
        prior = others.shares() if others is not None else None
        for place in range(LONGEST):
            doubt, likely = (4.0, prior[place]) if prior else (6.0, before)
            before = (self._drawn[place] + doubt * likely) / (self._tried[place] + doubt)
            shares.append(before)
        return shares

    def survival(self, others: "Acceptance") -> list[float]:
        """The probability that a draft is accepted up to each place."""
        survived, survival = 1.0, []
        for share in self.shares(others):
            survived *= share
            survival.append(survived)
        return survival


class PassTimes:
    """Seconds of passes without drafts by their rows, and of those with drafts by their tokens.

    Medians of the last passes of about the same size, and straight lines between them.
    """

    def __init__(self) -> None:
        self._plain: dict[int, _Times] = {}
        self._drafted: dict[int, _Times] = {}

    def saw(self, rows: int, tokens: int, seconds: float) -> None:
        """A pass took so long."""
        times = self._plain if tokens == rows else self._drafted
        times.setdefault(_size(tokens), _Times()).saw(tokens, seconds)

    def forget(self) -> None:
        """Time everything again: texts have grown, and a number may have been off."""
        self._plain, self._drafted = {}, {}

    def knows(self, rows: int) -> bool:
        """Whether passes of about so many rows were timed without drafts."""
        return len(self._plain.get(_size(rows), ())) >= _ENOUGH

    def of(self, rows: int) -> list[float]:
        """Seconds of a pass of 1, 2, ... tokens for each of `rows` rows; none less than before."""
        plain = self._plain[_size(rows)].median
        points = [(float(rows), plain)]
        for size in sorted(self._drafted):
            times = self._drafted[size]
            # A first pass also indexes texts: it says little.
            if len(times) >= _ENOUGH and times.tokens > points[-1][0]:
                points.append((times.tokens, max(times.median, points[-1][1])))
        # Beyond what was timed: by the line of passes with drafts, or a guess that is put to the
        # test. The first guessed token may cost as much as the next ten: other kernels compute it.
        slope = _GUESSED_TOKEN * plain / rows
        if len(points) > 2:
            (first, low), (last, high) = points[1], points[-1]
            slope = max((high - low) / (last - first), slope / 10)
        seconds = []
        for tokens in range(rows, rows * (LONGEST + 2), rows):
            after = next((i for i, (n, _) in enumerate(points) if n >= tokens), None)
            if after is None:
                seconds.append(points[-1][1] + slope * (tokens - points[-1][0]))
            elif not after:
                seconds.append(plain)
            else:
                (a, low), (b, high) = points[after - 1 : after + 1]
                seconds.append(low + (high - low) * (tokens - a) / (b - a))
        return seconds


class _Times:
    """The last passes of about the same size."""

    def __init__(self) -> None:
        self._passes: deque[tuple[int, float]] = deque(maxlen=_KEPT)

    def __len__(self) -> int:
        return len(self._passes)

    def saw(self, tokens: int, seconds: float) -> None:
        self._passes.append((tokens, seconds))

    @property
    def tokens(self) -> float:
        return statistics.fmean(tokens for tokens, _ in self._passes)

    @property
    def median(self) -> float:
        return statistics.median(seconds for _, seconds in self._passes)


def _size(tokens: int) -> int:
    """Sizes in steps of a fifth: passes of one are about as long."""
    return round(4 * math.log2(tokens))


def _between(times: Sequence[float], size: float) -> float:
    """`times[j]` is that of size 1 + j; straight lines between."""
    place = min(max(size - 1, 0.0), len(times) - 1.0)
    low = min(int(place), len(times) - 2)
    return times[low] + (times[low + 1] - times[low]) * (place - low)
