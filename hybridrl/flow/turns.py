"""Conversations: the samples whose turn has ended, and what their environments reply."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hybridrl.flow.executor import Answer, EpisodeReply, Replied, TurnEnded
from hybridrl.flow.sample import SampleId


@dataclass(slots=True)
class OpenTurns:
    """Samples between two turns of the model, wherever they are: held by an instance, or parked.

    | a sample | from              | until                                           |
    |----------|-------------------|-------------------------------------------------|
    | is open  | its turn's end    | a call of its instance takes the `Answer`       |
    | waits    | its turn's end    | the environment has replied                     |

    One that is made anew is not open: its conversation begins again.

    Example: a's turn ends, it is open and waits. `Replied` comes, and it waits no more. The next
    call of its instance takes the reply, and it is not open.
    """

    _replies: dict[SampleId, EpisodeReply | None] = field(default_factory=dict)  # None: it waits
    _num_waiting: int = 0

    def ended(self, turns: Iterable[TurnEnded]) -> None:
        """These turns have ended: their samples wait."""
        self.wait_for(turn.id for turn in turns)

    def wait_for(self, ids: Iterable[SampleId]) -> None:
        """These samples wait: those of a checkpoint too, whose environments reply once more."""
        for id in ids:
            assert id not in self._replies, f"sample {id} has ended a turn while it waits"
            self._replies[id] = None
            self._num_waiting += 1

    def replied(self, event: Replied) -> None:
        """These replies have come. One is passed over if its sample begins anew meanwhile."""
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

    def can_go(self, ids: Iterable[SampleId]) -> bool:
        """Whether one of these samples has something to do, since it does not wait."""
        return any(not self.waits(id) for id in ids)

    def answer(self, ids: Iterable[SampleId]) -> list[Answer]:
        """What those of the samples are told that do not wait any more; none for none."""
        if len(self._replies) == self._num_waiting:
            return []
        replies = [reply for id in ids if (reply := self._replies.get(id)) is not None]
        self.forget([reply.id for reply in replies])
        return [Answer(tuple(replies))] if replies else []

    def forget(self, ids: Sequence[SampleId]) -> None:
        """These are answered, begin anew, or have left."""
        for id in ids:
            self._num_waiting -= self.waits(id)
            self._replies.pop(id, None)
