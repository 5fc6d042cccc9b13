"""Samples being made while the per-sample stages run on those that are done; the tail's moves."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from hybridrl.flow.batch import ready, record_computed, record_finished
from hybridrl.flow.executor import (
    Advanced,
    Command,
    Computed,
    Executor,
    Finished,
    Park,
    Parked,
    Placed,
    Resume,
    Submit,
)
from hybridrl.flow.graph import Stage
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.schedules import StageSpan
from hybridrl.flow.schedules.base import telling_events


class Overlap:
    """One round of making samples, event by event.

    A generated sample is held by one instance, from its submission or its arrival until it is
    finished; then it is waited for by each stage that follows, runs there, and is done.

    Migration: when at most `threshold` samples are held, `gather` names the instances that keep
    theirs. The others are `leaving`: the next call parks what they hold, and each parked sample
    resumes on the keeper with the most room. Nothing else is gathered until all have arrived.
    So an instance that was left holds nothing more, and a sample moves at most once for each
    instance.

    Invariants: an instance has one call in flight, if any; it has one as long as it holds samples;
    `inbox` are the commands of its next call, whose samples it holds already.

    Example, threshold 4, instances A to D with 2, 1, 1, 0 samples left and room for 3: A and B
    keep; when C's call returns it parks c, whose tokens go to B. C and D score what they have made.
    """

    def __init__(
        self,
        executor: Executor,
        decode_steps: int,
        stages: Sequence[Stage],
        threshold: int,
        max_held: int,
    ) -> None:
        self.executor, self.decode_steps, self.stages = executor, decode_steps, stages
        self.threshold, self.max_held = threshold, max_held
        self.num_migrated = 0
        self._makers: dict[SampleId, Stage] = {}
        self._samples: dict[SampleId, Sample] = {}
        self._num_unfinished: dict[str, int] = {}
        self._held: dict[int, dict[SampleId, None]] = defaultdict(dict)
        self._inbox: dict[int, list[Command]] = defaultdict(list)
        self._in_flight: set[int] = set()
        self._leaving: set[int] = set()
        self._keepers: frozenset[int] = frozenset()
        self._waiting: dict[str, set[SampleId]] = {stage.name: set() for stage in stages}
        self._running: dict[str, dict[SampleId, Sample]] = {stage.name: {} for stage in stages}
        self._times: dict[str, list[float]] = {}

    @property
    def spans(self) -> list[StageSpan]:
        """From a stage's first start to its last end; those of different stages overlap."""
        return [StageSpan(name, times[0], times[-1]) for name, times in self._times.items()]

    def expect(self, maker: Stage, samples: Iterable[Sample], follow: Iterable[Stage]) -> None:
        """`maker` will make `samples`, and the stages `follow` run on each of them."""
        made = {sample.id: sample for sample in samples}
        self._samples |= made
        self._makers |= dict.fromkeys(made, maker)
        self._num_unfinished[maker.name] = len(made)
        for stage in follow:
            self._waiting[stage.name] |= made.keys()
        self._stamp(maker)

    def submit(self, instance: int, command: Submit) -> None:
        """Give samples to an instance; they start with `run`."""
        self._inbox[instance].append(command)
        self._held[instance] |= dict.fromkeys(command.ids)

    def run(self) -> None:
        """Return when all samples are made and every stage has run on its own."""
        for instance in list(self._inbox):
            self._go(instance)
        while any(self._num_unfinished.values()) or any(self._running.values()):
            for event in telling_events(self.executor):
                match event:
                    case Advanced():
                        self._advanced(event)
                    case Placed():
                        self._start_stages(self._record(event.finished))
                    case Computed():
                        self._computed(event)
        assert not self._in_flight, f"instances {self._in_flight} run without samples"
        assert not any(self._waiting.values()), f"stages wait for ever: {self._waiting}"

    # -- events --------------------------------------------------------------------------------

    def _advanced(self, event: Advanced) -> None:
        instance = event.instance
        self._in_flight.remove(instance)
        finished = self._record(event.finished)
        for sample in finished:
            del self._held[instance][sample.id]
        for parked in event.parked:
            self._move(instance, parked)
        arriving = sum(len(c.ids) for c in self._inbox[instance] if isinstance(c, Resume))
        assert event.running == len(self._held[instance]) - arriving, event
        if not self._held[instance]:
            self._leaving.discard(instance)
        self._gather()
        # Decoding goes first: it is what the step waits for.
        self._go(instance)
        self._start_stages(finished)

    def _record(self, events: Iterable[Finished]) -> list[Sample]:
        samples = []
        for event in events:
            maker, sample = self._makers[event.id], self._samples[event.id]
            record_finished(maker, sample, event)
            self._num_unfinished[maker.name] -= 1
            self._stamp(maker)
            samples.append(sample)
        return samples

    def _computed(self, event: Computed) -> None:
        running = self._running[event.stage]
        record_computed(self._stage(event.stage), running, event)
        self._stamp(self._stage(event.stage))
        self._start_stages([running.pop(id) for id in event.ids])

    def _start_stages(self, samples: Sequence[Sample]) -> None:
        """Start every stage that can run on some of `samples` now."""
        for stage in self.stages:
            waiting = self._waiting[stage.name]
            todo = [s for s in samples if s.id in waiting and ready(stage, s)]
            if todo:
                self._stamp(stage)
                waiting.difference_update(sample.id for sample in todo)
                self._running[stage.name] |= {sample.id: sample for sample in todo}
                self.executor.compute(stage, todo)

    def _go(self, instance: int) -> None:
        """Let an instance run on what it holds, if it is not running."""
        if instance in self._in_flight or not self._held[instance]:
            return
        commands = self._inbox.pop(instance, [])
        if instance in self._leaving:
            commands.append(Park(tuple(self._held[instance])))
        self._in_flight.add(instance)
        self.executor.advance(instance, commands, self.decode_steps)

    # -- migration -----------------------------------------------------------------------------

    def _gather(self) -> None:
        """Begin a migration where there are few samples left and some instance can be freed."""
        held = {instance: len(ids) for instance, ids in self._held.items() if ids}
        if self._leaving or any(self._inbox.values()) or sum(held.values()) > self.threshold:
            return
        self._keepers = gather(held, self.max_held)
        self._leaving = held.keys() - self._keepers

    def _move(self, source: int, parked: Parked) -> None:
        """Resume what `source` has parked on the instances that keep theirs."""
        arriving: dict[int, list[SampleId]] = defaultdict(list)
        for id in parked.ids:
            del self._held[source][id]
            keeper = min(self._keepers, key=lambda i: (len(self._held[i]), i))
            assert len(self._held[keeper]) < self.max_held, "the keepers are full"
            self._held[keeper][id] = None
            arriving[keeper].append(id)
        self.num_migrated += len(parked.ids)
        for keeper, ids in arriving.items():
            self._inbox[keeper].append(Resume(tuple(ids), parked))
            self._go(keeper)

    # -- the record ----------------------------------------------------------------------------

    def _stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)

    def _stamp(self, stage: Stage) -> None:
        self._times.setdefault(stage.name, []).append(self.executor.clock.now())


def gather(held: Mapping[int, int], max_held: int) -> frozenset[int]:
    """The fewest instances that can hold all samples: which of those in `held` keep theirs.

    `held` counts the samples of each instance that has some; none need move away from a keeper,
    which takes others up to `max_held`. Those that hold most keep theirs, so that few samples move;
    of equal ones the first.

    Example: {0: 1, 1: 3, 2: 2} is {1} with max_held 6, {1, 2} with 4, and all three with 2.
    """
    order = sorted(held, key=lambda instance: (-held[instance], instance))
    for num in range(1, len(order)):
        room = sum(max(0, max_held - held[instance]) for instance in order[:num])
        if room >= sum(held[instance] for instance in order[num:]):
            return frozenset(order[:num])
    return frozenset(order)
