"""The loop of a run: samples are made, event by event, while early stages run on finished ones.

Invariants (`tests/schedule/test_loop.py` has a test of each, by its name):

- one_call_in_flight: an instance has one call in flight at most.
- one_place: a sample is queued, owned by one instance, parked, or finished on one rank.
- versions_change_between_calls: an instance's version changes only as the first command of a call,
  and unless `in_flight` while it has no unfinished sample; where ranks train too, before the first
  call of a round, with the weights of all ranks.
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
    TRAINING_POOL,
    Advanced,
    Computed,
    CopyTokens,
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
from hybridrl.flow.waits import worth_parking
from hybridrl.schedule.call_limits import CallLimits
from hybridrl.schedule.dealing import Dealer, Deals
from hybridrl.schedule.deaths import Deaths
from hybridrl.schedule.events import Guest, learn, next_events
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
    others (`Deaths`).

    A `guest` may have the instances, whose samples are parked meanwhile. Stages and training go on.
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
        self.calls = CallLimits(groups, meter, limits, decode_steps)
        self.instances = Instances()
        self.deaths = Deaths(self)
        self.lasts = False
        """Whether instances go on with samples of later rounds, when one begins or ends."""
        self.in_flight = False
        """Whether instances take the newest weights under unfinished samples."""
        self.newest: int | None = None
        """The newest version that instances may load."""
        self.deals: Deals = Dealer.deal
        """Says which instance gets which of the queued samples."""
        self.rests_at: Callable[[SampleId], int] = lambda id: 0
        """Gives the tokens with which a sample is to be parked next; 0: it is not."""
        self.recomputes: Callable[[SampleId], bool] = lambda id: False
        """Whether a parked sample goes on with keys and values that are computed again."""
        self.pushed: Callable[[int], None] = lambda version: None
        """Called with a version that instances may load."""
        self.guest: Guest | None = None
        self.returned_at = 0.0
        """When a guest has last given the instances back, by the executor's clock."""
        self.num_tokens = 0
        """Tokens that instances have made so far."""
        self._queue: list[SampleId] = []
        self._num_loading = 0  # the dataset's answers that are to come
        self._equal_calls = False  # the calls in flight are an equal round
        self._copying = set[int]()  # instances that are to give copies of what they hold
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
            self.deaths.begin()
            self._longest, self._equal_calls = 0, False
        self.stages, self.tail, self.may_start = stages, tail, may_start
        self.num_overlapped = 0  # calls of forward passes that began while samples were made
        self.kv_bytes = 0  # that came from other ranks
        if self.lasts:
            self.deaths.notice()

    def make(self, tasks: Sequence[GenerationTask]) -> None:
        """Deal samples to the instances, and load those that are the dataset's answers."""
        for task in tasks:
            status = self.ledger.status(task.sample.id)
            assert status in (SampleStatus.QUEUED, SampleStatus.PARKED), (task.sample.id, status)
            self.stages.stamp(task.stage)
        self.queue(tasks)
        self.deal()
        logger.debug("%d samples to generate; %d wait for room", len(tasks), len(self._queue))

    def queue(self, tasks: Sequence[GenerationTask]) -> None:
        """These wait for an instance; those that are the dataset's answers are loaded."""
        self._queue += [task.sample.id for task in tasks if task.sampling is not None]
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
        if self.guest is not None:
            return
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
        dealt, self._queue = self.deals(dealer, self._queue, able)
        for instance, ids, version in dealt:
            if version is not None:
                instance.load(version)
            self._give(instance, ids)

    def _give(self, instance: Instance, ids: Sequence[SampleId]) -> None:
        """Samples of one prompt that come together share its cached keys and values."""
        fresh: dict[tuple[str, int], list[SampleId]] = defaultdict(list)
        parked: dict[tuple[int, bool], list[SampleId]] = defaultdict(list)
        for number in ids:
            instance.hold(number)
            task = self.groups.task(number)
            if self.ledger.status(number) is SampleStatus.QUEUED:
                fresh[task.stage.name, number.prompt].append(number)
            else:
                parked[id(task.parked), self.recomputes(number)].append(number)
        for group in fresh.values():
            task = self.groups.task(group[0])
            assert task.sampling is not None
            rests = tuple(map(self.rests_at, group))
            instance.inbox.append(Submit(tuple(group), task.prompt, task.sampling, rests))
        for (_, recompute), group in parked.items():
            state = self.groups.task(group[0]).parked
            assert state is not None
            stale, rests = self.limits.stale_kv, tuple(map(self.rests_at, group))
            instance.inbox.append(Resume(tuple(group), state, stale, rests, recompute))

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
        self.deaths.notice()
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
        while not self.is_done:
            self._go_on(self._events())
        self.check_done()

    @property
    def is_done(self) -> bool:
        """Whether all samples are made, and nothing runs on one."""
        goes_on = self.unfinished or self._waits or self.instances.in_flight or self.stages.running
        return not goes_on

    def check_done(self) -> None:
        """Raise RuntimeError where something is left that no instance can do."""
        if self.stages.waiting and any(i.status is _TRAINING for i in self.instances.alive):
            raise RuntimeError(_NONE_DECODES)  # for its generation weights
        assert not self.stages.waiting, "forward passes still wait"
        self.deaths.check_restored()
        numbers = self.tail.num_migrated, self.deaths.num_restarted
        logger.debug("the round ended: %d samples migrated, %d restarted", *numbers)

    def _go_on(self, touched: Sequence[int]) -> None:
        """Keep every instance at work; decoding goes first, since the step waits for it."""
        self.tail.gather(not self._queue)
        self.deal()
        self._start_calls()
        self._start(touched)
        self._use_spare()
        self.tail.use_pool()

    def copy(self) -> None:
        """Have copies of what instances hold, which goes on (`BegunPrompts.copied`).

        Calls that begin meanwhile give them, too: so each is of the last event of its instance.
        """
        self.deaths.notice()
        self._copying = {i.number for i in self.instances if i.held}
        if self._copying:
            self._go_on(())
        while self._copying:
            touched = self._events()
            self._copying &= {i.number for i in self.instances if i.held}
            self._go_on(touched)

    def park(self, with_kv: bool) -> list[GenerationTask]:
        """Stop samples that are queued or decode; gives them as a later round continues them.

        When this returns nothing is in flight. Samples lost to a death meanwhile wait for `finish`.
        """
        assert not self.instances.in_flight, "parked in the middle of a round"
        self._parks_kv = with_kv
        self._queue.clear()
        for instance in self.instances.alive:
            for id in [*instance.held]:
                if self.ledger.status(id) not in ON_INSTANCE:  # it has not reached it
                    instance.lose(id)
            instance.inbox.clear()
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

    def put_down(self, with_kv: bool) -> None:
        """Park what instances have, once their calls have ended; it is queued."""
        self.end_calls()
        begun = {*self._queue, *self.held}  # others of prompts that have begun come later
        stopped = [task.sample.id for task in self.park(with_kv)]
        self._queue += filter(begun.__contains__, stopped)

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
        if self.guest is None:
            for instance in self.instances:
                self._go(instance)

    def _start(self, touched: Sequence[int]) -> None:
        """Stages may start on these prompts."""
        self.stages.start(touched)
        self.tail.touched(touched)

    def _events(self) -> Sequence[int]:
        """Wait for events and record them; gives the prompts on which stages may start."""
        touched, others = self._handle(self.next_events())
        assert not others, others
        return touched

    def next_events(self) -> list[Event]:
        """Wait for events, without those of a guest, which goes on with them. May give none."""
        events, guest = next_events(self.executor), self.guest
        if guest is None:
            return events
        try:
            return guest.take(events)
        finally:
            if guest.is_over:
                self.guest, self.returned_at = None, self.executor.clock.now()

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
                    self.deaths.settle()
                    if event.instance != TRAINING_POOL:
                        self._returned(event.instance)
                case WorkerDied():
                    self.deaths.died(event.instance)
                case WeightsPushed():
                    self.newest = event.version
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
        work_s = event.work.seconds + event.work.load_seconds
        self.meter.saw_round_trip(max(0.0, passed - work_s))
        learn(self.meter, event, width=instance.width)
        instance.progress += event.work.tokens_of_row
        self.num_tokens += event.work.rows - event.work.drafted + event.work.accepted
        self.kv_bytes += event.work.kv_bytes
        for finished in event.finished:
            instance.lose(finished.id)
        for parked in event.parked:
            self._parked(instance, parked)
        for id in event.lost:
            instance.lose(id)
            self.deaths.restart(id)
        self.turns.ended(event.turns, self.executor.clock.now())
        for turn in event.turns:
            if self.ledger.status(turn.id) is SampleStatus.DECODING:  # else it was parked, too
                self.ledger.move(turn.id, SampleStatus.WAITING)
        for copies in event.copies:
            self.groups.copied(copies)
            self._copying.discard(event.instance)
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
        idle = not instance.inbox and not self.turns.can_go(held)
        if idle and not stops and instance.number not in self._copying:
            return
        if self.in_flight and self.newest is not None:
            instance.load_in_flight(self.newest, self.limits.stale_kv)
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
        if self._copying:
            commands.append(CopyTokens())
        instance.send(self.executor.clock.now())
        # Under pipeline parallelism a sample with its last token is handed out by one more step;
        # else nothing is left to decode.
        steps = 1 if stops else self._steps(instance)
        turns = self.calls.enough_turns(instance)
        self.executor.advance(instance.number, commands, steps, turns)

    def _steps(self, instance: Instance) -> int:
        if self._equal_calls:
            return self.decode_steps
        awaited = bool(self._copying) or self._end_is_awaited(instance)
        return self.calls.steps(instance, awaited, bool(self._queue))

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
        if self.lasts:  # they rest
            self._queue += parked.ids
            return
        left = self.tail.arrive(source, parked)
        if parked.width == 1:  # any instance with room
            self._queue += left
        else:  # their state is that of a wide instance, which has died
            for id in left:
                self.deaths.restart(id)

    def _with_kv(self) -> bool:
        if self._parks_kv is not None:
            return self._parks_kv
        if self.limits.migration is not Migration.auto:
            return self.limits.migration is Migration.kv
        costs = self.meter.costs()
        return costs is not None and costs.cheaper_by_kv(self._longest)
