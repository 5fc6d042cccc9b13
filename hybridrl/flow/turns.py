"""Conversations: the samples whose turn has ended, and what their environments reply."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybridrl.flow.executor import Answer, EpisodeReply, Replied, TurnEnded
from hybridrl.flow.sample import SampleId
from hybridrl.flow.waits import WaitModel

ENOUGH_TURNS = 8
"""A call returns once a turn has ended for so many samples that still decode.

In virtual time that is the best of 1 to 64 where a call costs 2 ms. Where calls cost ten times as
much, fewer and longer ones are: 2.
"""


@dataclass(slots=True)
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

    _replies: dict[SampleId, EpisodeReply | None] = field(default_factory=dict)  # None: it waits
    _num_waiting: int = 0
    waits_seen: WaitModel = field(default_factory=WaitModel)
    """Learned from the replies."""
    _since: dict[SampleId, float] = field(default_factory=dict)  # when a sample's turn ended
    put_by: set[SampleId] = field(default_factory=set)
    """Parked ones that their instance gave up while all its samples waited; until they reply."""
    _turns_left: dict[SampleId, int] = field(default_factory=dict)  # of the window

    def open_window(self, ids: Iterable[SampleId], num_turns: int) -> None:
        """Let each of these samples, and no other, make so many turns before it rests."""
        self._turns_left = dict.fromkeys(ids, num_turns)

    def close_window(self) -> None:
        """Let all samples go on."""
        self._turns_left.clear()

    def rests(self, id: SampleId) -> bool:
        """Whether a sample is not to go on in this window, although its environment has replied."""
        reply = self._replies.get(id)
        return reply is not None and reply.tokens is not None and self._turns_left.get(id) == 0

    def ended(self, turns: Iterable[TurnEnded], now: float) -> None:
        """These turns have ended, as is known at `now`: their samples wait."""
        for turn in turns:
            self._since[turn.id] = now
            self.wait_for([turn.id])
            if turn.id in self._turns_left:
                self._turns_left[turn.id] -= 1

    def wait_for(self, ids: Iterable[SampleId]) -> None:
        """These samples wait: those of a checkpoint too, whose environments reply once more."""
        for id in ids:
            assert id not in self._replies, f"sample {id} has ended a turn while it waits"
            self._replies[id] = None
            self._num_waiting += 1

    def replied(self, event: Replied) -> None:
        """These replies have come. One is passed over if its sample begins anew meanwhile."""
        self.waits_seen.saw(event.seconds)
        for reply in event.replies:
            if self.waits(reply.id):
                self._replies[reply.id] = reply
                self._num_waiting -= 1

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

    def put_away(self, ids: Iterable[SampleId]) -> list[SampleId]:
        """These are parked until they are answered; gives those that already are."""
        ids = [*ids]
        self.put_by.update(filter(self.waits, ids))
        return [id for id in ids if id not in self.put_by]

    def take_back(self) -> list[SampleId]:
        """Those put away that are answered by now."""
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
        self.forget([reply.id for reply in replies])
        return [Answer(tuple(replies))] if replies else []

    def forget(self, ids: Sequence[SampleId]) -> None:
        """These are answered, begin anew, or have left."""
        for id in ids:
            self._num_waiting -= self.waits(id)
            self._replies.pop(id, None)
            self._since.pop(id, None)
            self.put_by.discard(id)
