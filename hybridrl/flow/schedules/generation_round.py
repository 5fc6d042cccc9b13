"""Samples being made while early stages run on those that are done; the tail's moves; deaths."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hybridrl.config import Migration
from hybridrl.flow.executor import (
    Advanced,
    Command,
    Computed,
    Finished,
    Park,
    Parked,
    Resume,
    Sampling,
    Submit,
    TargetsLoaded,
    WorkerDied,
)
from hybridrl.flow.graph import AnswersStage, SourceStage
from hybridrl.flow.ledger import record_finished
from hybridrl.flow.lengths import dispatch
from hybridrl.flow.migration import MigrationPlan
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.schedules.base import learn, telling_events
from hybridrl.flow.schedules.streamed_stages import StreamedStages


@dataclass(frozen=True, kw_only=True)
class RoundLimits:
    """What bounds an instance, and how the tail moves.

    An instance is given at most `max_held` samples at a time. `chunk_tokens` bound one call of a
    forward pass. A call that decodes is to last about `call_s` seconds, with fewer steps than are
    allowed while the batch is large, since what has finished is known only at its end. `stale_kv`
    lets a sample go on with keys and values of older weights.
    """

    max_held: int
    chunk_tokens: int
    call_s: float = 0.25
    migration: Migration = Migration.auto
    stale_kv: bool = False


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A sample to be made, from the beginning or from where it was parked.

    `total` response tokens are predicted, of which `tokens` are still to come. Without `sampling`
    it is the dataset's own answer.
    """

    sample: Sample
    stage: SourceStage
    prompt: Any
    sampling: Sampling | None
    total: float
    tokens: float
    parked: Parked | None = None


class GenerationRound:
    """One round of making samples, event by event.

    A generated sample waits in the driver, or is held by one instance from its submission or its
    arrival until it is finished or parked. Then it passes through the streamed stages
    (`StreamedStages`), for which an instance that holds no sample has time.

    Migration: when at most `gathering.threshold` samples are left, `gather` names the instances
    that keep theirs. The others are `leaving`: the next call parks what they hold, and each parked
    sample resumes on the keeper with the most room. This happens once in a round, as the model
    that chooses the threshold has it: to gather ever denser would slow the tail for instances that
    have nothing left to do.

    Death: what an instance held, and what lay on it, is made again on the others. Its tokens are
    the same, since they follow from the sample's identity.

    Invariants: an instance has one call in flight, if any; a sample is unmade, held, parked on its
    way, or finished; `inbox` are the commands of an instance's next call, whose samples it holds
    already.

    Example, threshold 4, instances A to D with 2, 1, 1, 0 samples left and room for 3: A and B
    keep; when C's call returns it parks c, whose tokens go to B. C and D run the forward passes of
    what is finished, their own samples first, then those of A and B.
    """

    def __init__(
        self,
        stages: StreamedStages,
        limits: RoundLimits,
        decode_steps: int,
        gathering: MigrationPlan,
    ) -> None:
        self.stages, self.executor, self.meter = stages, stages.executor, stages.meter
        self.limits, self.decode_steps, self.gathering = limits, decode_steps, gathering
        self.num_migrated = self.num_restarted = 0
        self._alive = list(self.executor.instances)
        self._jobs: dict[SampleId, GenerationTask] = {}
        self._num_unmade = 0
        self._queue: list[SampleId] = []
        self._held: dict[int, dict[SampleId, None]] = defaultdict(dict)
        self._inbox: dict[int, list[Command]] = defaultdict(list)
        self._in_flight: dict[int, float] = {}  # instance -> when its call was sent
        self._leaving: set[int] = set()
        self._keepers: frozenset[int] = frozenset()
        self._longest = 0
        self._equal_rounds = False
        self._stopped: dict[SampleId, Parked | None] | None = None  # once all are to stop

    # -- what is to be made --------------------------------------------------------------------

    def make(self, jobs: Sequence[GenerationTask]) -> None:
        """Deal jobs to the instances: longest first, balanced by predicted tokens."""
        for job in jobs:
            self._expect(job)
        self._queue += [job.sample.id for job in jobs]
        self._deal()

    def submit_targets(self, jobs: Sequence[GenerationTask]) -> None:
        """Have the dataset's answers made samples; jobs are all of one stage."""
        for job in jobs:
            self._expect(job)
        ids, prompts = [job.sample.id for job in jobs], [job.prompt for job in jobs]
        stage = jobs[0].stage
        assert isinstance(stage, AnswersStage), stage
        self.executor.load_targets(stage, ids, prompts)

    def adopt(self, jobs: Sequence[GenerationTask]) -> None:
        """Know of samples that an earlier round has made: stages may still run on them."""
        self._jobs |= {job.sample.id: job for job in jobs}

    def _expect(self, job: GenerationTask) -> None:
        assert job.sample.rank < 0, f"{job.sample.id} is made already"
        self.adopt([job])
        self._num_unmade += 1
        self.stages.stamp(job.stage)

    def _deal(self) -> None:
        """Give instances of what waits in the driver, as far as they have room.

        Groups stay together where they can: their samples are about as long, so that spread over
        all instances each would decode as long as the longest, and they share a prompt.
        """
        able = [instance for instance in self._alive if instance not in self._leaving]
        room = [max(0, self.limits.max_held - len(self._held[instance])) for instance in able]
        if not self._queue or not any(room):
            return
        groups: dict[tuple[str, int], list[SampleId]] = {}
        for id in self._queue:
            groups.setdefault((self._jobs[id].stage.name, id.prompt), []).append(id)
        units = list(groups.values())
        if len(units) < len(able):
            units = [[id] for id in self._queue]
        self._queue = []
        for parts in (units, None):  # what does not fit as a whole is dealt one by one
            units = parts or [[id] for unit in units for id in unit]
            tokens = [sum(self._jobs[id].tokens for id in unit) for unit in units]
            loads = [sum(self._jobs[id].tokens for id in self._held[i]) for i in able]
            room = [max(0, self.limits.max_held - len(self._held[i])) for i in able]
            given, left = dispatch(tokens, len(able), room, loads, [len(unit) for unit in units])
            for instance, mine in zip(able, given, strict=True):
                self._give(instance, [id for i in mine for id in units[i]])
            units = [units[i] for i in left]
        self._queue = [id for unit in units for id in unit]

    def _give(self, instance: int, ids: Sequence[SampleId]) -> None:
        """Samples of one prompt that come together share what is cached of it."""
        fresh: dict[tuple[str, int], list[SampleId]] = defaultdict(list)
        parked: dict[int, list[SampleId]] = defaultdict(list)
        for number in ids:
            self._held[instance][number] = None
            job = self._jobs[number]
            if job.parked is None:
                fresh[job.stage.name, number.prompt].append(number)
            else:
                parked[id(job.parked)].append(number)
        for group in fresh.values():
            job = self._jobs[group[0]]
            assert job.sampling is not None
            self._inbox[instance].append(Submit(tuple(group), job.prompt, job.sampling))
        for group in parked.values():
            state = self._jobs[group[0]].parked
            assert state is not None
            self._inbox[instance].append(Resume(tuple(group), state, self.limits.stale_kv))

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Return when all samples are made and every early stage has run on its own."""
        self._gather()
        self._decode()
        self._use_spare()
        while self._num_unmade or self._in_flight or self.stages.running:
            touched = self._events()
            # Decoding goes first: it is what the step waits for.
            self._gather()
            self._decode()
            self.stages.start(touched)
            self._use_spare()
        assert not self.stages.waiting, "forward passes wait for ever"

    def run_until(self, enough: Callable[[], bool]) -> None:
        """Let all instances decode in equal rounds of calls until `enough` holds after one.

        So what is finished by then depends on decode steps alone, never on time. Forward passes
        wait.
        """
        self._equal_rounds = True
        while (self._queue or any(self._held.values())) and not enough():
            self._decode()
            while self._in_flight:
                self.stages.start(self._events())

    def park(self, with_kv: bool) -> dict[SampleId, Parked | None]:
        """Stop all that is unfinished; what had not begun is not parked.

        When this returns nothing is in flight. What a death on the way has taken waits for `run`.
        """
        assert not self._in_flight, "parked in the middle of a round"
        sent = [c for commands in self._inbox.values() for c in commands]
        unbegun = [*self._queue, *(id for command in sent for id in command.ids)]
        self._stopped = {id: self._jobs[id].parked for id in unbegun}
        self._queue = []
        self._inbox.clear()
        for held in self._held.values():
            for id in unbegun:
                held.pop(id, None)
        for instance in self._alive:
            if self._held[instance]:
                self._inbox[instance].append(Park(tuple(self._held[instance]), with_kv))
        self._decode()
        while self._in_flight or self.stages.running:
            self.stages.start(self._events())
        stopped, self._stopped = self._stopped, None
        self._num_unmade -= len(stopped)
        return stopped

    def _decode(self) -> None:
        """Keep every instance decoding that holds samples."""
        if self._stopped is None:
            self._deal()
        for instance in self._alive:
            self._go(instance)

    def _events(self) -> Iterable[int]:
        """Wait for events and take them in; the prompts on which stages may be able to start."""
        touched: dict[int, None] = {}
        for event in telling_events(self.executor):
            match event:
                case Advanced():
                    touched |= self._advanced(event)
                case TargetsLoaded():
                    touched |= self._finish(event.finished)
                case Computed():
                    touched |= self.stages.computed(event)
                    if event.instance is not None:
                        del self._in_flight[event.instance]
                case WorkerDied():
                    self._died(event.instance)
        return touched

    def _use_spare(self) -> None:
        """Let every instance that holds no sample take up forward passes that wait."""
        for instance in self._alive:
            if instance in self._in_flight or self._held[instance]:
                continue
            if self.stages.take_up(instance, len(self._alive), self._num_unmade > 0):
                self._in_flight[instance] = self.executor.clock.now()

    # -- events --------------------------------------------------------------------------------

    def _advanced(self, event: Advanced) -> dict[int, None]:
        instance = event.instance
        passed = self.executor.clock.now() - self._in_flight.pop(instance)
        self.meter.saw_round_trip(max(0.0, passed - event.work.seconds))
        learn(self.meter, event)
        for finished in event.finished:
            del self._held[instance][finished.id]
        for parked in event.parked:
            self._parked(instance, parked)
        for id in event.lost:
            del self._held[instance][id]
            self._restart(self._jobs[id].sample)
        arriving = sum(len(c.ids) for c in self._inbox[instance] if not isinstance(c, Park))
        assert event.running == len(self._held[instance]) - arriving, event
        if not self._held[instance]:
            self._leaving.discard(instance)
        return self._finish(event.finished)

    def _finish(self, events: Iterable[Finished]) -> dict[int, None]:
        prompts: dict[int, None] = {}
        for event in events:
            maker, sample = self._jobs[event.id].stage, self._jobs[event.id].sample
            record_finished(maker, sample, event)
            self._num_unmade -= 1
            self._longest = max(self._longest, sample.tokens)
            self.stages.stamp(maker)
            prompts[event.id.prompt] = None
        return prompts

    def _go(self, instance: int) -> None:
        """Let an instance run on what it holds, if it is not running."""
        if instance in self._in_flight or not self._held[instance]:
            return
        commands = self._inbox.pop(instance, [])
        if instance in self._leaving:
            commands.append(Park(tuple(self._held[instance]), self._with_kv()))
        self._in_flight[instance] = self.executor.clock.now()
        stops = any(isinstance(command, Park) for command in commands)
        # Under pipeline parallelizm what has its last token already is handed out by one more step;
        # else nothing is left to decode.
        self.executor.advance(instance, commands, 1 if stops else self._steps(instance))

    def _steps(self, instance: int) -> int:
        """Decode steps of the next call."""
        costs = self.meter.costs()
        if self._equal_rounds or costs is None:
            return self.decode_steps
        step_s = costs.decode(len(self._held[instance]), 1)
        return max(1, min(self.decode_steps, round(self.limits.call_s / max(step_s, 1e-9))))

    # -- migration -----------------------------------------------------------------------------

    def _gather(self) -> None:
        """Begin the migration when there are few samples left and some instance can be freed."""
        held = {instance: len(ids) for instance, ids in self._held.items() if ids}
        if self._keepers or self._queue or any(self._inbox.values()):
            return
        if sum(held.values()) <= self.gathering.threshold:
            most = min(self.limits.max_held, self.gathering.cap)
            keepers = gather(held, most)
            if len(keepers) < len(held):
                self._keepers, self._leaving = keepers, held.keys() - keepers

    def _parked(self, source: int, parked: Parked) -> None:
        """Resume what `source` has parked on the instances that keep theirs, or put it by."""
        for id in parked.ids:
            del self._held[source][id]
        if self._stopped is not None:
            self._stopped |= dict.fromkeys(parked.ids, parked)
            return
        self.num_migrated += len(parked.ids)
        arriving: dict[int, list[SampleId]] = defaultdict(list)
        for id in parked.ids:
            room = [
                instance
                for instance in self._keepers
                if instance in self._alive and len(self._held[instance]) < self.limits.max_held
            ]
            if room:
                keeper = min(room, key=lambda i: (len(self._held[i]), i))
                self._held[keeper][id] = None
                arriving[keeper].append(id)
            else:  # a keeper has died: whoever has room
                self._jobs[id] = replace(self._jobs[id], parked=parked)
                self._queue.append(id)
        for keeper, ids in arriving.items():
            self._inbox[keeper].append(Resume(tuple(ids), parked))

    def _with_kv(self) -> bool:
        if self.limits.migration is not Migration.auto:
            return self.limits.migration is Migration.kv
        costs = self.meter.costs()
        return costs is not None and costs.cheaper_by_kv(self._longest)

    # -- deaths --------------------------------------------------------------------------------

    def _died(self, instance: int) -> None:
        """Make again what an instance held and what lay on it."""
        self._alive.remove(instance)
        if not self._alive:
            raise RuntimeError("every generation instance has died")
        self._in_flight.pop(instance, None)
        self._leaving.discard(instance)
        self._inbox.pop(instance, None)
        gone = [self._jobs[id].sample for id in self._held.pop(instance, {})]
        made = [job.sample for job in self._jobs.values() if job.sample.rank >= 0]
        lay = [sample for sample in made if self.stages.lies(sample, instance)]
        for sample in lay:
            self.stages.forget(sample)
            sample.rank, sample.spans = -1, ()
            sample.tensors.clear()
            self._num_unmade += 1
        for sample in (*gone, *lay):
            self._restart(sample)

    def _restart(self, sample: Sample) -> None:
        """Begin a sample anew; its scalars stand, since they follow from its identity too."""
        job = replace(self._jobs[sample.id], parked=None)
        job = self._jobs[sample.id] = replace(job, tokens=job.total)
        self.num_restarted += 1
        if isinstance(job.stage, AnswersStage):
            self.executor.load_targets(job.stage, [sample.id], [job.prompt])
        else:
            self._queue.append(sample.id)


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
