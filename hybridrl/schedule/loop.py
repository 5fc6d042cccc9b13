"""The loop of a run: samples are made, event by event, while early stages run on finished ones.

Invariants (`tests/schedule/test_loop.py` has a test of each, by its name):

- one_call_in_flight: an instance has one call in flight at most.
- one_place: a sample is queued, owned by one instance, parked, or finished on one rank.
- versions_change_between_calls: an instance's version changes only as the first command of a call,
  of an instance without unfinished samples; where ranks train too, before the first call of a
  round, with the weights of all ranks.
- leaves_once: each dispatched sample leaves once.
- order_of_ids: a step's samples are trained in the order of their ids.
- trains_without_samples: a place trains only while it has no unfinished sample.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from hybridrl.config import Migration
from hybridrl.costs.meter import CostMeter
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    TRAINING_POOL,
    Advanced,
    Computed,
    EarlyTrained,
    Event,
    Executor,
    Finished,
    Park,
    Parked,
    Replied,
    Resume,
    SamplesRead,
    Submit,
    TargetsLoaded,
    WeightsPushed,
    WorkerDied,
)
from hybridrl.flow.graph import AnswersStage
from hybridrl.flow.ledger import ON_INSTANCE, SampleStatus
from hybridrl.flow.sample import SampleId
from hybridrl.flow.turns import enough_turns
from hybridrl.flow.waits import worth_parking
from hybridrl.schedule.base import learn, next_events
from hybridrl.schedule.dealing import Dealer
from hybridrl.schedule.groups import BegunPrompts, GenerationTask, tasks_of
from hybridrl.schedule.instances import Instance, Instances, InstanceStatus, RoundLimits
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.tail import NoTail

logger = logging.getLogger(__name__)

_LEAVING, _JOINED = InstanceStatus.LEAVING, InstanceStatus.JOINED
_SCORING, _TRAINING = InstanceStatus.SCORING, InstanceStatus.TRAINING
_NONE_DECODES = "every generation instance that still decodes has died; the others train"


class Loop:
    """Makes the samples of prompts that have begun (`BegunPrompts`), in rounds; one for a run.

    `begin` names a round's early stages and what its tail does (`NoTail`). `run` lets instances
    decode until a caller has enough; forward passes wait meanwhile. `park` stops what is left.
    `finish` lets all be made, and every stage end: an instance that holds no sample has time for
    them (`StreamedStages`), and for what the tail has for it.

    A generated sample waits in the driver, or is held by one instance from its submission or its
    arrival until it is finished or parked.

    Conversations: a sample whose turn has ended stays with its instance and costs it no row, so
    that a queued one may come. It goes on in the first call after its environment's reply
    (`OpenTurns`), and moves like others. An instance whose samples all wait gets no call. If passes
    wait, and it is likely to have the time, it parks them and runs a pass. They resume where there
    is room once they are answered.

    Death: samples that an instance held, and finished ones on its ranks, are made again on the
    others. Their tokens are the same, since they follow from the sample's identity.
    """

    def __init__(
        self,
        executor: Executor,
        groups: BegunPrompts,
        meter: CostMeter,
        limits: RoundLimits,
        decode_steps: int,
    ) -> None:
        self.executor, self.groups, self.meter = executor, groups, meter
        self.ledger, self.turns = groups.ledger, groups.turns
        self.limits, self.decode_steps = limits, decode_steps
        self.instances = Instances()
        self.lasts = False
        """Whether instances go on with samples of later rounds, when one begins or ends."""
        self.pushed: Callable[[int], None] = lambda version: None
        """Called with a version that instances may load."""
        self._queue: list[SampleId] = []
        self._num_loading = 0  # the dataset's answers that are to come
        self._equal_calls = False  # the calls in flight are an equal round
        self._parks_kv: bool | None = None  # while all samples stop: whether with keys and values

    # -- what is to be made --------------------------------------------------------------------

    def begin(
        self,
        stages: StreamedStages,
        tail: NoTail,
        may_start: Callable[[int], bool] = lambda prompt: True,
    ) -> None:
        """A round begins; `may_start` says whether its stages may start on a prompt yet."""
        if not (self.lasts and self.has_begun):
            assert not self.unfinished, "the round before has not ended"
            self.instances.begin(self.executor.instances)
            self._lost_tensors: dict[SampleId, frozenset[str]] = {}  # of samples that began anew
            self._longest, self._equal_calls = 0, False
        self.stages, self.tail, self.may_start = stages, tail, may_start
        self.num_restarted = 0
        self.num_overlapped = 0  # calls of forward passes that began while samples were made
        self.kv_bytes = 0  # that came from other ranks

    def make(self, tasks: Sequence[GenerationTask]) -> None:
        """Deal samples to the instances, and load those that are the dataset's answers."""
        for task in tasks:
            status = self.ledger.status(task.sample.id)
            assert status in (SampleStatus.QUEUED, SampleStatus.PARKED), (task.sample.id, status)
            self.stages.stamp(task.stage)
        self._queue += [task.sample.id for task in tasks if task.sampling is not None]
        self.deal()
        logger.debug(
            "%d samples to generate on %d instances; %d wait for room",
            len(tasks),
            len(self.instances.alive),
            len(self._queue),
        )
        targets: dict[str, list[GenerationTask]] = {}
        for task in tasks:
            if task.sampling is None:
                targets.setdefault(task.stage.name, []).append(task)
        for same in targets.values():
            self._load(same)

    def _load(self, tasks: Sequence[GenerationTask]) -> None:
        """Load answers of the dataset as samples, which are of one stage."""
        stage = tasks[0].stage
        assert isinstance(stage, AnswersStage), stage
        self._num_loading += len(tasks)
        ids, prompts = [task.sample.id for task in tasks], [task.prompt for task in tasks]
        self.executor.load_targets(stage, ids, prompts)

    def deal(self) -> None:
        """Give the queued samples to instances that have room (`Dealer`)."""
        alive = self.instances.alive
        able = [i for i in alive if i.joins is None and i.status is not _LEAVING]
        busy = len(able) < len(alive)
        # One that runs a pass is no place for what can go on now.
        able = [i for i in able if i.held or i.sent is None] or able
        able = [i for i in able if i.status is not _TRAINING]
        if self._queue and not able and not busy:
            raise RuntimeError(_NONE_DECODES)
        if not self._queue:
            return
        dealer = Dealer(self.groups, self.limits, len(alive))
        deal = dealer.deal_by_version if self.lasts else dealer.deal
        dealt, self._queue = deal(self._queue, able)
        for instance, ids, version in dealt:
            if version is not None:
                instance.load(version)
            self._give(instance, ids)

    def _give(self, instance: Instance, ids: Sequence[SampleId]) -> None:
        """Samples of one prompt that come together share its cached keys and values."""
        fresh: dict[tuple[str, int], list[SampleId]] = defaultdict(list)
        parked: dict[int, list[SampleId]] = defaultdict(list)
        for number in ids:
            instance.hold(number)
            task = self.groups.task(number)
            if self.ledger.status(number) is SampleStatus.QUEUED:
                fresh[task.stage.name, number.prompt].append(number)
            else:
                parked[id(task.parked)].append(number)
        for group in fresh.values():
            task = self.groups.task(group[0])
            assert task.sampling is not None
            instance.inbox.append(Submit(tuple(group), task.prompt, task.sampling))
        for group in parked.values():
            state = self.groups.task(group[0]).parked
            assert state is not None
            instance.inbox.append(Resume(tuple(group), state, self.limits.stale_kv))

    # -- the loop ------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], equal: bool = False) -> None:
        """Let all instances decode until `until` holds, or nothing is left to make.

        With `equal` they do so in equal rounds of calls, and it is asked after each: then what is
        made until it holds depends on decode steps alone. Else it is asked after all events, which
        come by time, and calls may be in flight at the end.
        """
        self._equal_calls = equal
        while self.unfinished and not until():
            self.deal()
            self._start_calls()
            if equal:
                self.end_calls()
            else:
                self._start(self._events())

    def run_on(self, until: Callable[[], bool], touched: Sequence[int] = ()) -> None:
        """Go on until `until` holds; instances keep what they have, and calls are in flight.

        Stages may start on the `touched` prompts at once.
        """
        self._go_on(touched)
        while not until():
            self._go_on(self._events())

    def take_own(self, events: Iterable[Event]) -> list[Event]:
        """Go on with the loop's own among these events; gives the others."""
        touched, others = self._handle(events)
        self._go_on(touched)
        return others

    def run_held(self, until: Callable[[], bool]) -> None:
        """Let the samples that instances hold go on until `until` holds; queued ones wait."""
        self._start_calls()
        while not until():
            self._start(self._events())
            self._start_calls()

    def end_calls(self) -> None:
        """Let the calls in flight end, and begin none."""
        while self.instances.in_flight:
            self._start(self._events())

    def finish(self) -> None:
        """Return when all samples are made and every early stage has run on its own."""
        self._go_on(())
        while self.unfinished or self._waits or self.instances.in_flight or self.stages.running:
            self._go_on(self._events())
        if self.stages.waiting and any(i.status is _TRAINING for i in self.instances.alive):
            raise RuntimeError(_NONE_DECODES)  # for its generation weights
        assert not self.stages.waiting, "forward passes still wait"
        self._check_restored()
        numbers = self.tail.num_migrated, self.num_restarted
        logger.debug("the round ended: %d samples migrated, %d restarted", *numbers)

    def _go_on(self, touched: Sequence[int]) -> None:
        """Keep every instance at work; decoding goes first, since the step waits for it."""
        self.tail.gather(not self._queue)
        self.deal()
        self._start_calls()
        self._start(touched)
        self._use_spare()
        self.tail.use_pool()

    def recall(self) -> None:
        """Take back the samples that have not reached their instances."""
        for instance in self.instances.alive:
            unsent = [id for id in instance.held if self.ledger.status(id) not in ON_INSTANCE]
            self._queue += unsent
            for id in unsent:
                instance.lose(id)
            instance.inbox.clear()

    def park(self, with_kv: bool) -> list[GenerationTask]:
        """Stop samples that are queued or decode; gives them as a later round continues them.

        When this returns nothing is in flight. Samples lost to a death meanwhile wait for `finish`.
        """
        assert not self.instances.in_flight, "parked in the middle of a round"
        self._parks_kv = with_kv
        self.recall()
        self._queue.clear()
        for instance in self.instances.alive:
            if instance.held:
                instance.become(_LEAVING)
        self._start_calls()
        while self.instances.in_flight or self.stages.running:
            self._start(self._events())
        self._parks_kv = None
        restarted = {*self._queue}
        stopped = [
            task
            for task in tasks_of(self.groups.open)
            if task.sampling
            and not self.ledger.is_finished(task.sample.id)
            and task.sample.id not in restarted
        ]
        logger.debug("%d samples are left to a later round", len(stopped))
        return stopped

    @property
    def has_begun(self) -> bool:
        """Whether a round has begun in this run."""
        return bool(self.instances)

    @property
    def is_loading(self) -> bool:
        """Whether answers of the dataset are to come."""
        return self._num_loading > 0

    @property
    def held(self) -> Iterator[SampleId]:
        """The samples that instances hold."""
        return chain.from_iterable(i.held for i in self.instances)

    @property
    def unfinished(self) -> bool:
        """Whether samples wait for an instance, or one holds some."""
        return bool(self._queue) or self.instances.hold_some

    @property
    def _waits(self) -> bool:
        """Whether samples are to come from elsewhere: from a reply, or the dataset."""
        return bool(self.turns.put_by) or self.is_loading

    def _start_calls(self) -> None:
        for instance in self.instances:
            self._go(instance)

    def _start(self, touched: Sequence[int]) -> None:
        """Stages may start on these prompts."""
        self.stages.start(touched)
        self.tail.touched(touched)

    def _events(self) -> Sequence[int]:
        """Wait for events and record them; gives the prompts on which stages may start."""
        touched, others = self._handle(next_events(self.executor))
        assert not others, others
        return touched

    def _handle(self, events: Iterable[Event]) -> tuple[list[int], list[Event]]:
        """Record the loop's events; gives prompts on which stages may start, and other events."""
        touched: dict[int, None] = {}
        others: list[Event] = []
        for event in events:
            match event:
                case Advanced():
                    touched |= self._advanced(event)
                case Replied():
                    self.turns.replied(event)
                    self._queue += self.turns.take_back()
                case TargetsLoaded():
                    self._num_loading -= len(event.finished)
                    touched |= self._finish(event.finished)
                case Computed() if self.stages.has(event.stage):
                    touched |= self.stages.computed(event)
                    if event.instance is not None:
                        self._returned(event.instance)
                case SamplesRead() if self.stages.has(event.stage):
                    touched |= self.stages.read(event)
                case EarlyTrained():
                    touched |= self.tail.trained(event)
                    if event.instance != TRAINING_POOL:
                        self._returned(event.instance)
                case WorkerDied():
                    self._died(self.instances[event.instance])
                case WeightsPushed():
                    self.pushed(event.version)
                case _:
                    others.append(event)
        return [prompt for prompt in touched if self.may_start(prompt)], others

    def _returned(self, number: int) -> float:
        """The call of an instance has ended; gives the seconds that it was in flight."""
        return self.instances[number].returned(self.executor.clock.now())

    def _use_spare(self) -> None:
        """Let every instance that holds no sample run forward passes that wait, or what the tail
        has for it.
        """
        nothing = set[bool]()  # where one that trains finds no groups, or one that does not yet
        alive, decoding = self.instances.alive, self.unfinished or self._waits
        for instance in alive:
            if instance.joins is not None or instance.sent is not None:
                continue
            if instance.held:
                self._put_by(instance)
                continue
            trains = instance.status is _TRAINING
            if self.stages.start_waiting(instance.number, len(alive), decoding, trains):
                self.num_overlapped += decoding
                if not trains:
                    instance.become(_SCORING)
            elif trains in nothing or not self.tail.use(instance, not self._queue):
                nothing.add(trains)
                continue
            instance.send(self.executor.clock.now())

    def _put_by(self, instance: Instance) -> None:
        """Park the samples of an instance, which all wait, if it has passes to run meanwhile."""
        held, costs = instance.held, self.meter.costs()
        busy = self._queue or self.instances.migrating or instance.inbox
        if busy or costs is None or not self.stages.could_start(instance.number):
            return
        seconds = self.turns.first_reply_s(held, self.executor.clock.now())
        if worth_parking(costs, seconds, len(held), self._longest):
            instance.become(_LEAVING)
            instance.puts_by = True
            self._go(instance)

    # -- events --------------------------------------------------------------------------------

    def _advanced(self, event: Advanced) -> dict[int, None]:
        passed = self._returned(event.instance)
        instance = self.instances[event.instance]
        self.meter.saw_round_trip(max(0.0, passed - event.work.seconds))
        learn(self.meter, event, width=instance.width)
        instance.progress += event.work.tokens_of_row
        self.kv_bytes += event.work.kv_bytes
        for finished in event.finished:
            instance.lose(finished.id)
        for parked in event.parked:
            self._parked(instance, parked)
        for id in event.lost:
            instance.lose(id)
            self._restart(id)
        self.turns.ended(event.turns, self.executor.clock.now())
        for turn in event.turns:
            if self.ledger.status(turn.id) is SampleStatus.DECODING:  # else it was parked, too
                self.ledger.move(turn.id, SampleStatus.WAITING)
        going = (self.ledger.status(id) is SampleStatus.DECODING for id in instance.held)
        assert event.running == sum(going), event
        return self._finish(event.finished)

    def _finish(self, events: Iterable[Finished]) -> dict[int, None]:
        prompts: dict[int, None] = {}
        for event in events:
            maker = self.groups.task(event.id).stage
            sample = self.ledger.finish(maker, event)
            self._longest = max(self._longest, sample.tokens)
            self.stages.stamp(maker)
            prompts[event.id.prompt] = None
        return prompts

    def _go(self, instance: Instance) -> None:
        """Let an instance run the samples that it holds, if it is not running."""
        held, stops = instance.held, instance.status is _LEAVING
        if not held or instance.sent is not None:
            return
        if any(self.instances[member].status is not _JOINED for member in instance.members):
            return
        if not stops and not instance.inbox and not self.turns.can_go(held):
            return
        commands, instance.inbox = instance.inbox, []
        for id in chain.from_iterable(command.ids for command in commands):
            waits = self.turns.is_open(id)
            self.ledger.move(id, SampleStatus.WAITING if waits else SampleStatus.DECODING)
        if stops:
            width = 1 if instance.puts_by else self.tail.width
            commands.append(Park(tuple(held), self._with_kv(), width))
        else:
            answers = self.turns.answer(held)
            for id in chain.from_iterable(answer.ids for answer in answers):
                self.ledger.move(id, SampleStatus.DECODING)
            commands += answers
        instance.send(self.executor.clock.now())
        # Under pipeline parallelism a sample with its last token is handed out by one more step;
        # else nothing is left to decode.
        steps = 1 if stops else self._steps(instance)
        self.executor.advance(instance.number, commands, steps, self._enough_turns(instance))

    def _steps(self, instance: Instance) -> int:
        """Decode steps of the next call: as many as allowed where nothing waits for its end.

        Where samples wait in the driver that is until rows are likely to have none ahead.
        """
        costs, steps = self.meter.costs(), self.decode_steps
        if self._equal_calls or costs is None:
            return steps
        rows = min(len(instance.held), self.limits.max_held)
        short = self.limits.steps(costs.at_width(instance.width), rows, steps)
        if self._end_is_awaited(instance):
            return short
        if self._queue:
            ahead = len(instance.held) - rows
            tokens = sum(self.groups.task(id).tokens for id in instance.held)
            return max(short, min(steps, round(ahead * tokens / len(instance.held) / rows)))
        return steps

    def _enough_turns(self, instance: Instance) -> int:
        """One in how many turns that have ended ends the next call."""
        costs, tokens = self.meter.costs(), self.turns.turn_tokens
        if costs is None or not tokens:
            return ENOUGH_TURNS
        going = sum(not self.turns.waits(id) for id in instance.held)
        costs = costs.at_width(instance.width)
        return enough_turns(costs, min(going, self.limits.max_held), tokens)

    def _end_is_awaited(self, instance: Instance) -> bool:
        """Whether something can begin once it is known that one of several samples has ended.

        A call ends with its last sample in any case.
        """
        held = instance.held
        # A turn's end: its environment has to know of it. The others' replies come meanwhile.
        converses = any(self.groups.task(id).converses for id in held)
        passes = len(held) > 1 and self.stages.wait_for_samples
        tail = not self._queue and self.tail.awaits(instance)
        return converses or passes or tail

    def _parked(self, source: Instance, parked: Parked) -> None:
        """Samples have stopped: they wait for a reply or a later step, or move on."""
        puts_by = source.puts_by
        for id in parked.ids:
            source.lose(id)
            self.ledger.move(id, SampleStatus.PARKED)
            self.groups.update([replace(self.groups.task(id), parked=parked)])
        if self._parks_kv is not None:
            return
        if puts_by:
            self._queue += self.turns.put_away(parked.ids)
            return
        left = self.tail.arrive(source, parked)
        if parked.width == 1:  # any instance with room
            self._queue += left
        else:  # their state is that of a wide instance, which has died
            for id in left:
                self._restart(id)

    def _with_kv(self) -> bool:
        if self._parks_kv is not None:
            return self._parks_kv
        if self.limits.migration is not Migration.auto:
            return self.limits.migration is Migration.kv
        costs = self.meter.costs()
        return costs is not None and costs.cheaper_by_kv(self._longest)

    # -- deaths --------------------------------------------------------------------------------

    def _died(self, instance: Instance) -> None:
        """Make again the samples that an instance held, and those whose tensors it had."""
        lost = instance.die()
        if not self.instances.alive:
            raise RuntimeError("every generation instance has died")
        lost += self.tail.dies(instance)
        finished = [
            sample
            for sample in self.ledger.samples
            if self.ledger.is_finished(sample.id) and self.stages.is_on(sample, instance.number)
        ]
        for sample in finished:
            self.stages.forget(sample)
            lost.append(sample.id)
        logger.debug("instance %d died; %d samples begin anew", instance.number, len(lost))
        for id in lost:
            self._restart(id)
        self.tail.lost(instance, finished)

    def _check_restored(self) -> None:
        """Samples that began anew have the tensors again that they had.

        Raises RuntimeError where one came from a stage of an earlier round that waits for the whole
        batch: it does not run again.
        """
        for id, lost in self._lost_tensors.items():
            missing = lost - self.groups.task(id).sample.tensors
            if missing and self.ledger.is_finished(id):
                raise RuntimeError(
                    f"a generation instance died with {', '.join(sorted(missing))} of sample {id},"
                    " which an earlier round has computed"
                )

    def _restart(self, id: SampleId) -> None:
        """Begin a sample anew."""
        task = self.groups.task(id)
        lost = self._lost_tensors.get(id, frozenset())
        self._lost_tensors[id] = lost | task.sample.tensors
        self.ledger.restart(id)
        self.turns.forget([id])
        task = replace(task, parked=None, tokens=task.total)
        self.groups.update([task])
        self.num_restarted += 1
        if isinstance(task.stage, AnswersStage):
            self._load([task])
        else:
            self._queue.append(id)
