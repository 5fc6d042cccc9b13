"""A round that may end before all samples are made: when it stops, and what it leaves."""

from collections.abc import Callable, Iterator
from itertools import chain

from hybridrl.flow.ledger import ON_INSTANCE
from hybridrl.flow.sample import SampleId
from hybridrl.flow.turns import RecordDiffers, RoundOrder, TurnsTaken
from hybridrl.schedule.generation_round import GenerationRound, logger
from hybridrl.schedule.generation_task import GenerationTask
from hybridrl.schedule.instances import InstanceStatus

_UNBOUNDED = 2**31


class StoppableRound(GenerationRound):
    """A round that may decode until a schedule has enough, and park what is left.

    | method        | stops                              | what is made until then follows from   |
    |---------------|------------------------------------|----------------------------------------|
    | `run_until`   | after an equal round of calls      | decode steps                           |
    | `run_windows` | after a window of turns            | turns                                  |
    | `run_timed`   | when the turns that are begun end  | the times of replies; it gives a record |
    | `run_order`   | when all of a record is there      | the record                             |
    | `run_freely`  | when the calls in flight end       | time: the caller takes none by it      |

    In each of them forward passes wait. `park` then stops what has not finished, and `run` lets the
    other stages end.

    Example of a record: a makes two turns, and its episode ends with the second one's reply. That
    is (2, True). b makes one, whose reply has not come when a is enough: (1, False). Where the
    record is followed b's reply may come first. Then b rests until a has ended.
    """

    def run_until(self, enough: Callable[[], bool]) -> None:
        """Let all instances decode in equal rounds of calls until `enough` holds after one.

        So the samples finished by then depend on decode steps alone, never on time. These samples
        have no turns.
        """
        self._equal_rounds = True
        while self._unfinished and not enough():
            self._decode()
            self._end_calls()

    def run_windows(self, enough: Callable[[], bool], windows: Iterator[int]) -> None:
        """Let conversations run in `windows` of so many turns until `enough` holds after one.

        So what is made by then depends on turns alone, never on the times of replies. Within a
        window no sample waits for another. A queued one begins with a window.
        """
        while self._unfinished and not enough():
            self.turns.close_window()
            self._deal()
            self.turns.open_window(dict.fromkeys(self._held, next(windows)))
            self._start_calls()
            while self._in_flight or not all(map(self.turns.rests, self._held)):
                self.stages.start(self._events())
                self._start_calls()
        self.turns.close_window()

    def run_freely(self, enough: Callable[[], bool]) -> None:
        """Let all instances decode until `enough` holds, whatever has finished by then."""
        while self._unfinished and not enough():
            self._decode()
            self.stages.start(self._events())
        self._end_calls()

    def run_timed(self, enough: Callable[[], bool]) -> RoundOrder:
        """Let conversations run until `enough` holds; replies that are due are not waited for.

        Turns that are begun come to their end, so that each is of one version of the weights. Gives
        what `run_order` needs to make the same samples.
        """
        ids = [id for id, task in self._tasks.items() if task.converses and not self._is_done(id)]
        self.turns.open_window(dict.fromkeys(ids, _UNBOUNDED))
        while self._unfinished and not enough():  # again, where a death has taken some of it
            self.turns.bound(_UNBOUNDED)
            num_left = self.ledger.num_unfinished
            while self._unfinished and (num_left == self.ledger.num_unfinished or not enough()):
                num_left = self.ledger.num_unfinished  # nothing is enough before another has ended
                self._decode()
                self.stages.start(self._events())
            self._recall()
            self.turns.bound(0)
            self._start_calls()
            while self._in_flight:
                self.stages.start(self._events())
                self._start_calls()
        taken = {id: self._taken(id) for id in ids}
        self.turns.close_window()
        return {id: turns for id, turns in taken.items() if turns.num or turns.ended}

    def run_order(self, order: RoundOrder) -> None:
        """Let each conversation make the turns that it has made in a recorded round, and no more.

        Raises RecordDiffers where one ends otherwise than in the record.
        """
        if strange := sorted(order.keys() - self._tasks.keys()):
            raise RecordDiffers(f"it has no sample {strange[0]} in this round")
        late = [id for id, taken in order.items() if not taken.ended]
        self.turns.open_window({id: taken.num for id, taken in order.items()}, late)
        while not all(self._is_there(id, taken) for id, taken in order.items()):
            self._decode()
            self.stages.start(self._events())
        self._end_calls()
        for id, taken in order.items():
            now = self._taken(id)
            if (now.ended, now.failure) != (taken.ended, taken.failure):
                ended = "ends" if now.ended else "does not end"
                why = f" (its episode has failed: {now.failure})" if now.failure else ""
                raise RecordDiffers(f"sample {id} {ended} in {taken.num} turns of a round{why}")
        self.turns.close_window()

    def _taken(self, id: SampleId) -> TurnsTaken:
        """What a sample has made in the window."""
        if not self._is_done(id):
            return TurnsTaken(self.turns.num_ended(id), False)
        return TurnsTaken(self.turns.num_ended(id), True, self.turns.failure(id))

    def _is_there(self, id: SampleId, taken: TurnsTaken) -> bool:
        """Whether a sample has made its turns of the record, and ended if it has there."""
        if self._is_done(id):
            return True
        has_turns = self.turns.num_ended(id) >= taken.num and self.turns.is_open(id)
        return has_turns and (not taken.ended or self.turns.rests(id))

    def _is_done(self, id: SampleId) -> bool:
        return self.ledger.is_finished(id)

    @property
    def _unfinished(self) -> bool:
        return bool(self._queue) or any(i.held for i in self._alive)

    @property
    def _held(self) -> Iterator[SampleId]:
        """The samples that instances hold; there are no wide ones in these rounds."""
        return chain.from_iterable(i.held for i in self._alive)

    def _end_calls(self) -> None:
        """Let the calls in flight end."""
        while self._in_flight:
            self.stages.start(self._events())

    def _recall(self) -> None:
        """Take back the samples that have not reached their instances."""
        for instance in self._alive:
            unsent = [id for id in instance.held if self.ledger.status(id) not in ON_INSTANCE]
            self._queue += unsent
            for id in unsent:
                instance.lose(id)
            instance.inbox.clear()

    def park(self, with_kv: bool) -> list[GenerationTask]:
        """Stop samples that are queued or decode; gives them as a later round continues them.

        When this returns nothing is in flight. Samples lost to a death meanwhile wait for `run`.
        """
        assert not self._in_flight, "parked in the middle of a round"
        self._parks_kv = with_kv
        self._recall()
        self._queue.clear()
        for instance in self._alive:
            if instance.held:
                instance.become(InstanceStatus.LEAVING)
        self._decode()
        while self._in_flight or self.stages.running:
            self.stages.start(self._events())
        self._parks_kv = None
        restarted = {*self._queue}
        stopped = [
            task
            for id, task in self._tasks.items()
            if task.sampling and not self.ledger.is_finished(id) and id not in restarted
        ]
        for task in stopped:
            del self._tasks[task.sample.id]
        self._num_stopped = len(stopped)
        logger.debug("%d samples are left to a later round", len(stopped))
        return stopped
