"""Work of several rounds of calls to ranks, many pieces at a time."""

import concurrent.futures
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from hybridrl.driver.rank_failures import InstanceEnded
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.executor import Computed, Event, WorkerDied
from hybridrl.flow.sample import SampleId
from hybridrl.runtime.launcher import POLL_S, CallFailed
from hybridrl.workers.rank_calls import Reference

_NO_RANK = -1  # of work that no rank does
MIXED_POLL_S = 0.02
"""Seconds between two looks where ranks and other work are waited for."""
_SALVAGE_S = 5.0  # for the readings that are left when a run fails

Answer = TypeVar("Answer")
Result = TypeVar("Result")
AnyCall = Reference[Answer] | Future[Answer]
"""A call to a rank, or work of a judge or an environment."""
Calling = Generator[Mapping[AnyCall[Any], int], list[Any], Result]
EventCalls = Calling[list[Event]]
"""Yields the calls of a round, each with its rank; is sent their answers in that order, once all
are there; returns its events."""


@dataclass(slots=True)
class _Round:
    """The calls in flight of a piece of work, and the answers so far."""

    work: EventCalls
    calls: list[AnyCall[Any]]
    answers: dict[AnyCall[Any], Any] = field(default_factory=dict)
    is_over: bool = False
    """Whether the work has gone on without all answers, since an instance has ended."""


Then = Callable[[list[Any]], None]
"""What is done with the answers to a reading's calls, in the order of the calls; instances that
have ended give none."""


@dataclass(slots=True)
class _Unawaited:
    """Calls that nobody waits for, the step of the run that began them, and the answers so far."""

    calls: list[Reference[Any]]
    step: int
    then: Then | None
    answers: dict[Reference[Any], Any] = field(default_factory=dict)

    @property
    def is_answered(self) -> bool:
        return len(self.answers) == len(self.calls)


class Rounds:
    """Drives several pieces of work at once: each continues when its own round is answered.

    Where a generation instance has ended, the work that called one of its ranks is thrown
    `InstanceEnded`, after `WorkerDied`. Work that lets it pass has no event.

    Example: two ranks export copies of samples; when both have answered, a third is called with
    them; its answer is the event. Meanwhile other ranks decode.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self.group = group
        # Calls in flight, with their rank; other work apart.
        self._pending: dict[Reference[Any], tuple[int, _Round]] = {}
        self._here: dict[Future[Any], tuple[int, _Round]] = {}
        self._unawaited: dict[Reference[Any], tuple[int, _Unawaited]] = {}
        self._readings: deque[_Unawaited] = deque()  # those whose answers somebody wants
        self._ready: list[Event] = []  # events for the next `wait`
        self._num_told = 0  # instances that have ended, and `wait` has said so
        self._is_later: Callable[[Event], bool] = lambda event: False
        self._later: list[Event] = []

    def begin(self, work: EventCalls) -> None:
        """Start the first round."""
        self._ready += self._start_next(work, None)

    def ready(self, event: Event) -> None:
        """Have an event for the next `wait`, of no call."""
        self._ready.append(event)

    def wait(self, meanwhile: Callable[[], None]) -> list[Event]:
        """Events of the work that has ended, of one piece at least.

        `meanwhile` is called again and again, and may raise. Raises `RuntimeError` when nothing is
        in flight.
        """
        events, self._ready = self._now(self._ready), []
        while not (events := events + self._deaths()):
            meanwhile()
            self._read_unawaited(0.0)
            if not (self._pending or self._here):
                self.drain()  # its failure comes first
                raise RuntimeError("nothing is in flight")
            events += self._now(self._collect())
        return events

    def discard(self) -> None:
        """Wait for all work, whose events nobody wants but those for later."""
        self._now(self._ready)
        self._ready = []
        while self._pending or self._here:
            self._now(self._collect())

    def _collect(self) -> list[Event]:
        """Events of the work whose last calls have ended, soon after there are any."""
        events = list[Event]()
        for call in self._ended():
            if isinstance(call, Future):
                _, calls = self._here.pop(call)
                if call.cancelled():  # what it was for has left: an episode was given up
                    calls.work.close()
                    continue
                calls.answers[call] = call.result()
            else:
                rank, calls = self._pending.pop(call)
                try:
                    calls.answers[call] = self.group.value_of(rank, call)
                except InstanceEnded as ended:
                    events += self._ended_within(ended, calls)
            if len(calls.answers) == len(calls.calls):
                answers = [calls.answers[call] for call in calls.calls]
                events += self._start_next(calls.work, answers)
        return events

    def _ended_within(self, ended: InstanceEnded, calls: _Round) -> list[Event]:
        """Events of an instance's end, and of work that called a rank of it."""
        events = self._deaths()
        if not calls.is_over:
            calls.is_over = True
            events += self._start_next(calls.work, ended)
        return events

    def _deaths(self) -> list[Event]:
        """Instances that have ended, whoever has learned of it; each once."""
        ended = self.group.failures.ended
        told, self._num_told = self._num_told, len(ended)
        return [WorkerDied(instance) for instance in ended[told:]]

    def begin_unawaited(
        self, calls: Mapping[Reference[Any], int], then: Then | None = None
    ) -> None:
        """Calls that nobody waits for, each with its rank; `then`, if any, gets their answers.

        Answers come while others are waited for (`wait`, `drain`), and `then` is called in the
        order in which these readings began. A failure of a call, or of `then`, is raised there.
        """
        begun = _Unawaited(list(calls), self.group.current_step(), then)
        self._unawaited.update({call: (rank, begun) for call, rank in calls.items()})
        if then is not None:
            self._readings.append(begun)
            self._hand_on()

    def drain(self) -> None:
        """Wait for the answers that nobody has waited for; raises the failure of one."""
        while self._unawaited:
            self._read_unawaited(POLL_S)
        self._hand_on()  # what is left where `then` has failed

    def salvage(self) -> None:
        """Hand on what readings give after the run has failed, in so far as all ranks answer.

        Ranks serve calls in their order, so a reading of a whole step is answered unless a rank
        failed before it began the next step.
        """
        until = time.monotonic() + _SALVAGE_S
        launcher = self.group.launcher
        unread = {call: begun for call, (_, begun) in self._unawaited.items() if begun.then}
        while unread and (left := until - time.monotonic()) > 0:
            ended = launcher.wait([*unread], 0.0 if self.group.killed else left)
            if not ended:  # nor will they
                break
            for call in ended:
                reading = unread.pop(call)
                with suppress(CallFailed):
                    reading.answers[call] = launcher.get(call).value
        self._readings = deque(reading for reading in self._readings if reading.is_answered)
        self._hand_on()

    def _read_unawaited(self, timeout: float) -> None:
        if self._unawaited:
            calls = {call: rank for call, (rank, _) in self._unawaited.items()}
            for call in self.group.wait(calls, timeout):
                rank, begun = self._unawaited.pop(call)
                try:
                    begun.answers[call] = self.group.value_of(rank, call, begun.step)
                except InstanceEnded:
                    begun.answers[call] = None
            self._hand_on()

    def _hand_on(self) -> None:
        while self._readings and self._readings[0].is_answered:
            reading = self._readings.popleft()
            assert reading.then is not None
            answers = [reading.answers[call] for call in reading.calls]
            reading.then([answer for answer in answers if answer is not None])

    @contextmanager
    def apart(self, is_later: Callable[[Event], bool]) -> Iterator[None]:
        """Within, `wait` gives no event that `is_later`: those are ready afterwards."""
        self._is_later, self._later = is_later, []
        try:
            yield
        finally:
            self._is_later = lambda event: False
            self._ready += self._later

    def _now(self, events: list[Event]) -> list[Event]:
        """Return the events that are not kept for later."""
        self._later += filter(self._is_later, events)
        return [event for event in events if not self._is_later(event)]

    def _ended(self) -> list[AnyCall[Any]]:
        """Calls that have ended; none after `POLL_S` seconds without any."""
        ended: list[AnyCall[Any]] = [call for call in self._here if call.done()]
        if not self._pending:
            first = concurrent.futures.FIRST_COMPLETED
            return list(concurrent.futures.wait(self._here, POLL_S, first).done)
        # Nothing waits for both; a rank's call takes longer than this, and so does a judge.
        timeout = 0.0 if ended else MIXED_POLL_S if self._here else POLL_S
        calls = {call: rank for call, (rank, _) in self._pending.items()}
        return ended + self.group.wait(calls, timeout)

    def _start_next(
        self, work: EventCalls, answers: list[Any] | InstanceEnded | None
    ) -> list[Event]:
        """Start the next round of `work`; its events where there is none."""
        try:
            if isinstance(answers, InstanceEnded):
                calls = work.throw(answers)
            else:
                calls = work.send(answers) if answers is not None else next(work)
            while not calls:
                calls = work.send([])
        except StopIteration as ended:
            events: list[Event] = ended.value
            return events
        except InstanceEnded:
            return []
        started = _Round(work, list(calls))
        for call, rank in calls.items():
            if isinstance(call, Future):
                self._here[call] = rank, started
            else:
                self._pending[call] = rank, started
        return []


def answers_of(calls: Mapping[Reference[Answer], int]) -> Calling[list[Answer]]:
    """A round of calls, each with its rank; gives their answers in that order."""
    round_: dict[AnyCall[Any], int] = {}
    round_.update(calls.items())
    answers: list[Answer] = yield round_
    return answers


def result_of(work: "Future[Answer]") -> Calling[Answer]:
    """A round of work that no rank does; gives its result, at once where it has ended."""
    if work.done():
        return work.result()
    (result,) = yield {work: _NO_RANK}
    return cast(Answer, result)


def single(call: Reference[Event], rank: int) -> EventCalls:
    """One call, whose answer is an event."""
    return (yield from answers_of({call: rank}))


def with_ids(event: Computed, ids: Sequence[SampleId]) -> Computed:
    """The event of some of its samples."""
    kept = {*ids}
    scalars = {
        name: tuple(x for id, x in zip(event.ids, values, strict=True) if id in kept)
        for name, values in event.scalars.items()
    }
    return replace(event, ids=tuple(id for id in event.ids if id in kept), scalars=scalars)


def as_one(answers: Sequence[Computed]) -> Computed:
    """One event for the results of several ranks."""
    some = [a for a in answers if a.ids]
    names = some[0].scalars if some else {}
    return replace(
        (some or answers)[0],
        ids=tuple(id for a in some for id in a.ids),
        scalars={name: tuple(x for a in some for x in a.scalars[name]) for name in names},
        seconds=max(a.seconds or 0.0 for a in answers),
    )
