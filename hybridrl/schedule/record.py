"""Conversations of a round that stops before all are made: where each one stops.

| function      | a round stops                      | what is made until then follows from    |
|---------------|------------------------------------|-----------------------------------------|
| `run_windows` | after a window of turns            | turns                                   |
| `run_timed`   | when the turns that are begun end  | the times of replies; it gives a record |
| `run_order`   | when all of a record is there      | the record                              |

Example of a record: a makes two turns, and its episode ends with the second one's reply. That is
(2, True). b makes one, whose reply has not come when a is enough: (1, False). Where the record is
followed b's reply may come first. Then b rests until a has ended.
"""

from collections.abc import Callable, Iterator

from hybridrl.flow.sample import SampleId
from hybridrl.flow.turns import RecordDiffers, RoundOrder, TurnsTaken
from hybridrl.schedule.groups import tasks_of
from hybridrl.schedule.loop import Loop

_UNBOUNDED = 2**31


def run_windows(loop: Loop, enough: Callable[[], bool], windows: Iterator[int]) -> None:
    """Let conversations run in `windows` of so many turns until `enough` holds after one.

    So what is made by then depends on turns alone, never on the times of replies. Within a window
    no sample waits for another. A queued one begins with a window.
    """
    turns = loop.turns

    def rest() -> bool:
        return not loop.instances.in_flight and all(map(turns.rests, loop.held))

    while loop.unfinished and not enough():
        turns.close_window()
        loop.deal()
        turns.open_window(dict.fromkeys(loop.held, next(windows)))
        loop.run_held(rest)
    turns.close_window()


def run_timed(loop: Loop, enough: Callable[[], bool]) -> RoundOrder:
    """Let conversations run until `enough` holds; replies that are due are not waited for.

    Turns that are begun come to their end, so that each is of one version of the weights. Gives
    what `run_order` needs to make the same samples.
    """
    turns, ledger = loop.turns, loop.ledger
    tasks = [task for task in tasks_of(loop.groups.open) if task.converses]
    ids = [task.sample.id for task in tasks if not ledger.is_finished(task.sample.id)]
    turns.open_window(dict.fromkeys(ids, _UNBOUNDED))
    num_left = 0

    def another_is_enough() -> bool:
        """Nothing is enough before another sample has ended."""
        nonlocal num_left
        before, num_left = num_left, ledger.num_unfinished
        return before != num_left and enough()

    while loop.unfinished and not enough():  # again, where a death has taken some of it
        turns.bound(_UNBOUNDED)
        num_left = ledger.num_unfinished
        loop.run(another_is_enough)
        loop.recall()
        turns.bound(0)
        loop.run_held(lambda: not loop.instances.in_flight)
    taken = {id: _taken(loop, id) for id in ids}
    turns.close_window()
    return {id: turns for id, turns in taken.items() if turns.num or turns.ended}


def run_order(loop: Loop, order: RoundOrder) -> None:
    """Let each conversation make the turns that it has made in a recorded round, and no more.

    Raises RecordDiffers where one ends otherwise than in the record.
    """
    known = {task.sample.id for task in loop.groups.tasks}
    if strange := sorted(order.keys() - known):
        raise RecordDiffers(f"it has no sample {strange[0]} in this round")
    late = [id for id, taken in order.items() if not taken.ended]
    loop.turns.open_window({id: taken.num for id, taken in order.items()}, late)
    loop.run(lambda: all(_is_there(loop, id, taken) for id, taken in order.items()))
    loop.end_calls()
    for id, taken in order.items():
        now = _taken(loop, id)
        if (now.ended, now.failure) != (taken.ended, taken.failure):
            ended = "ends" if now.ended else "does not end"
            why = f" (its episode has failed: {now.failure})" if now.failure else ""
            raise RecordDiffers(f"sample {id} {ended} in {taken.num} turns of a round{why}")
    loop.turns.close_window()


def _taken(loop: Loop, id: SampleId) -> TurnsTaken:
    """What a sample has made in the window."""
    num = loop.turns.num_ended(id)
    if not loop.ledger.is_finished(id):
        return TurnsTaken(num, False)
    return TurnsTaken(num, True, loop.turns.failure(id))


def _is_there(loop: Loop, id: SampleId, taken: TurnsTaken) -> bool:
    """Whether a sample has made its turns of the record, and ended if it has there."""
    if loop.ledger.is_finished(id):
        return True
    has_turns = loop.turns.num_ended(id) >= taken.num and loop.turns.is_open(id)
    return has_turns and (not taken.ended or loop.turns.rests(id))
