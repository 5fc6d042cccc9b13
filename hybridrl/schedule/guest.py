"""Samples of another graph, made on the instances of a schedule that goes on to train meanwhile."""

from collections.abc import Collection, Generator, Iterator, Sequence
from typing import Any

from hybridrl.flow.executor import (
    Advanced,
    Computed,
    Event,
    Executor,
    Phase,
    Replied,
    SamplesRead,
    Scope,
    WorkerDied,
)
from hybridrl.flow.graph import AnswersStage, ComputeStage, Graph, SourceStage, UpdateStage
from hybridrl.flow.lengths import LengthModel
from hybridrl.flow.sample import SampleId
from hybridrl.schedule import StepResult
from hybridrl.schedule.base import Prompt, StepSettings
from hybridrl.schedule.dealing import Dealer, Dealt
from hybridrl.schedule.instances import Instance, RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule, SchedulePolicy


class _OneVersion(SchedulePolicy):
    """Makes all prompts of a step by one version, which instances load with their first samples."""

    def __init__(self, version: int) -> None:
        self.version = version

    def enter(self, phases: Collection[Phase | None]) -> None:
        """Nothing is done for all instances at once."""

    def deal(
        self, dealer: Dealer, queue: Sequence[SampleId], able: Sequence[Instance]
    ) -> tuple[list[Dealt], list[SampleId]]:
        """What each instance gets of a queue, with the weights, and what is left of it."""
        return dealer.deal(queue, able, self.version)


class GuestStep(LoopSchedule):
    """A step of a graph that trains nothing, whose events come from the loop of another schedule.

    Life: `start`, `take` until `is_over`, `result`, `release`. Its samples are made by one
    `version` of the weights. An instance that dies gives its samples to the others.
    """

    def __init__(
        self,
        graph: Graph,
        executor: Executor,
        prompts: Iterator[Prompt],
        settings: StepSettings,
        version: int,
        *,
        limits: RoundLimits,
        length_model: LengthModel,
    ) -> None:
        assert may_be_guest(graph, executor), "a graph that needs other ranks than the instances'"
        parts = graph, executor, prompts, settings, _OneVersion(version)
        super().__init__(*parts, limits=limits, length_model=length_model)

    def start(self, step: int) -> None:
        """Begin to make the samples; `step` is for the record."""
        self._begin_step(step)
        self._step_batch = self._begin_round(self.settings.prompts_per_step)
        makers = [stage for stage in self._order if isinstance(stage, SourceStage)]
        tasks = self._begin_making(makers, self._step_batch)
        self._ids = {task.sample.id for task in tasks}
        self.loop.make(tasks)
        self.loop.take_own([])

    def take(self, events: Sequence[Event]) -> list[Event]:
        """Go on with its own among these events; gives the others, and every death."""
        own = [event for event in events if self._is_own(event)]
        left = self.loop.take_own(own) if own else []
        assert not left, left
        deaths = [event for event in own if isinstance(event, WorkerDied)]
        return [event for event in events if not self._is_own(event)] + deaths

    def _is_own(self, event: Event) -> bool:
        match event:
            case Advanced() | WorkerDied():  # nobody else has calls of instances in flight
                return True
            case Computed() | SamplesRead() | Replied():
                return not self._ids.isdisjoint(event.ids)
        return False

    @property
    def is_over(self) -> bool:
        """Whether all samples are made, and their stages have run."""
        return self.loop.is_done

    def result(self) -> StepResult:
        """The record of the step, which is over; its samples stay on the ranks until `release`."""
        self.loop.check_done()
        batch = self._step_batch
        streamed = self._end_making(self._makers)
        batch |= {name: samples for name, samples in streamed.items() if name in self.graph.stages}
        self._run_left([stage for stage in self._order if stage.name not in batch], batch)
        return self._result(*self._ledger.settle())


def may_be_guest(graph: Graph, executor: Executor) -> bool:
    """Whether a graph is one of samples that instances make, and of stages where these are."""
    for stage in graph.stages.values():
        if isinstance(stage, UpdateStage | AnswersStage):
            return False
        here = Scope.RANK, Scope.DRIVER
        if isinstance(stage, ComputeStage) and executor.scope(stage) not in here:
            return False
    return True


GuestSteps = Generator[GuestStep, StepResult, Any]
"""Yields steps that have begun, each after the one before; is sent the result of each."""


class GuestWork:
    """Steps of a guest, one after the other (`Loop.guest`)."""

    def __init__(self, version: int, steps: GuestSteps) -> None:
        self.version, self._steps = version, steps
        self._step: GuestStep | None = next(steps, None)
        self._go_on()

    @property
    def is_over(self) -> bool:
        """Whether no step is left."""
        return self._step is None

    def take(self, events: Sequence[Event]) -> list[Event]:
        """Go on with its own among these events; gives those that concern others."""
        assert self._step is not None, "a guest that has left"
        others = self._step.take(events)
        self._go_on()
        return others

    def _go_on(self) -> None:
        """Hand over the results of steps that are over."""
        while self._step is not None and self._step.is_over:
            result, self._step = self._step.result(), None
            try:
                self._step = self._steps.send(result)
            except StopIteration:
                return
