"""One round: samples are generated while early stages run on finished ones; migration; deaths."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from hybridrl.config import Migration
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Advanced,
    Computed,
    EarlyTrained,
    Finished,
    Park,
    Parked,
    Replied,
    Resume,
    SamplesRead,
    Submit,
    TargetsLoaded,
    WorkerDied,
)
from hybridrl.flow.graph import AnswersStage
from hybridrl.flow.ledger import SampleStatus
from hybridrl.flow.lengths import dispatch_groups
from hybridrl.flow.migration import MigrationPlan, gather
from hybridrl.flow.sample import SampleId
from hybridrl.flow.turns import OpenTurns, enough_turns
from hybridrl.flow.waits import worth_parking
from hybridrl.schedule.base import learn, next_events
from hybridrl.schedule.generation_task import GenerationTask, RoundLimits
from hybridrl.schedule.instances import Instance, InstanceStatus, choose_wide
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.streamed_update import StillDecoding, StreamedUpdate

logger = logging.getLogger(__name__)

_LEAVING, _JOINED = InstanceStatus.LEAVING, InstanceStatus.JOINED
_SCORING, _TRAINING = InstanceStatus.SCORING, InstanceStatus.TRAINING
_DEAD = InstanceStatus.DEAD
_NONE_DECODES = "every generation instance that still decodes has died; the others train"


class GenerationRound:
    """One round of making samples, event by event.

    A generated sample waits in the driver, or is held by one instance from its submission or its
    arrival until it is finished or parked. Then it passes through the streamed stages
    (`StreamedStages`), for which an instance that holds no sample has time.

    Migration: when at most `migration_plan.threshold` samples are left, `gather` names the
    instances that keep theirs. The others are LEAVING: the next call parks their samples, and
    each parked sample resumes on the keeper with the most room. This happens once in a round, as
    the threshold's model assumes. A denser tail would be slower, and the instances that it frees
    would have nothing left to do.

    With a plan of a `width` above 1 the samples go to wide instances (`Instance`), from their
    members too. An instance that trains, or has died, cannot join; one that runs a pass joins after
    it.

    Conversations: a sample whose turn has ended stays with its instance and costs it no row, so
    that a queued one may come. It goes on in the first call after its environment's reply
    (`OpenTurns`), and moves like others. An instance whose samples all wait gets no call. If passes
    wait, and it is likely to have the time, it parks them and runs a pass. They resume where there
    is room once they are answered.

    Death: samples that an instance held, and finished ones on its ranks, are made again on the
    others. Their tokens are the same, since they follow from the sample's identity.

    `may_start` says whether stages may start on the finished samples of a prompt yet. With `early`
    an instance without samples, and without passes to run, trains on groups that are whole
    (`StreamedUpdate`). Then it is given no sample any more.

    Invariants: a queued or parked sample waits in the driver's queue, or in the inbox of the
    instance that holds it. A sample that decodes is held by one instance (`Ledger` has the statuses
    of samples, `Instance` those of instances).

    Example, threshold 4, instances A to D with 2, 1, 1, 0 samples left and room for 3: A and B
    keep. When C's call returns it parks c, whose tokens go to B. C and D run the forward passes of
    finished samples, their own first, then those of A and B.
    """

    def __init__(
        self,
        stages: StreamedStages,
        limits: RoundLimits,
        decode_steps: int,
        migration_plan: MigrationPlan,
        turns: OpenTurns,
        may_start: Callable[[int], bool] = lambda prompt: True,
        early: StreamedUpdate | None = None,
    ) -> None:
        self.early = early
        self.stages, self.executor, self.meter = stages, stages.executor, stages.meter
        self.ledger = stages.tracker.ledger
        self.limits, self.decode_steps, self.migration_plan = limits, decode_steps, migration_plan
        self.turns, self.may_start = turns, may_start
        self.num_migrated = self.num_widened = self.num_restarted = 0
        self.num_overlapped = 0  # calls of forward passes that began while samples were made
        self._lost_tensors: dict[SampleId, frozenset[str]] = {}  # of samples that began anew
        self._instances = {number: Instance(number) for number in self.executor.instances}
        self._tasks: dict[SampleId, GenerationTask] = {}
        self._num_stopped = 0  # left for a later round
        self._queue: list[SampleId] = []
        self._gathered = False  # the migration has begun
        self.kv_bytes = 0  # that came from other ranks
        self._longest = 0
        self._equal_rounds = False
        self._parks_kv: bool | None = None  # while the round stops: whether with keys and values

    # -- what is to be made --------------------------------------------------------------------

    def make(self, tasks: Sequence[GenerationTask]) -> None:
        """Deal tasks to the instances: longest first, balanced by predicted tokens."""
        for task in tasks:
            self._expect(task)
        self._queue += [task.sample.id for task in tasks]
        self._deal()
        logger.debug(
            "%d samples to generate on %d instances; %d wait for room",
            len(tasks),
            len(self._alive),
            len(self._queue),
        )

    def submit_targets(self, tasks: Sequence[GenerationTask]) -> None:
        """Load the dataset's answers as samples; the tasks are all of one stage."""
        for task in tasks:
            self._expect(task)
        ids, prompts = [task.sample.id for task in tasks], [task.prompt for task in tasks]
        stage = tasks[0].stage
        assert isinstance(stage, AnswersStage), stage
        self.executor.load_targets(stage, ids, prompts)

    def adopt(self, tasks: Sequence[GenerationTask]) -> None:
        """Add samples of an earlier round, on which stages may still run."""
        self._tasks |= {task.sample.id: task for task in tasks}

    def _expect(self, task: GenerationTask) -> None:
        assert self.ledger.status(task.sample.id) in (SampleStatus.QUEUED, SampleStatus.PARKED)
        self.adopt([task])
        self.stages.stamp(task.stage)

    def _deal(self) -> None:
        """Give the queued samples to instances that have room.

        Groups stay together where they can. Their samples share a prompt and are about as long:
        spread out, they would keep every instance decoding as long as the longest.
        """
        able = [i for i in self._alive if i.joins is None and i.status is not _LEAVING]
        busy = len(able) < len(self._alive)
        # One that runs a pass is no place for what can go on now.
        able = [i for i in able if i.held or i.sent is None] or able
        if self.early is not None:
            able = [i for i in able if i.status is not _TRAINING]
            if self._queue and not able and not busy:
                raise RuntimeError(_NONE_DECODES)
        if not self._queue or not any(map(self._room, able)):
            return
        groups: dict[tuple[str, int], list[tuple[SampleId, float]]] = {}
        for id in self._queue:
            task = self._tasks[id]
            groups.setdefault((task.stage.name, id.prompt), []).append((id, task.tokens))
        loads = [sum(self._tasks[id].tokens for id in i.held) for i in able]
        room = [self._room(i) for i in able]
        dealt, self._queue = dispatch_groups([*groups.values()], room, loads)
        for instance, ids in zip(able, dealt, strict=True):
            self._give(instance, ids)

    def _room(self, instance: Instance) -> int:
        """Samples that an instance may be given: those that wait leave their rows to others.

        It holds at most twice as many as have rows, since those that wait keep their blocks. Those
        that rest until the round ends do not count, or others might never come.
        """
        held = [id for id in instance.held if not self.turns.rests(id)]
        going, most = sum(not self.turns.waits(id) for id in held), self.limits.max_held
        return max(0, min(most - going, 2 * most - len(held)))

    def _give(self, instance: Instance, ids: Sequence[SampleId]) -> None:
        """Samples of one prompt that come together share its cached keys and values."""
        fresh: dict[tuple[str, int], list[SampleId]] = defaultdict(list)
        parked: dict[int, list[SampleId]] = defaultdict(list)
        for number in ids:
            instance.hold(number)
            task = self._tasks[number]
            if self.ledger.status(number) is SampleStatus.QUEUED:
                fresh[task.stage.name, number.prompt].append(number)
            else:
                parked[id(task.parked)].append(number)
        for group in fresh.values():
            task = self._tasks[group[0]]
            assert task.sampling is not None
            instance.inbox.append(Submit(tuple(group), task.prompt, task.sampling))
        for group in parked.values():
            state = self._tasks[group[0]].parked
            assert state is not None
            instance.inbox.append(Resume(tuple(group), state, self.limits.stale_kv))

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Return when all samples are made and every early stage has run on its own."""
        self._gather()
        self._decode()
        self._use_spare()
        while self._num_to_make or self._in_flight or self.stages.running:
            touched = self._events()
            # Decoding goes first: the step waits for it.
            self._gather()
            self._decode()
            self.stages.start(touched)
            if self.early is not None:
                self.early.add(touched)
            self._use_spare()
        if self.stages.waiting and any(i.status is _TRAINING for i in self._alive):
            raise RuntimeError(_NONE_DECODES)  # for its generation weights
        assert not self.stages.waiting, "forward passes still wait"
        numbers = self.num_migrated, self.num_restarted
        logger.debug("the round ended: %d samples migrated, %d restarted", *numbers)

    @property
    def _num_to_make(self) -> int:
        """Samples that this round has still to make."""
        return self.ledger.num_unfinished - self._num_stopped

    @property
    def _alive(self) -> list[Instance]:
        """The instances that live, without wide ones."""
        return [i for i in self._instances.values() if not i.members and i.status is not _DEAD]

    @property
    def _wide(self) -> list[Instance]:
        return [i for i in self._instances.values() if i.members]

    @property
    def _in_flight(self) -> bool:
        """Whether some instance has a call in flight."""
        return any(i.sent is not None for i in self._instances.values())

    @property
    def _migrating(self) -> bool:
        """Whether samples are to leave, or on their way to, other instances."""
        return any(i.status is _LEAVING and not i.puts_by for i in self._instances.values())

    def _decode(self) -> None:
        """Keep every instance decoding that holds samples."""
        wide = self._wide
        if wide and not self._migrating:  # else samples may be on their way
            for instance in wide:
                if not instance.held:
                    self._dissolve(instance)
        if self._parks_kv is None:
            self._deal()
        self._start_calls()

    def _start_calls(self) -> None:
        for instance in (*self._alive, *self._wide):
            self._go(instance)

    def _events(self) -> Iterable[int]:
        """Wait for events and record them; gives the prompts on which stages may start."""
        touched: dict[int, None] = {}
        for event in next_events(self.executor):
            match event:
                case Advanced():
                    touched |= self._advanced(event)
                case Replied():
                    self.turns.replied(event)
                    self._queue += self.turns.take_back()
                case TargetsLoaded():
                    touched |= self._finish(event.finished)
                case Computed():
                    touched |= self.stages.computed(event)
                    if event.instance is not None:
                        self._returned(event.instance)
                case SamplesRead():
                    touched |= self.stages.read(event)
                case EarlyTrained():
                    assert self.early is not None
                    touched |= self.early.trained(event)
                    self._returned(event.instance)
                case WorkerDied():
                    self._died(self._instances[event.instance])
        return [prompt for prompt in touched if self.may_start(prompt)]

    def _returned(self, number: int) -> float:
        """The call of an instance has ended; gives the seconds that it was in flight."""
        instance = self._instances[number]
        assert instance.sent is not None, f"instance {number} has no call in flight"
        seconds = self.executor.clock.now() - instance.sent
        instance.sent = None
        instance.settle()
        return seconds

    def _use_spare(self) -> None:
        """Let every instance that holds no sample run forward passes that wait, or train."""
        nothing = set[bool]()  # where one that trains finds no groups, or one that does not yet
        alive = self._alive
        for instance in alive:
            if instance.joins is not None or instance.sent is not None:
                continue
            if instance.held:
                self._put_by(instance)
                continue
            trains, decoding = instance.status is _TRAINING, self._num_to_make > 0
            if self.stages.start_waiting(instance.number, len(alive), decoding, trains):
                self.num_overlapped += decoding
                if not trains:
                    instance.become(_SCORING)
            elif trains not in nothing and self._train_early(instance):
                instance.become(_TRAINING)
            else:
                nothing.add(trains)
                continue
            instance.sent = self.executor.clock.now()

    def _put_by(self, instance: Instance) -> None:
        """Park the samples of an instance, which all wait, if it has passes to run meanwhile."""
        held, costs = instance.held, self.meter.costs()
        busy = self._queue or self._migrating or instance.inbox
        if busy or costs is None or not self.stages.could_start(instance.number):
            return
        seconds = self.turns.first_reply_s(held, self.executor.clock.now())
        if worth_parking(costs, seconds, len(held), self._longest):
            instance.become(_LEAVING)
            instance.puts_by = True
            self._go(instance)

    def _train_early(self, instance: Instance) -> bool:
        """Let an instance that is not needed for decoding train, while others decode.

        It is needed while samples wait for room, or are on their way to the instances that keep
        theirs. Once all are made the update trains the rest, on all ranks.
        """
        if self.early is None or self._queue or self._migrating or self.turns.put_by:
            return False
        if self.migration_plan.width > 1 and not self._gathered:  # it could not join any more
            return False
        decoding = [i for i in (*self._alive, *self._wide) if i.held]
        if not decoding:
            return False
        rows = max(len(i.held) for i in decoding)
        width = min(i.width for i in decoding)
        left_s = None
        progress = max(i.progress for i in decoding)
        ids = [id for i in decoding for id in i.held]
        if self._tasks[ids[0]].converses:
            left_s = partial(self._conversations_left_s, ids, rows, width)
        return self.early.start(instance, StillDecoding(rows, progress, width, left_s))

    def _conversations_left_s(self, ids: Sequence[SampleId], rows: int, width: int) -> float:
        """Seconds until these have ended, which decode in batches of so many rows."""
        costs = self.meter.costs()
        assert costs is not None, "seconds without costs"
        turn_s = self.turns.turn_tokens * float(costs.at_width(width).pace(rows))
        return self.turns.seconds_left(ids, turn_s, self.executor.clock.now())

    # -- events --------------------------------------------------------------------------------

    def _advanced(self, event: Advanced) -> dict[int, None]:
        passed = self._returned(event.instance)
        instance = self._instances[event.instance]
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
            maker = self._tasks[event.id].stage
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
        if any(self._instances[member].status is not _JOINED for member in instance.members):
            return
        if not stops and not instance.inbox and not self.turns.can_go(held):
            return
        commands, instance.inbox = instance.inbox, []
        for id in chain.from_iterable(command.ids for command in commands):
            waits = self.turns.is_open(id)
            self.ledger.move(id, SampleStatus.WAITING if waits else SampleStatus.DECODING)
        if stops:
            width = 1 if instance.puts_by else self.migration_plan.width
            commands.append(Park(tuple(held), self._with_kv(), width))
        else:
            answers = self.turns.answer(held)
            for id in chain.from_iterable(answer.ids for answer in answers):
                self.ledger.move(id, SampleStatus.DECODING)
            commands += answers
        instance.sent = self.executor.clock.now()
        # Under pipeline parallelism a sample with its last token is handed out by one more step;
        # else nothing is left to decode.
        steps = 1 if stops else self._steps(instance)
        self.executor.advance(instance.number, commands, steps, self._enough_turns(instance))

    def _steps(self, instance: Instance) -> int:
        """Decode steps of the next call: as many as allowed where nothing waits for its end."""
        costs = self.meter.costs()
        if self._equal_rounds or costs is None or not self._end_is_awaited(instance):
            return self.decode_steps
        costs = costs.at_width(instance.width)
        return self.limits.steps(costs, len(instance.held), self.decode_steps)

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
        migrates = self.migration_plan.moves and not self._gathered
        held = instance.held
        waits = self.stages.wait_for_samples or self.early is not None
        # A turn's end: its environment has to know of it. The others' replies come meanwhile.
        converses = any(self._tasks[id].converses for id in held)
        return migrates or converses or bool(self._queue) or (len(held) > 1 and waits)

    # -- migration -----------------------------------------------------------------------------

    def _gather(self) -> None:
        """Begin the migration when there are few samples left and some instance can be freed."""
        held = {i.number: len(i.held) for i in self._instances.values() if i.held}
        inboxes = (i.inbox for i in self._instances.values())
        if self._gathered or self._queue or self.turns.put_by or any(inboxes):
            return
        if sum(held.values()) <= self.migration_plan.threshold:
            most = min(self.limits.max_held, self.migration_plan.cap)
            if self.migration_plan.width > 1:
                self._widen(held, most)
                return
            keepers = gather(held, most)
            if len(keepers) < len(held):
                self._gathered = True
                for number in held:
                    self._instances[number].keeps = number in keepers
                leaving = held.keys() - keepers
                for number in leaving:
                    self._instances[number].become(_LEAVING)
                logger.debug(
                    "migration of %d samples from instances %s to %s",
                    sum(held[number] for number in leaving),
                    sorted(leaving),
                    sorted(keepers),
                )

    def _widen(self, held: Mapping[int, int], most: int) -> None:
        """Have wide instances take all samples, if there are any to be formed."""
        able = [i.number for i in self._alive if i.status is not _TRAINING]
        width, table = self.migration_plan.width, self.executor.wide
        if not held or not (chosen := choose_wide(table, width, held, able, most)):
            return
        self._gathered = True
        progress = max(self._instances[number].progress for number in held)
        for number in held:
            self._instances[number].become(_LEAVING)
        for wide in chosen:
            wide.keeps, wide.progress = True, progress
            self._instances[wide.number] = wide
            for member in wide.members:
                self._instances[member].join(wide.number)
        members = {wide.number: wide.members for wide in chosen}
        logger.debug("%d samples go to wide instances %s", sum(held.values()), members)

    def _dissolve(self, wide: Instance) -> None:
        """Its members are instances of their own again."""
        del self._instances[wide.number]
        for member in wide.members:
            self._instances[member].join(None)

    def _parked(self, source: Instance, parked: Parked) -> None:
        """Resume samples of `parked` on the instances that keep theirs, or put them by."""
        puts_by = source.puts_by
        for id in parked.ids:
            source.lose(id)
            self.ledger.move(id, SampleStatus.PARKED)
            self._tasks[id] = replace(self._tasks[id], parked=parked)
        if self._parks_kv is not None:
            return
        if puts_by:
            self._queue += self.turns.put_away(parked.ids)
            return
        keepers = [i for i in (*self._alive, *self._wide) if i.keeps]
        arriving: dict[int, list[SampleId]] = defaultdict(list)
        for id in parked.ids:
            room = [i for i in keepers if len(i.held) < self.limits.max_held]
            if room:
                keeper = min(room, key=lambda i: (len(i.held), i.number))
                keeper.hold(id)
                arriving[keeper.number].append(id)
                self.num_migrated += source.joins != keeper.number
                self.num_widened += keeper.width > 1
            elif parked.width > 1:  # its state is that of a wide instance, which has died
                self._restart(id)
            else:  # a keeper has died: any instance with room
                self.num_migrated += 1
                self._queue.append(id)
        for number, ids in arriving.items():
            self._instances[number].inbox.append(Resume(tuple(ids), parked))

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
        if not self._alive:
            raise RuntimeError("every generation instance has died")
        if instance.joins is not None:  # a wide instance dies with any of its members
            wide = self._instances[instance.joins]
            lost += wide.die()
            self._dissolve(wide)
        finished = [task.sample for id, task in self._tasks.items() if self.ledger.is_finished(id)]
        for sample in finished:
            if self.stages.is_on(sample, instance.number):
                self.stages.forget(sample)
                if self.early is not None:
                    self.early.forget(sample)
                lost.append(sample.id)
        logger.debug("instance %d died; %d samples begin anew", instance.number, len(lost))
        for id in lost:
            self._restart(id)
        if self.early is not None:
            self.early.died(instance.number)

    def check_restored(self) -> None:
        """After `run`: samples that began anew have the tensors again that they had.

        Raises RuntimeError where one came from a stage of an earlier round that waits for the whole
        batch: it does not run again.
        """
        for id, lost in self._lost_tensors.items():
            if missing := lost - self._tasks[id].sample.tensors:
                raise RuntimeError(
                    f"a generation instance died with {', '.join(sorted(missing))} of sample {id},"
                    " which an earlier round has computed"
                )

    def _restart(self, id: SampleId) -> None:
        """Begin a sample anew."""
        task = self._tasks[id]
        lost = self._lost_tensors.get(id, frozenset())
        self._lost_tensors[id] = lost | task.sample.tensors
        self.ledger.restart(id)
        self.turns.forget([id])
        task = self._tasks[id] = replace(task, parked=None, tokens=task.total)
        self.num_restarted += 1
        if isinstance(task.stage, AnswersStage):
            self.executor.load_targets(task.stage, [id], [task.prompt])
        else:
            self._queue.append(id)
