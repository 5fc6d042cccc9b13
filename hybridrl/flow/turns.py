"""Conversations: the samples whose turn has ended, and what their environments reply."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from hybridrl.costs.instance import Costs
from hybridrl.flow.executor import ENOUGH_TURNS, Answer, EpisodeReply, Replied, TurnEnded
from hybridrl.flow.sample import ENVIRONMENT_FAILURE, SampleId
from hybridrl.flow.waits import WaitModel

_MOST_SHARE = 64
_TURNS_KEPT = 1024


def enough_turns(costs: Costs, rows: float, turn_tokens: float) -> int:
    """One in how many turns that have ended ends a call, of samples that decode in `rows` rows.

    A turn of `turn_tokens` tokens takes T seconds, so that of n samples one ends its turn every
    T / n. A call that returns after a share x of them lasts x T. Those x n turns have waited for
    half of it, and all n samples wait for the next call, c seconds. So samples wait x n T / 2 a
    call, and n c, which is least a second with x = sqrt(2 c / T).

    Example: turns take 256 ms. One in 8 where a call costs 2 ms, one in 2 where it costs 20.
    """
    call_s, turn_s = costs.between_s, turn_tokens * float(costs.pace(rows))
    if turn_s <= 0:
        return ENOUGH_TURNS
    return max(1, int(min(float(_MOST_SHARE), math.sqrt(turn_s / max(2 * call_s, 1e-12)))))


class RecordDiffers(RuntimeError):
    """A run is not the one whose record it is to repeat."""

    def __init__(self, text: str) -> None:
        super().__init__(f"environment.partial: the run is not the recorded one: {text}")


class TurnsTaken(NamedTuple):
    """A sample's part in a round: the turns that it made, and whether its episode's end came.

    `failure` is the kind of failure that ended it. A crash or a timeout may not come twice.
    """

    num: int
    ended: bool
    failure: str = ""


RoundOrder = Mapping[SampleId, TurnsTaken]
"""What replies have come into a round: of each sample that made a turn in it, or ended."""


def order_to_json(order: RoundOrder) -> list[list[Any]]:
    """In plain JSON types: a list of [id, turns, ended], with the failure if there is one."""
    return [[list(id), *taken[: 3 if taken.failure else 2]] for id, taken in sorted(order.items())]


def order_from_json(rows: Sequence[Sequence[Any]]) -> dict[SampleId, TurnsTaken]:
    """What `order_to_json` has made."""
    return {
        SampleId.read(id): TurnsTaken(int(num), bool(ended), *map(str, failure))
        for id, num, ended, *failure in rows
    }


def failed_turns(orders: Mapping[int, Sequence[RoundOrder]]) -> dict[SampleId, tuple[int, str]]:
    """Return the last turn, from 1, and the failure of each sample with a failed episode."""
    num_turns, failures = Counter[SampleId](), dict[SampleId, tuple[int, str]]()
    for _, rounds in sorted(orders.items()):
        for id, taken in chain.from_iterable(order.items() for order in rounds):
            num_turns[id] += taken.num
            if taken.failure:
                failures[id] = num_turns[id], taken.failure
    return failures


@dataclass(slots=True)
class OpenTurns:
    """Samples between two turns of the model, wherever they are: held by an instance, or parked.

    | a sample | from              | until                                           |
    |----------|-------------------|-------------------------------------------------|
    | is open  | its turn's end    | a call of its instance takes the `Answer`       |
    | waits    | its turn's end    | the environment has replied                     |

    One that is made anew is not open: its conversation begins again.

    With a window (`open_window`) a sample rests after so many turns. It is not answered until the
    next window, unless its episode has ended, and may. So what is made until all `rest` or have
    finished follows from turns, not from the times of replies.

    Example: a's turn ends, it is open and waits. `Replied` comes, and it waits no more. The next
    call of its instance takes the reply, and it is not open.
    """

    _replies: dict[SampleId, EpisodeReply | None] = field(default_factory=dict)  # None: it waits
    _num_waiting: int = 0
    waits_seen: WaitModel = field(default_factory=WaitModel)
    """Learned from the replies."""
    turn_tokens: float = 0.0
    """Tokens of a turn of the model, on average over the last ones; 0 before any."""
    expected: float = 0.0
    """Turns of a conversation, as in earlier steps; 0 before any."""
    _num_turns: dict[SampleId, int] = field(default_factory=dict)  # that have ended so far
    _turns_seen: int = 0
    _told: dict[SampleId, int] = field(default_factory=dict)  # response tokens up to the turn
    _since: dict[SampleId, float] = field(default_factory=dict)  # when a sample's turn ended
    _waited: dict[SampleId, float] = field(default_factory=dict)  # seconds of its replies so far
    _failures: dict[SampleId, str] = field(default_factory=dict)  # kinds, of those whose end came
    put_by: set[SampleId] = field(default_factory=set)
    """Parked ones that their instance gave up while all its samples waited; until they reply."""
    _most: dict[SampleId, int] = field(default_factory=dict)  # turns of the window
    _num_ended: dict[SampleId, int] = field(default_factory=dict)  # of them, so far
    _late: frozenset[SampleId] = frozenset()  # whose episodes do not end in it

    def open_window(self, most: Mapping[SampleId, int], late: Collection[SampleId] = ()) -> None:
        """Let each of these samples make so many turns before it rests.

        The episodes of those that are `late` may not end in this window.
        """
        self._most, self._num_ended = dict(most), dict.fromkeys(most, 0)
        self._late = frozenset(late)

    def bound(self, num: int) -> None:
        """Let each sample of the window make `num` turns in it, and end the turn that it is at."""
        self._most = dict.fromkeys(self._most, num)

    def close_window(self) -> None:
        """Let all samples go on."""
        self.open_window({})

    def num_ended(self, id: SampleId) -> int:
        """Turns that a sample has made in the window."""
        return self._num_ended.get(id, 0)

    def rests(self, id: SampleId) -> bool:
        """Whether a sample is not to go on in this window, although its environment has replied."""
        reply = self._replies.get(id)
        if reply is None or id not in self._most or self._num_ended[id] < self._most[id]:
            return False
        return reply.tokens is not None or id in self._late

    def ended(self, turns: Iterable[TurnEnded], now: float) -> None:
        """These turns have ended, as is known at `now`: their samples wait."""
        for turn in turns:
            self._since[turn.id] = now
            self.wait_for([turn.id])
            self._turns_seen = min(self._turns_seen + 1, _TURNS_KEPT)
            tokens = turn.response_tokens - self._told.get(turn.id, 0)
            self.turn_tokens += (tokens - self.turn_tokens) / self._turns_seen
            self._told[turn.id] = turn.response_tokens
            self._num_turns[turn.id] = self._num_turns.get(turn.id, 0) + 1
            if turn.id in self._num_ended:
                self._num_ended[turn.id] += 1

    def wait_for(self, ids: Iterable[SampleId]) -> None:
        """These samples wait: those of a checkpoint too, whose environments reply once more."""
        for id in ids:
            assert id not in self._replies, f"sample {id} has ended a turn while it waits"
            self._replies[id] = None
            self._num_waiting += 1

    def replied(self, event: Replied) -> None:
        """These replies have come. One is passed over if its sample begins anew meanwhile."""
        self.waits_seen.saw(event.seconds)
        for reply, seconds in zip(event.replies, event.seconds, strict=True):
            if self.waits(reply.id):
                self._replies[reply.id] = reply
                self._num_waiting -= 1
                self._waited[reply.id] = self.waited(reply.id) + seconds
                if kind := reply.scalars.get(ENVIRONMENT_FAILURE):
                    self._failures[reply.id] = str(kind)

    def failure(self, id: SampleId) -> str:
        """The kind of failure that has ended a sample's episode; empty for none."""
        return self._failures.get(id, "")

    def waited(self, id: SampleId) -> float:
        """Seconds that a sample's environment has taken for all its replies so far."""
        return self._waited.get(id, 0.0)

    def is_open(self, id: SampleId) -> bool:
        """Whether a sample's turn has ended and it has not been answered."""
        return id in self._replies

    def waits(self, id: SampleId) -> bool:
        """Whether a sample's environment has still to reply."""
        return id in self._replies and self._replies[id] is None

    def first_reply_s(self, ids: Iterable[SampleId], now: float) -> float:
        """Seconds until one of these samples is likely to be answered; 0 if one does not wait."""
        ids = [*ids]
        if not all(map(self.waits, ids)):
            return 0.0
        return self.waits_seen.first([now - self._since.get(id, now) for id in ids])

    def seconds_left(self, ids: Iterable[SampleId], turn_s: float, now: float) -> float:
        """Seconds until all of these conversations are likely to have ended.

        Of each what is left of its present wait, and for each turn that it has still to make
        `turn_s` and a mean wait.
        """
        ids, each_s = [*ids], turn_s + self.waits_seen.mean
        waited = [now - self._since.get(id, now) if self.waits(id) else None for id in ids]
        left = [max(0.0, self.expected - self._num_turns.get(id, 0)) for id in ids]
        present = iter(self.waits_seen.left([seconds for seconds in waited if seconds is not None]))
        return max(
            (
                turns * each_s + (0.0 if seconds is None else next(present))
                for turns, seconds in zip(left, waited, strict=True)
            ),
            default=0.0,
        )

    def put_away(self, ids: Iterable[SampleId]) -> list[SampleId]:
        """These are parked until they are answered; gives those that already are."""
        ids = [*ids]
        self.put_by.update(filter(self.waits, ids))
        return [id for id in ids if id not in self.put_by]

    def take_back(self) -> list[SampleId]:
        """Take back the samples that were put away and are answered by now, and return them."""
        back = sorted(id for id in self.put_by if not self.waits(id))
        self.put_by.difference_update(back)
        return back

    def can_go(self, ids: Iterable[SampleId]) -> bool:
        """Whether one of these samples has something to do, since it neither waits nor rests."""
        return any(not self.waits(id) and not self.rests(id) for id in ids)

    def answer(self, ids: Iterable[SampleId]) -> list[Answer]:
        """What those of the samples are told that neither wait nor rest; none for none."""
        if len(self._replies) == self._num_waiting:
            return []
        due = (self._replies.get(id) for id in ids if not self.rests(id))
        replies = [reply for reply in due if reply is not None]
        self._close([reply.id for reply in replies])
        for reply in replies:
            if reply.tokens is not None and reply.id in self._told:
                self._told[reply.id] += len(reply.tokens)
        return [Answer(tuple(replies))] if replies else []

    def forget(self, ids: Sequence[SampleId]) -> None:
        """These begin anew, or have left."""
        self._close(ids)
        for id in ids:
            self._waited.pop(id, None)
            self._told.pop(id, None)
            self._num_turns.pop(id, None)
            self._failures.pop(id, None)

    def _close(self, ids: Sequence[SampleId]) -> None:
        """These are open no more."""
        for id in ids:
            self._num_waiting -= self.waits(id)
            self._replies.pop(id, None)
            self._since.pop(id, None)
            self.put_by.discard(id)
