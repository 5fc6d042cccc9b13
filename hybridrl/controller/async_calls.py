"""Work of several rounds of calls to ranks, many pieces at a time."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.flow.executor import Event
from hybridrl.workers.rank_calls import Reference

Answer = TypeVar("Answer")
Result = TypeVar("Result")
Calling = Generator[Mapping[Reference[Any], int], list[Any], Result]
EventCalls = Calling[list[Event]]
"""Yields the calls of a round, each with its rank; is sent their answers in that order, once all
are there; returns its events."""


@dataclass(slots=True)
class _Round:
    """The calls in flight of a piece of work, and the answers so far."""

    work: EventCalls
    calls: list[Reference[Any]]
    answers: dict[Reference[Any], Any] = field(default_factory=dict)


class Rounds:
    """Drives several pieces of work at once: each continues when its own round is answered.

    Example: two ranks export copies of samples; when both have answered, a third is called with
    them; its answer is the event. Meanwhile other ranks decode.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        # Calls in flight, with their rank.
        self._pending: dict[Reference[Any], tuple[int, _Round]] = {}
        self._ready: list[Event] = []  # events for the next `wait`

    def begin(self, work: EventCalls) -> None:
        """Start the first round."""
        self._ready += self._start_next(work, None)

    def wait(self, meanwhile: Callable[[], None]) -> list[Event]:
        """Events of the work that has ended, of one piece at least.

        `meanwhile` is called again and again, and may raise. Raises `RuntimeError` when nothing is
        in flight.
        """
        events, self._ready = self._ready, []
        while not events:
            meanwhile()
            if not self._pending:
                raise RuntimeError("nothing is in flight")
            for reference in self.group.launcher.wait(list(self._pending)):
                rank, calls = self._pending.pop(reference)
                calls.answers[reference] = self.group.value_of(rank, reference)
                if len(calls.answers) == len(calls.calls):
                    events += self._start_next(calls.work, [calls.answers[x] for x in calls.calls])
        return events

    def _start_next(self, work: EventCalls, answers: list[Any] | None) -> list[Event]:
        """Start the next round of `work`; its events where there is none."""
        try:
            calls = work.send(answers) if answers is not None else next(work)
            while not calls:
                calls = work.send([])
        except StopIteration as ended:
            events: list[Event] = ended.value
            return events
        started = _Round(work, list(calls))
        self._pending |= {call: (rank, started) for call, rank in calls.items()}
        return []


def answers_of(calls: Mapping[Reference[Answer], int]) -> Calling[list[Answer]]:
    """A round of calls, each with its rank; gives their answers in that order."""
    answers: list[Answer] = yield calls
    return answers


def single(call: Reference[Event], rank: int) -> EventCalls:
    """One call, whose answer is an event."""
    return (yield from answers_of({call: rank}))
