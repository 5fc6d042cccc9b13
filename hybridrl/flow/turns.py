"""Conversations: the samples whose turn has ended, and what their environments reply."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybridrl.costs.instance import Costs
from hybridrl.flow.executor import ENOUGH_TURNS, Answer, EpisodeReply, Replied, TurnEnded
from hybridrl.flow.sample import SampleId
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
    """A run is not the one whose record it is to repeat, by `schedule.follow`."""

    def __init__(self, text: str) -> None:
        super().__init__(f"schedule.follow: the run is not the recorded one: {text}")


@dataclass(slots=True)
class _Conversation:
    """What is known of a sample with turns; `most` is None outside of a window."""

    is_open: bool = False
    reply: EpisodeReply | None = None
    since: float | None = None  # when its present turn ended
    num_turns: int = 0  # that have ended so far
    told: int = 0  # response tokens up to its present turn
    waited: float = 0.0  # seconds of its replies so far
    most: int | None = None  # turns that it may make in the window
    num_ended: int = 0  # of them, so far

    @property
    def waits(self) -> bool:
        """Whether its environment has still to reply."""
        return self.is_open and self.reply is None

    @property
    def rests(self) -> bool:
        """Whether it is not to go on in this window, although its environment has replied."""
        if self.reply is None or self.most is None or self.num_ended < self.most:
            return False
        return self.reply.tokens is not None

    def close(self) -> None:
        """It is not between two turns any more."""
        self.is_open, self.reply, self.since = False, None, None


class OpenTurns:
    """Samples between two turns of the model, wherever they are: held by an instance, or parked.

    | a sample | from              | until                                           |
    |----------|-------------------|-------------------------------------------------|
    | is open  | its turn's end    | a call of its instance takes the `Answer`       |
    | waits    | its turn's end    | the environment has replied                     |

    One that is made anew is not open: its conversation begins again.

    With a window (`open_window`) a sample rests after so many turns. It is not answered until the
    next window, unless its episode has ended. So what is made until all `rest` or have finished
    follows from turns, not from the times of replies.

    Example: a's turn ends, it is open and waits. `Replied` comes, and it waits no more. The next
    call of its instance takes the reply, and it is not open.
    """

    def __init__(self, waits_seen: WaitModel | None = None, expected: float = 0.0) -> None:
        self.waits_seen = waits_seen or WaitModel()
        """Learned from the replies."""
        self.expected = expected
        """Turns of a conversation, as in earlier steps; 0 before any."""
        self.turn_tokens = 0.0
        """Tokens of a turn of the model, on average over the last ones; 0 before any."""
        self.put_by = set[SampleId]()
        """Parked ones that their instance gave up while all its samples waited, until a reply."""
        self._conversations = defaultdict[SampleId, _Conversation](_Conversation)
        self._num_open = self._num_waiting = 0
        self._turns_seen = 0

    def open_window(self, most: Mapping[SampleId, int]) -> None:
        """Let each of these samples make so many turns before it rests."""
        for one in self._conversations.values():
            one.most, one.num_ended = None, 0
        for id, num in most.items():
            self._conversations[id].most = num

    def close_window(self) -> None:
        """Let all samples go on."""
        self.open_window({})

    def rests(self, id: SampleId) -> bool:
        """Whether a sample is not to go on in this window, although its environment has replied."""
        one = self._conversations.get(id)
        return one is not None and one.rests

    def ended(self, turns: Iterable[TurnEnded], now: float) -> None:
        """These turns have ended, as is known at `now`: their samples wait."""
        for turn in turns:
            self.wait_for([turn.id])
            one = self._conversations[turn.id]
            one.since = now
            self._turns_seen = min(self._turns_seen + 1, _TURNS_KEPT)
            tokens = turn.response_tokens - one.told
            self.turn_tokens += (tokens - self.turn_tokens) / self._turns_seen
            one.told = turn.response_tokens
            one.num_turns += 1
            one.num_ended += one.most is not None

    def wait_for(self, ids: Iterable[SampleId]) -> None:
        """These samples wait: those of a checkpoint too, whose environments reply once more."""
        for id in ids:
            one = self._conversations[id]
            assert not one.is_open, f"sample {id} has ended a turn while it waits"
            one.is_open = True
            self._num_open += 1
            self._num_waiting += 1

    def replied(self, event: Replied) -> None:
        """These replies have come. One is passed over if its sample begins anew meanwhile."""
        self.waits_seen.saw(event.seconds)
        for reply, seconds in zip(event.replies, event.seconds, strict=True):
            if self.waits(reply.id):
                one = self._conversations[reply.id]
                one.reply = reply
                one.waited += seconds
                self._num_waiting -= 1

    def waited(self, id: SampleId) -> float:
        """Seconds that a sample's environment has taken for all its replies so far."""
        one = self._conversations.get(id)
        return 0.0 if one is None else one.waited

    def is_open(self, id: SampleId) -> bool:
        """Whether a sample's turn has ended and it has not been answered."""
        one = self._conversations.get(id)
        return one is not None and one.is_open

    def waits(self, id: SampleId) -> bool:
        """Whether a sample's environment has still to reply."""
        one = self._conversations.get(id)
        return one is not None and one.waits

    def first_reply_s(self, ids: Iterable[SampleId], now: float) -> float:
        """Seconds until one of these samples is likely to be answered; 0 if one does not wait."""
        ids = [*ids]
        if not all(map(self.waits, ids)):
            return 0.0
        return self.waits_seen.first([self._waits_for(id, now) for id in ids])

    def seconds_left(self, ids: Iterable[SampleId], turn_s: float, now: float) -> float:
        """Seconds until all of these conversations are likely to have ended.

        Of each what is left of its present wait, and for each turn that it has still to make
        `turn_s` and a mean wait.
        """
        ids, each_s = [*ids], turn_s + self.waits_seen.mean
        waited = [self._waits_for(id, now) if self.waits(id) else None for id in ids]
        left = [max(0.0, self.expected - self._conversations[id].num_turns) for id in ids]
        present = iter(self.waits_seen.left([seconds for seconds in waited if seconds is not None]))
        return max(
            (
                turns * each_s + (0.0 if seconds is None else next(present))
                for turns, seconds in zip(left, waited, strict=True)
            ),
            default=0.0,
        )

    def _waits_for(self, id: SampleId, now: float) -> float:
        """Seconds since a sample's turn ended; 0 for one of a checkpoint, whose wait began anew."""
        since = self._conversations[id].since
        return 0.0 if since is None else now - since

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
        if self._num_open == self._num_waiting:
            return []
        known = (self._conversations[id] for id in ids if id in self._conversations)
        due = [(one, one.reply) for one in known if one.reply is not None and not one.rests]
        for one, reply in due:
            self._num_open -= 1
            one.close()
            if one.told:  # else it comes from a checkpoint, which does not have its turns
                one.told += len(reply.tokens or ())
        return [Answer(tuple(reply for _, reply in due))] if due else []

    def forget(self, ids: Sequence[SampleId]) -> None:
        """These begin anew, in the same window if there is one, or have left."""
        for id in ids:
            self.put_by.discard(id)
            if (old := self._conversations.pop(id, None)) is not None:
                self._num_open -= old.is_open
                self._num_waiting -= old.waits
                if old.most is not None:
                    again = _Conversation(most=old.most, num_ended=old.num_ended)
                    self._conversations[id] = again
