"""Work of several rounds of calls to ranks, many pieces at a time."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.flow.executor import Event

Work = Generator[Mapping[Any, int], list[Any], list[Event]]
"""Yields the calls of a round, each with its rank; is sent their answers in that order, once all
are there; returns its events."""


@dataclass(slots=True)
class _Round:
    """The calls in flight of a piece of work, and the answers so far."""

    work: Work
    calls: list[Any]
    answers: dict[Any, Any] = field(default_factory=dict)


class Rounds:
    """Drives pieces of work side by side: each goes on when its own round is answered.

    Example: copies of samples are asked of two ranks; when both have sent theirs, a third is called
    with them; its answer is the event. Meanwhile other ranks decode.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        self._pending: dict[Any, tuple[int, _Round]] = {}  # calls in flight, with their rank
        self._told: list[Event] = []  # events that the next `wait` gives

    def begin(self, work: Work) -> None:
        """Start the first round."""
        self._told += self._go_on(work, None)

    def wait(self, meanwhile: Callable[[], None]) -> list[Event]:
        """Events of the work that has ended, of one piece at least.

        `meanwhile` is called again and again, and may raise. Raises `RuntimeError` when nothing is
        in flight.
        """
        events, self._told = self._told, []
        while not events:
            meanwhile()
            if not self._pending:
                raise RuntimeError("nothing is in flight")
            for reference in self.group.launcher.wait(list(self._pending)):
                rank, calls = self._pending.pop(reference)
                calls.answers[reference] = self.group.value_of(rank, reference)
                if len(calls.answers) == len(calls.calls):
                    events += self._go_on(calls.work, [calls.answers[x] for x in calls.calls])
        return events

    def _go_on(self, work: Work, answers: list[Any] | None) -> list[Event]:
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


def single(call: Any, rank: int) -> Work:
    """One call, whose answer is an event."""
    events: list[Event] = yield {call: rank}
    return events
