"""The executor of real runs: worker groups and wall time behind the schedules' seam."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from hybridrl.config import Config, RewardCall
from hybridrl.costs.instance import Costs
from hybridrl.data import Item
from hybridrl.data.prompts import with_next_targets
from hybridrl.driver.async_calls import (
    Calling,
    EventCalls,
    Rounds,
    Then,
    answers_of,
    as_one,
    single,
    with_ids,
)
from hybridrl.driver.counted_costs import counted_costs, counted_device
from hybridrl.driver.episodes import Episodes
from hybridrl.driver.judges import DriverJudges, JudgeFailures, read_together
from hybridrl.driver.load_balance import UNKNOWN_WORK, RankWork, deal
from hybridrl.driver.pushes import Pushes
from hybridrl.driver.rank_failures import InstanceEnded
from hybridrl.driver.rank_pool import Pool
from hybridrl.driver.recorded_samples import RecordedSamples, load_recorded
from hybridrl.driver.sample_moves import Homes, SampleMoves, by_rank, once
from hybridrl.driver.saved_samples import SavedSteps
from hybridrl.driver.training_calls import TrainingCalls
from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.flow.clock import Clock, WallClock
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Command,
    Computed,
    Event,
    Phase,
    Prepared,
    Replied,
    SamplesRead,
    Scope,
    Submit,
    WeightsReady,
    generated_tensors,
)
from hybridrl.flow.graph import (
    AnswersStage,
    ComputeStage,
    Graph,
    Stage,
    StageMethod,
    UpdateStage,
)
from hybridrl.flow.lengths import PromptKey
from hybridrl.flow.sample import NO_VERSION, Sample, SampleId
from hybridrl.layout.weight_switch import SwitchStats
from hybridrl.preflight.placement import pool_of, scope_of
from hybridrl.preflight.roles_together import fuses
from hybridrl.rewards import RewardInput, RewardResult
from hybridrl.rewards.results import scalars_of
from hybridrl.schedule.base import PendingSample
from hybridrl.system import signals
from hybridrl.system.node_info import NodeInfo
from hybridrl.workers.rank_calls import Reference
from hybridrl.workers.sample_writer import SampleFacts
from hybridrl.workers.turns import SampleTexts

logger = logging.getLogger(__name__)


OnSwitch = Callable[[list[SwitchStats]], None]
"""Called at every weight switch with its cost on each rank."""


class Abandoned(Exception):
    """A step was given up before it has changed anything, since the run was asked to end."""


class RayExecutor:
    """`hybridrl.flow.executor.Executor` over a `WorkerGroup`.

    `works` says by role what training on samples costs, so how they are spread. `episodes` answer
    conversations. Roles that are `together` train in one plan, and score in one. An instance of
    several ranks gets every call on all of them; their answers become one event. A rank that dies
    ends the run (`WorkerError`); where instances have ranks of their own, one of these ends its
    instance (`WorkerDied`). While `may_abandon`, which an update ends, a signal that asks the run
    to end raises `Abandoned`.

    Samples live in the pool that generates. The fields that another pool reads are copied there
    for the length of the call. Its results are copied home before its event: so `map`, forward
    passes and the actor's update find them on the sample's rank.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: Config,
        on_switch: OnSwitch,
        works: Mapping[str, RankWork] = MappingProxyType({}),
        episodes: Episodes | None = None,
        together: Sequence[Sequence[str]] = (),
    ) -> None:
        self.judges = DriverJudges(config, group.launcher)
        self.group, self.config, self.on_switch = group, config, on_switch
        self._works, self.episodes = works, episodes
        self._together = together
        self.failures: JudgeFailures | None = None  # of the run so far, or of one that is replayed
        self.clock: Clock = WallClock()
        self.version = NO_VERSION
        self.may_abandon = False
        self.before_update: Callable[[], None] = lambda: None
        self.recorded: RecordedSamples | None = None  # of a replay: fields that are not computed
        self.saved: SavedSteps | None = None  # of the step in progress
        self._instance_of = {
            rank: number for number, ranks in enumerate(group.instances) for rank in ranks
        }
        self._rounds = Rounds(group)
        self.separate = group.home is not group.actor_pool
        self.pushes = Pushes(group)
        self.keep_versions = self.pushes.keep
        self._moves = SampleMoves(group)
        self._training = TrainingCalls(group, self._moves, config, self._pool, self._work)

    def counted_costs(
        self, graph: Graph, model_path: str, nodes: Sequence[NodeInfo]
    ) -> Costs | None:
        """Seconds of work on an instance by its operations; None where they are not counted."""
        return counted_costs(self.config, graph, model_path, nodes)

    def device_name(self, nodes: Sequence[NodeInfo]) -> str:
        """The datasheet by which `counted_costs` counts."""
        return counted_device(self.config, nodes)

    def key_of(self, item: Item) -> PromptKey:
        """The prompt as a length ranker may know it."""
        return PromptKey((item.source, item.asked), item.source, item.prompt_ids)

    @property
    def instances(self) -> Sequence[int]:
        """All generation instances that live."""
        dead = self.group.failures.dead
        return [n for n, ranks in enumerate(self.group.instances) if dead.isdisjoint(ranks)]

    @property
    def wide(self) -> Mapping[int, tuple[int, ...]]:
        """The members of every wide instance, by its number."""
        return {
            number: tuple(sorted({self._instance_of[rank] for rank in ranks}))
            for number, ranks in self.group.wide.items()
        }

    def instance_of(self, rank: int) -> int:
        """The instance that a rank belongs to."""
        return self._instance_of[rank]

    def scope(self, stage: Stage) -> Scope:
        """The ranks that take part in a per-sample stage; see `scope_of`."""
        return scope_of(stage, self.config)

    def pool(self, stage: Stage) -> str:
        """The pool of ranks that a stage's role is on."""
        return pool_of(stage, self.config)

    def _pool(self, stage: Stage) -> Pool:
        return self.group.pools[pool_of(stage, self.config)]

    def _work(self, stage: Stage) -> RankWork:
        """What samples cost a stage's ranks; by tokens for a role that is not trained."""
        return self._works.get(stage.role or "", UNKNOWN_WORK)

    def has_passes(self, graph: Graph) -> bool:
        """Whether samples of `graph` may move, since spare instances run forward passes."""
        stages = [stage for stage in graph.stages.values() if isinstance(stage, ComputeStage)]
        passes = any(self.scope(stage) is Scope.INSTANCE for stage in stages)
        return passes and len(self.instances) > 1

    def copies_to_other_pool(self, graph: Graph) -> bool:
        """Whether a stage of `graph` reads copies of samples, in another pool than theirs."""
        stages = [stage for stage in graph.stages.values() if isinstance(stage, ComputeStage)]
        return any(self.scope(stage) is Scope.POOL for stage in stages)

    def sync_weights(self) -> None:
        """Begin the weight switch of all ranks that generate, or a push and loads of it."""
        logger.debug("the weight switch begins")
        self._rounds.begin(self._push_and_load() if self.separate else self._sync_weights())

    def _sync_weights(self) -> EventCalls:
        """One event for all ranks; what the switch cost is reported."""
        instances = self.instances
        if self._training.early:  # a step has failed before its update
            yield from answers_of(self.group.call_enter(instances, Phase.TRAIN))  # so all switch
            self._training.early.clear()
        answers = yield from answers_of(self.group.call_enter(instances, Phase.GENERATE))
        self.version = answers[0].version
        if switches := [answer.switch for answer in answers if answer.switch is not None]:
            self.on_switch(switches)
        return [WeightsReady(self.version)]

    def push_weights(self) -> None:
        """Begin to push the newest weights."""
        self._training.early.clear()  # of a step that has failed before its update
        self._rounds.begin(self.pushes.push())

    def _push_and_load(self) -> EventCalls:
        """One event, when every instance has the newest weights."""
        self.version = yield from self.pushes.push_and_load(self.instances)
        return [WeightsReady(self.version)]

    def prepare(self, places: Sequence[int], phase: Phase) -> None:
        """Begin to bring the ranks of these instances into `phase`."""
        assert phase is Phase.TRAIN, "instances generate after `sync_weights` alone"
        if self.separate:  # those that train do nothing else
            self._rounds.ready(Prepared(tuple(places), phase))
            return
        logger.debug("%d instances change to %s", len(places), phase.value)
        self._rounds.begin(self._prepare(tuple(places), phase))

    def _prepare(self, places: tuple[int, ...], phase: Phase) -> EventCalls:
        """One event for all ranks of the instances."""
        answers = yield from answers_of(self.group.call_enter(places, phase))
        self.version = answers[0].version
        return [Prepared(places, phase)]

    def advance(
        self,
        instance: int,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> None:
        """Start a bounded generation call on an instance."""
        logger.debug("%d commands for instance %d", len(commands), instance)
        if self.recorded is not None and self.recorded.folder is not None:
            self._rounds.begin(load_recorded(self.recorded, self.group, instance, commands))
            return
        for command in commands:
            if isinstance(command, Submit) and command.sampling.max_turn_tokens:
                assert self.episodes is not None, "a conversation without an environment"
                longest = command.sampling.max_new_tokens
                self.episodes.start(command.ids, command.prompt, longest)
        if self.saved is not None:
            commands = self.saved.commands(commands, self.version)
        self._rounds.begin(self._advance(instance, commands, num_decode_steps, enough_turns))

    def _take_recorded(
        self, stage: Stage, samples: Sequence[Sample], instance: int | None = None
    ) -> bool:
        """Whether the results of a stage are recorded; then their event is ready."""
        if self.recorded is None or not self.recorded.has(stage, samples):
            return False
        logger.debug("stage %s on %d samples is recorded", stage.name, len(samples))
        scalars, tensors = self.recorded.outputs(stage, samples)
        ids = tuple(sample.id for sample in samples)
        self._rounds.ready(Computed(stage.name, ids, scalars, tensors, instance))
        return True

    def _advance(self, instance: int, commands: Sequence[Command], *limits: int) -> EventCalls:
        """One event for an instance: the finished samples and parked state of all its ranks."""
        calls = self.pushes.call_advance(instance, commands, *limits)
        published = yield from answers_of(calls)
        answers = [answer.event for answer in published]
        for answer in published:
            finished = answer.event.finished
            ids = [f.id for f in finished]
            self._moves.forget(ids)  # what those were before they began anew
            self._moves.publish(answer, ids, generated_tensors(finished))
        in_order = sorted((f for a in answers for f in a.finished), key=lambda f: f.id)
        parked, copies = (
            tuple(
                replace(same[0], state={rank: s for p in same for rank, s in p.state.items()})
                for same in zip(*of_ranks, strict=True)
            )
            for of_ranks in ([a.parked for a in answers], [a.copies for a in answers])
        )
        self.pushes.loaded(answers)
        slowest = max((a.work for a in answers), key=lambda work: work.seconds)
        slowest = replace(slowest, kv_bytes=sum(a.work.kv_bytes for a in answers))
        if self.episodes is not None:
            self.episodes.worked(slowest)
        turns = tuple(sorted((turn for a in answers for turn in a.turns), key=lambda t: t.id))
        for turn in turns:
            assert self.episodes is not None, "a turn without an environment"
            self._rounds.begin(self.episodes.answer(turn))
        one = replace(answers[0], finished=tuple(in_order), parked=parked, copies=copies)
        return [replace(one, work=slowest, turns=turns)]

    def take_up(
        self, pending: Sequence[PendingSample], conversations: Sequence[Mapping[str, Any]]
    ) -> None:
        """Replay the conversations of a checkpoint, and answer those of its samples that wait."""
        assert self.episodes is not None, "a conversation without an environment"
        for turn in self.episodes.take_up(pending, conversations):
            self._rounds.begin(self.episodes.answer(turn))

    def apart(self) -> AbstractContextManager[None]:
        """For steps of another schedule: replies to samples that are here already come later."""
        here = self.episodes.ids if self.episodes is not None else frozenset()

        def is_later(event: Event) -> bool:
            return isinstance(event, Replied) and any(reply.id in here for reply in event.replies)

        return self._rounds.apart(is_later)

    def load_targets(
        self, stage: AnswersStage, ids: Sequence[SampleId], prompts: Sequence[Any]
    ) -> None:
        """Deal the dataset's targets to the ranks."""
        logger.debug("stage %s begins on %d samples", stage.name, len(ids))
        ranks = self.group.living(self.group.home.ranks)
        prompts = with_next_targets(prompts) if stage.of_next else prompts
        for first in range(len(ranks)):
            mine = slice(first, None, len(ranks))
            if ids[mine]:
                self._rounds.begin(self._load_targets(stage, first, ids[mine], prompts[mine]))

    def _load_targets(
        self, stage: AnswersStage, first: int, ids: Sequence[SampleId], prompts: Sequence[Any]
    ) -> EventCalls:
        """One event, of a rank that lives."""
        while True:
            ranks = self.group.living(self.group.home.ranks)
            rank = ranks[first % len(ranks)]
            call = self.group.call_load_targets(rank, stage, tuple(ids), tuple(prompts))
            with suppress(InstanceEnded):
                return (yield from single(call, rank))

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        """Start a stage on the samples' ranks; if it needs the world, on the other ranks too.

        In another pool, on copies.
        """
        if self._take_recorded(stage, samples):
            return
        scope = self.scope(stage)
        logger.debug("stage %s begins on %d samples", stage.name, len(samples))
        if scope is Scope.POOL:
            self._rounds.begin(self._compute_in_pool(stage, samples))
            return
        if scope is Scope.DRIVER:
            for together in read_together(stage, samples):
                self._rounds.begin(self._judge(stage, together))
            return
        of_rank = by_rank(samples)
        for rank in self.group.home.ranks if scope is Scope.WORLD else sorted(of_rank):
            mine = of_rank.get(rank, [])
            ids = tuple(sample.id for sample in mine)
            if scope is Scope.WORLD:
                call = self.group.call_compute(rank, stage, ids)
            else:
                fields = tuple(
                    {x: sample.scalars[x] for x in stage.inputs if x in sample.scalars}
                    for sample in mine
                )
                call = self.group.call_local_stage(rank, stage, ids, fields)
            self._rounds.begin(single(call, rank))

    def scores_together(self, stages: Sequence[Stage], stage: Stage) -> bool:
        """Whether the roles of `stages` and of `stage` train together, so that they fit."""
        roles = {str(one.role) for one in (*stages, stage)}
        return len(roles) == len(stages) + 1 and any(roles <= set(x) for x in self._together)

    def compute_together(self, stages: Sequence[Stage], samples: Sequence[Sample]) -> None:
        """Start stages of several roles as one on all ranks."""
        stages = [stage for stage in stages if not self._take_recorded(stage, samples)]
        if len(stages) == 1:
            self.compute(stages[0], samples)
        elif stages:
            logger.debug("%d stages begin on %d samples", len(stages), len(samples))
            self._rounds.begin(self._compute_together(stages, samples))

    def _compute_together(self, stages: Sequence[Stage], samples: Sequence[Sample]) -> EventCalls:
        """Events of each stage on each rank."""
        of_rank = by_rank(samples)
        calls = {}
        for rank in self.group.home.ranks:
            ids = [sample.id for sample in of_rank.get(rank, [])]
            calls[self.group.call_compute_together(rank, stages, ids)] = rank
        answers = yield from answers_of(calls)
        return [event for answer in answers for event in answer]

    def _judge(self, stage: Stage, samples: Sequence[Sample]) -> EventCalls:
        """Read samples for a judge that the driver calls, and begin to have them judged."""
        assert stage.role is not None
        homes = Homes(samples, self.group)
        whole = isinstance(stage, ComputeStage) and stage.whole_groups
        while True:
            samples = homes.living(samples, whole)
            ids_of = {rank: [s.id for s in mine] for rank, mine in by_rank(samples).items()}
            calls = {self.group.call_reward_inputs(rank, ids): rank for rank, ids in ids_of.items()}
            with homes.may_die():
                answers = yield from answers_of(calls)
                break
        if not samples:
            return []
        inputs: dict[SampleId, RewardInput] = {}
        for ids, answer in zip(ids_of.values(), answers, strict=True):
            inputs |= zip(ids, answer, strict=True)
        ids = [sample.id for sample in samples]
        call = self.config.judge_of(stage.role).call
        units = [[id] for id in ids] if call is RewardCall.sample else [ids]
        for unit in units:
            queued = self.judges.is_full(stage.role)
            judging = self.judges.judge(stage.role, [inputs[id] for id in unit])
            self._rounds.begin(self._results(stage, unit, judging, queued, homes))
        return [SamplesRead(stage.name, tuple(ids))]

    def _results(
        self,
        stage: Stage,
        ids: Sequence[SampleId],
        judging: Calling[list[RewardResult]],
        queued: bool,
        homes: "Homes",
    ) -> EventCalls:
        """One event for responses that are judged together, none where one of them has died.

        Only those that were not `queued` behind others say what judging takes.
        """
        start = self.clock.now()
        judged = yield from judging
        seconds = None if queued else self.clock.now() - start
        if not homes.live(ids):
            return []
        scalars = scalars_of(stage.scalars, judged)
        return [Computed(stage.name, tuple(ids), scalars, (), seconds=seconds)]

    def _compute_in_pool(self, stage: Stage, samples: Sequence[Sample]) -> EventCalls:
        """Bring copies to the stage's pool, compute there, and import the new tensors at home.

        The event is of the samples that live to its end.
        """
        ranks, homes = self._pool(stage).ranks, Homes(samples, self.group)
        fields = {name for name in stage.inputs if name in samples[0].tensors}
        whole = self._reads_items(stage)
        while samples := homes.living(samples):
            receivers = [ranks[i] for i in deal(samples, len(ranks), work=self._work(stage))]
            with homes.may_die():
                yield from self._moves.copy(samples, receivers, fields, whole)
                break
        else:
            return []
        ids: dict[int, list[SampleId]] = {rank: [] for rank in ranks}
        for sample, rank in zip(samples, receivers, strict=True):
            ids[rank].append(sample.id)
        published = yield from answers_of(
            {self.group.call_compute_copies(rank, stage, ids[rank]): rank for rank in ranks}
        )
        event = as_one([answer.event for answer in published])
        for answer in published:
            self._moves.publish(answer, homes.those_living(answer.event.ids), event.tensors)
        if event.tensors:
            assert stage.role is not None
            self._training.fields_of_role[stage.role].update(event.tensors)
            while samples := homes.living(samples):
                with homes.may_die():
                    yield from self._moves.import_at_home(samples, event.tensors[0])
                    break
        return [with_ids(event, homes.those_living(event.ids))]

    def _reads_items(self, stage: Stage) -> bool:
        """Whether a stage reads a sample's row: its text, its source or its privileged prompt."""
        if isinstance(stage, ComputeStage) and stage.privileged:
            return True
        by_source = stage.role == "teacher" and self.config.teacher.by_source
        return bool(by_source) or stage.method is StageMethod.SCORE

    def infer(self, stage: Stage, instance: int, samples: Sequence[Sample]) -> None:
        """Export samples from elsewhere, each to one rank of the instance; then start.

        Tensors that their ranks have published are fetched as they are. The ranks export only the
        rest, when their present call ends.
        """
        if self._take_recorded(stage, samples, instance):
            return
        logger.debug(
            "stage %s begins on instance %d, %d samples", stage.name, instance, len(samples)
        )
        self._rounds.begin(self._infer(stage, instance, samples))

    def _infer(self, stage: Stage, instance: int, samples: Sequence[Sample]) -> EventCalls:
        """One event for an instance: each rank has the results of its samples."""
        arriving, parcels = yield from self._moves.to_instance(instance, samples)
        calls = {}
        for rank in self.group.instances[instance]:
            mine = [sample.id for sample in samples if sample.rank == rank]
            parcel = once(parcels[rank])
            call = self.group.call_infer(rank, stage, instance, mine, arriving[rank], parcel)
            calls[call] = rank
        published = yield from answers_of(calls)
        for answer in published:
            self._moves.publish(answer, answer.event.ids, answer.event.tensors)
        return [as_one([answer.event for answer in published])]

    def train_early(self, stage: UpdateStage, instance: int, samples: Sequence[Sample]) -> None:
        """Export samples from elsewhere as for `infer`; then the instance trains on all of them."""
        logger.debug(
            "stage %s begins early on instance %d, %d samples", stage.name, instance, len(samples)
        )
        self._rounds.begin(self._training.train_early(stage, instance, samples))

    def compare(self, stage: UpdateStage, samples: Sequence[Sample]) -> None:
        """Copy samples to the ranks that train, which compare the two engines."""
        self._rounds.begin(self._training.compare(stage, samples))

    def wait(self) -> list[Event]:
        """Events of the calls that have ended, at least one; may raise `Abandoned`."""
        events = self._rounds.wait(self._check_stop_requested)
        for event in events if logger.isEnabledFor(logging.DEBUG) else ():
            logger.debug("ended: %s", _described(event))
        if (failures := self.failures) is not None:
            events = [failures.followed(event) for event in events]
        return events

    def _check_stop_requested(self) -> None:
        if self.may_abandon and signals.stop_requested():
            raise Abandoned

    def fuses(self, stages: Sequence[UpdateStage], stage: UpdateStage) -> bool:
        """Whether `stage` is trained in the pipeline plan of `stages`, other roles of its pool."""
        return fuses(self.config, stages, stage)

    def update(self, updates: Sequence[tuple[UpdateStage, Sequence[Sample]]]) -> None:
        """Spread the samples by their work, move or copy those of other ranks, and train.

        Those that an instance has trained early stay where they are and cost nothing: all ranks
        share the others evenly, since they begin together. Raises what `before_update` raises,
        which may end the step there.
        """
        self.before_update()
        self.may_abandon = False
        for stage, samples in updates:
            logger.debug("stage %s begins on %d samples", stage.name, len(samples))
        self._rounds.begin(self._training.update(updates))

    def release(self, ids: Sequence[SampleId]) -> None:
        """Let the ranks forget samples."""
        self._moves.forget(ids)
        if self.episodes is not None:
            self.episodes.end(ids)
        self._rounds.begin_unawaited(self.group.call_release(tuple(ids)))

    def record_samples(self, step: int, phase: str, facts: Mapping[int, list[SampleFacts]]) -> None:
        """Have the ranks that hold samples write them to files, which may leave at once.

        Raises OSError, here or in a later call, where a rank cannot.
        """
        self._rounds.begin_unawaited(self.group.call_record_samples(step, phase, facts))

    def read(self, calls: Mapping[Reference[Any], int], then: Then) -> None:
        """Have `then` called with the answers to calls that read what ranks hold at this point.

        Nobody waits for them: samples that are read may leave at once, and the next update may
        begin. Readings end in the order in which they began, by the next `drain`.
        """
        self._rounds.begin_unawaited(calls, then)

    def read_texts(
        self,
        ids_of_rank: Mapping[int, Sequence[SampleId]],
        then: Callable[[Mapping[SampleId, SampleTexts]], None],
    ) -> None:
        """Begin to read samples as text; see `read`."""

        def merged(answers: list[dict[SampleId, SampleTexts]]) -> None:
            then({id: texts for answer in answers for id, texts in answer.items()})

        self.read(self.group.call_texts(ids_of_rank), merged)

    def discard(self) -> None:
        """Wait for all calls that are in flight; nobody wants their events."""
        self._rounds.discard()

    def drain(self) -> None:
        """Wait for what ranks do without anyone waiting for it; raises the failure of one."""
        self._rounds.drain()

    def salvage(self) -> None:
        """Have the records written for which ranks have answered; the run has failed."""
        self._rounds.salvage()


def _described(event: Event) -> str:
    """An event in a line of the log: its names and numbers, and how many other things it has."""
    values = ((field.name, getattr(event, field.name)) for field in fields(event))
    shown = [
        f"{name}={len(value) if isinstance(value, tuple) else value}"
        for name, value in values
        if isinstance(value, int | float | str | Enum | tuple)
    ]
    return " ".join([type(event).__name__, *shown])
