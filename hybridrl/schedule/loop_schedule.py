"""The schedule of a loop: per-sample stages overlap generation, and a policy decides the rest."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hybridrl.flow.executor import Compared, Event, Executor, Phase, Sampling
from hybridrl.flow.graph import GenerateStage, Graph, SourceStage, Stage, UpdateStage
from hybridrl.flow.ledger import Drop, phase_of, sampling_of, sections, with_updates_together
from hybridrl.flow.lengths import LengthModel
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule.base import (
    Batch,
    PendingSample,
    Prompt,
    Schedule,
    StepSettings,
)
from hybridrl.schedule.dealing import Dealer, Dealt
from hybridrl.schedule.events import Guest
from hybridrl.schedule.groups import BegunPrompts, GenerationTask, tasks_of
from hybridrl.schedule.instances import Instance, RoundLimits
from hybridrl.schedule.loop import Loop
from hybridrl.schedule.lost_samples import InstanceDied, SamplesDied
from hybridrl.schedule.readiness import ReadyTracker, early_stages
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.tail import NoTail


class SchedulePolicy:
    """What a `LoopSchedule` asks; here: it makes a step's prompts, and trains on all of them.

    | question                                | method          | here                         |
    |-----------------------------------------|-----------------|------------------------------|
    | which prompts begin                     | `pull`, `begin` | the step's                   |
    | when instances take new weights         | `enter`         | at the round's start, all    |
    | until when samples are made             | `make`          | until all are there          |
    | what is left then                       | `make`          | nothing; `close` at the end  |
    | what a step trains on                   | `take`          | all that has begun           |
    | what instances do at the end of a round | `tail`          | nothing but forward passes   |

    A policy is of one schedule (`bind`), whose parts it uses.
    """

    schedule: "LoopSchedule"
    keeps = False
    """Whether prompts that a step has begun and does not train on go on in the next."""
    lasts = False
    """Whether instances go on while a step trains, on ranks of their own."""
    takes_guests = False
    """Whether steps may be trained while others use the instances."""
    in_flight = False
    """Whether instances take new weights under unfinished samples."""
    waits_for_push = False
    """Whether weights are on their way to where instances may load them."""

    @classmethod
    def check_graph(cls, graph: Graph) -> None:
        """Raise `ValueError`, with what is allowed, for a recipe that it cannot run."""
        graph.check()

    def bind(self, schedule: "LoopSchedule") -> None:
        """Belong to a schedule, whose graph is checked."""
        self.check_graph(schedule.graph)
        self.schedule = schedule

    def state_dict(self) -> dict[str, Any]:
        """The state that the next step continues with, in plain JSON types."""
        return {}

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue from a schedule's `state_dict`, which another policy may have written."""

    def begin_step(self) -> None:
        """A step begins."""

    def pull(self, num: int) -> list[Prompt]:
        """The prompts of a round in which `num` are wanted; none if they follow from lengths."""
        return self.schedule.next_prompts(num)

    def begin(self) -> list[GenerationTask]:
        """A round begins; gives the samples that are to be made first."""
        return self.schedule.begin(self.schedule.pulled)

    def enter(self, phases: set[Phase | None]) -> None:
        """Have the ranks ready for a round, whose stages run in these phases."""
        if Phase.GENERATE in phases:
            self.schedule.enter(Phase.GENERATE)

    def deal(
        self, dealer: Dealer, queue: Sequence[SampleId], able: Sequence[Instance]
    ) -> tuple[list[Dealt], list[SampleId]]:
        """What each instance gets of a queue, and what is left of it."""
        return dealer.deal(queue, able)

    def rests_at(self, id: SampleId) -> int:
        """The tokens with which a sample stops for other weights; 0 where it does not."""
        return 0

    def recomputes(self, id: SampleId) -> bool:
        """Whether keys and values of a parked sample are computed again in any case."""
        return False

    def pushed(self, version: int) -> None:
        """A version of the weights can be loaded."""
        raise AssertionError(f"version {version} was pushed, and no instance loads weights")

    def compares_early(self, section: Sequence[Stage]) -> bool:
        """Whether a section has a use for `by_group` results before the batch is there."""
        return False

    def tail(self, stages: StreamedStages, tasks: Sequence[GenerationTask]) -> tuple[NoTail, bool]:
        """The tail of a round, and whether forward passes run while others decode."""
        return NoTail(), True

    def may_start(self, position: int) -> bool:
        """Whether stages may start on a prompt's samples yet."""
        return True

    def of_step(self, position: int) -> bool:
        """Whether passes of models in other pools may start on a prompt's samples yet."""
        return True

    def make(self, tasks: Sequence[GenerationTask]) -> None:
        """Let samples be made, and stages end, until the round has what it wants."""
        self.schedule.loop.make(tasks)
        self.schedule.loop.finish()

    def take(self) -> list[int]:
        """The round has ended; gives the prompts that are trained on, in training order."""
        return [*self.schedule.groups.open]

    def round_ended(self) -> None:
        """A round is recorded, and its lengths are learned."""

    def make_again(self, positions: Sequence[int]) -> None:
        """Let samples of these prompts be made that an instance has lost since they were taken."""
        raise NotImplementedError

    def update_begins(self, updates: Sequence[UpdateStage]) -> None:
        """Updates that follow each other are to begin, each with samples."""

    def update_ended(self) -> None:
        """Updates that followed each other have ended."""

    def step_ended(self) -> None:
        """All stages of a step have run."""

    def metrics(self, used: Sequence[Sample]) -> dict[str, float]:
        """Counts of a step that has ended, which trained on `used`."""
        return {}

    def needs_versions(self) -> Collection[int]:
        """Pushed weights that samples of open prompts, which are not finished, go on with."""
        return ()

    def close(self) -> dict[SampleId, Drop]:
        """The run ends; gives the samples that no step has trained on, with the reason."""
        return {}


class LoopSchedule(Schedule):
    """Runs each section of a graph as a round of the loop, then its other stages.

    Stages of a section that make samples run together; samples go to instances by predicted length.
    A stage that needs no training shards starts on a sample, a filter or join on a prompt, when its
    fields are there. Stages across the batch, updates, and stages that need the training shards run
    afterwards, in the recipe's order. Its `policy` says which prompts a round begins, when it ends,
    and on which prompts the step trains.
    """

    def __init__(
        self,
        graph: Graph,
        executor: Executor,
        prompts: Iterator[Prompt],
        settings: StepSettings,
        policy: SchedulePolicy,
        *,
        limits: RoundLimits,
        length_model: LengthModel,
    ) -> None:
        super().__init__(graph, executor, prompts, settings)
        self.policy, self.limits, self.length_model = policy, limits, length_model
        self._sections: dict[str, StreamedStages] = {}  # by their first stage
        self.groups = BegunPrompts(graph, self._ledger, self._turns)
        self.loop = Loop(executor, self.groups, self.meter, limits, settings.decode_steps)
        self._open_round: int | None = None  # the step of a round that has begun and not ended
        policy.bind(self)
        self.loop.lasts, self.loop.in_flight = policy.lasts, policy.in_flight
        self.loop.pushed, self.loop.deals = policy.pushed, policy.deal
        self.loop.rests_at, self.loop.recomputes = policy.rests_at, policy.recomputes

    # -- between steps -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """With the lengths learned, and the policy's state."""
        return super().state_dict() | self.length_model.state_dict() | self.policy.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], *, prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue from a `state_dict`; another schedule may have learned nothing of lengths."""
        super().load_state_dict(state, prompt_at=prompt_at, ranks=ranks)
        self.length_model.load_state_dict(state)
        self.policy.load_state_dict(state, prompt_at, ranks)

    def load_open(
        self, records: Sequence[Mapping[str, Any]], prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue with `BegunPrompts.to_json`; choosers run for prompts where they can."""
        self.groups.load(records, prompt_at, ranks, self.sampling)
        for position, group in self.groups.open.items():
            for stage in dict.fromkeys(task.stage for task in group.tasks.values()):
                self.stages_of(stage).tracker.choose(position)

    def pending(self) -> tuple[PendingSample, ...]:
        """Return the samples of open prompts that are finished, parked or copied."""
        return self.groups.pending()

    def copy_open(self) -> None:
        """Have copies of the samples that instances go on with, in `state_dict` and `pending`.

        In flight instances take the newest weights first, so that whoever continues from the copies
        needs no others.
        """
        if self.policy.lasts and self.loop.has_begun:
            if self.policy.in_flight:
                self.loop.run_on(lambda: not self.policy.waits_for_push)
            self.loop.copy()

    def needs_versions(self) -> tuple[int, ...]:
        """Pushed weights that samples of open prompts, which are not finished, go on with."""
        return tuple(sorted(self.policy.needs_versions()))

    @property
    def group_fields(self) -> frozenset[str]:
        """Fields of samples for a later step that follow from those of all of their prompt."""
        fields = [stages.tracker.group_fields for stages in self._sections.values()]
        return frozenset[str]().union(*fields)

    def restore_parked(self, state: Any) -> None:
        """Set the reference to the parked tokens."""
        self.groups.restore_parked(state)

    def _pending_ids(self) -> Collection[SampleId]:
        open_ones = self.groups.open if self.policy.keeps else {}
        return {task.sample.id for task in tasks_of(open_ones)}

    def close(self) -> dict[SampleId, Drop]:
        """End the run; gives the samples that no step has trained on, with the reason."""
        self.pause()
        dropped = self.policy.close()
        self.groups.clear()
        return dropped | super().close()

    # -- a step --------------------------------------------------------------------------------

    def _begin_step(self, step: int) -> None:
        if self._open_round is not None:
            raise RuntimeError(
                f"step {self._open_round} failed while its samples were made: calls of it may be in"
                " flight, so no other step can begin"
            )
        super()._begin_step(step)
        self.loop.deaths.taken.clear()  # after the update of the step before
        self.metrics |= {"samples/migrated": 0.0, "samples/restarted": 0.0}
        if self.executor.wide:
            self.metrics |= {"samples/widened": 0.0, "samples/moved_kv_bytes": 0.0}
        if self.policy.keeps:
            self.groups.end_step()
            self.groups.drop_copies()
        else:  # a step that failed has left some
            self.groups.clear()
        self.policy.begin_step()

    def _pull(self, num: int) -> list[Prompt]:
        return self.policy.pull(num)

    def _summary(self, used: Sequence[Sample], num_dropped: int) -> dict[str, float]:
        self.metrics |= self.policy.metrics(used)
        return super()._summary(used, num_dropped)

    def _run_stages(self, stages: Sequence[Stage], batch: Batch) -> None:
        for section in sections(stages):
            makers = [stage for stage in section if isinstance(stage, SourceStage)]
            if makers:
                streamed = self._run_round(makers, batch)
                batch |= {s.name: streamed[s.name] for s in section if s.name in streamed}
            left = [stage for stage in section if stage.name not in batch]
            while True:
                try:
                    self._run_left(left, batch)
                    break
                except SamplesDied:
                    streamed = self._make_again(makers)
                    for stage in section:
                        batch.pop(stage.name, None)
                        self._has_run.discard(stage.name)
                    batch |= {s.name: streamed[s.name] for s in section if s.name in streamed}

    def _run_left(self, stages: Sequence[Stage], batch: Batch) -> None:
        """Run what is left of a section after its round."""
        for stage in with_updates_together(stages):
            if isinstance(stage, list):
                self.policy.update_begins([one for one in stage if batch[one.upstream[0]]])
                self._update(stage, batch)
                self.policy.update_ended()
            else:
                self._run(stage, batch)

    def _make_again(self, makers: Sequence[Stage]) -> Batch:
        """Make the samples again that died after the round's prompts were taken.

        Raises InstanceDied where some are of an earlier round, or an update has ended.
        """
        positions = [position for position, _ in self.pulled]
        of_round = {id.prompt for id in self.loop.deaths.taken} <= {*positions}
        died = bool(self.loop.deaths.taken) and of_round
        if not makers or not died or self._has_updated:
            raise InstanceDied("an instance died with samples of which the step has used some")
        self.groups.reopen(positions)
        self.loop.deaths.make_taken()
        tail = self.loop.tail
        recorded = tail.num_trained, tail.train_seconds
        self.policy.make_again(positions)
        positions = self.policy.take()
        self.groups.take(positions)
        self._count_restarted()
        self._count_early(*recorded)
        return self._streamed(self.stages_of(makers[0]).tracker, positions)

    @property
    def _died(self) -> Collection[SampleId]:
        return self.loop.deaths.taken

    def _check_alive(self) -> None:
        if self.loop.deaths.taken:
            raise SamplesDied("an instance died with samples that the step had taken")

    def _step_ended(self) -> None:
        self.policy.step_ended()

    def enter(self, phase: Phase) -> None:
        """Bring all ranks into a phase, where they are in another one."""
        self._enter(phase)

    def _wait(self) -> list[Event]:
        """Events of stages across the batch; instances go on meanwhile where they may."""
        if not (self.policy.lasts and self.loop.has_begun):
            return super()._wait()
        return self.loop.take_own(self.loop.next_events())

    @property
    def takes_guests(self) -> bool:
        """Whether a guest may use the instances while training goes on."""
        return self.policy.takes_guests and self.loop.has_begun

    def compare(self, update: UpdateStage, samples: Sequence[Sample]) -> None:
        """Have both engines compared on samples that the step does not train on."""
        with self._span("compare", len(samples)):
            self.executor.compare(update, samples)
            while not (events := self._wait()):
                pass
        (event,) = events
        assert isinstance(event, Compared), event
        self.metrics |= {f"{update.role}/{name}": x for name, x in event.metrics.items()}

    def pause(self) -> None:
        """Have instances park what they have, so that another schedule may use them.

        They go on with it afterwards, by the weights that it needs. A guest ends before.
        """
        loop = self.loop
        if not (self.policy.lasts and loop.has_begun):
            return
        self.wait_for_guest()
        loop.run_held(lambda: not (loop.is_loading or self.policy.waits_for_push))
        loop.put_down(self.limits.parks_kv)
        for instance in loop.instances:
            instance.version = None  # whoever has it meanwhile loads weights, too

    def admit(self, guest_of: Callable[[int], Guest]) -> None:
        """Have a guest use the instances until it is over, by the newest weights.

        `guest_of` makes it of their version. Stages and training go on meanwhile, with samples that
        are finished; new weights are pushed, and no instance loads them.
        """
        self.pause()
        assert self.loop.newest is not None, "no weights have been pushed"
        guest = guest_of(self.loop.newest)
        self.loop.guest = None if guest.is_over else guest

    def wait_for_guest(self) -> None:
        """Wait until no guest uses the instances."""
        if self.loop.guest is not None:
            self.loop.run_on(lambda: self.loop.guest is None)

    def _run_round(self, makers: Sequence[SourceStage], batch: Batch) -> Batch:
        """Make samples and run the early stages; gives those that have left these stages."""
        tasks = self._begin_making(makers, batch)
        if self.pulled and not tasks:  # none of the prompts has samples of these stages
            return self._streamed(self.stages_of(makers[0]).tracker, [])
        self.policy.make(tasks)
        return self._end_making(makers)

    def _begin_making(
        self, makers: Sequence[SourceStage], batch: Batch
    ) -> Sequence[GenerationTask]:
        """Begin a round of the loop; gives the samples that are to be made first."""
        self._makers, self._batch = makers, batch
        stages, policy = self.stages_of(makers[0]), self.policy
        tasks = policy.begin()
        if self.pulled and not tasks:
            return tasks
        phases = {phase_of(s, self._scope(s)) for s in [*makers, *stages.tracker.computes]}
        policy.enter(phases)
        self._open_round = self.step
        self.begin_loop(stages, *policy.tail(stages, tasks))
        return tasks

    def _end_making(self, makers: Sequence[SourceStage]) -> Batch:
        """A round has ended; gives the samples that the step trains on, by the stage they left."""
        stages, policy = self.stages_of(makers[0]), self.policy
        positions = policy.take()
        self.pulled = self.pulled or [(p, self.groups[p].prompt) for p in positions]
        waiting = stages.tracker.open_stages(positions)
        assert not waiting, f"{waiting} still wait"
        self.groups.take(positions)
        self._open_round = None
        self.record_round()
        tasks = [task for position in positions for task in self.groups[position].tasks.values()]
        samples = [task.sample for task in tasks if task.stage in makers]
        self.length_model.learn(self.pulled, samples, self._turns.waited, self._token_s)
        streamed = self._streamed(stages.tracker, positions)
        policy.round_ended()
        return streamed

    # -- parts of a round ----------------------------------------------------------------------

    def stages_of(self, maker: Stage) -> StreamedStages:
        """The early stages of a maker's section; one for the run."""
        section = self.section_of(maker)
        first = section[0].name
        if first not in self._sections:
            makers = [stage for stage in section if isinstance(stage, SourceStage)]
            by_group = self.policy.compares_early(section)
            early = early_stages(self.graph, section, self.executor, by_group)
            tracker = ReadyTracker(self.graph, makers, early, self.groups)
            chunk_tokens = self.limits.chunk_tokens
            stages = StreamedStages(self.executor, tracker, self.meter, chunk_tokens)
            self._sections[first] = stages
        return self._sections[first]

    @property
    def sections(self) -> list[list[Stage]]:
        """The stages whose samples are made together, for each round of a step."""
        return sections(self._order)

    def section_of(self, maker: Stage) -> list[Stage]:
        """The section in which a stage makes samples."""
        return next(section for section in self.sections if maker in section)

    def begin(self, prompts: Sequence[Prompt]) -> list[GenerationTask]:
        """The round's makers begin their samples of these prompts."""
        return [task for stage in self._makers for task in self._new_tasks(stage, prompts)]

    def _new_tasks(self, stage: SourceStage, pulled: Sequence[Prompt]) -> list[GenerationTask]:
        """Dispatch the samples of a maker for `pulled` prompts."""
        sampling = self.sampling(stage)
        dispatched = self._begin_samples(stage, pulled, self._batch)
        predicted = [0.0] * len(dispatched)
        if sampling is not None:
            most = float(sampling.max_new_tokens)
            lengths = self.length_model.predict(prompt for (_, prompt), _ in dispatched)
            predicted = [min(tokens, most) for tokens in lengths]
        tasks = []
        for ((_, prompt), group), tokens in zip(dispatched, predicted, strict=True):
            tasks += [
                GenerationTask(sample, stage, prompt, sampling, tokens, tokens) for sample in group
            ]
        self.groups.begin(pulled, self.step, tasks)
        return tasks

    def sampling(self, stage: SourceStage) -> Sampling | None:
        """A maker's sampling; None where it places the dataset's own answers."""
        if not isinstance(stage, GenerateStage):
            return None
        return sampling_of(stage, self.settings.sampling)

    def response_tokens(self, task: GenerationTask) -> int:
        """Response tokens of a sample that is parked, or of which there is a copy; else 0."""
        parked = self.groups.parked(task)
        if parked is None:
            return 0
        num_tokens = parked.tokens[parked.ids.index(task.sample.id)]
        return num_tokens - self.length_model.prompt_tokens(task.prompt)

    def begin_loop(self, stages: StreamedStages, tail: NoTail, overlaps: bool = True) -> None:
        """The loop begins a round; see `StreamedStages` for `overlaps`."""
        stages.begin(overlaps, self.policy.lasts, self.policy.of_step)
        self._turns.expected = self.length_model.expected_turns(len(self.pulled))
        self.loop.begin(stages, tail, self.policy.may_start)

    def record_round(self) -> None:
        """Record what the loop did since it began a round."""
        loop, tail = self.loop, self.loop.tail
        self._spans += [*loop.stages.spans, *tail.spans]
        self.metrics["samples/migrated"] += tail.num_migrated
        self._count_restarted()
        if self.executor.wide:
            self.metrics["samples/widened"] += tail.num_widened
            self.metrics["samples/moved_kv_bytes"] += loop.kv_bytes
        self._count_early()

    def _count_early(self, num_recorded: int = 0, recorded_s: float = 0.0) -> None:
        """Count what the tail has trained, but for samples and seconds that are recorded."""
        tail = self.loop.tail
        if "samples/trained_early" in self.metrics:
            self.metrics["samples/trained_early"] += tail.num_trained - num_recorded
            seconds = tail.train_seconds - recorded_s
            self._early_train_s += seconds / len(self.executor.instances)

    def _count_restarted(self) -> None:
        deaths = self.loop.deaths
        self.metrics["samples/restarted"] += deaths.num_restarted
        deaths.num_restarted = 0

    def _token_s(self) -> float:
        """Seconds of a token of a row that is alone, as far as they are known."""
        costs = self.meter.costs()
        return 0.0 if costs is None else float(costs.pace(1))

    def _streamed(self, tracker: ReadyTracker, positions: Sequence[int]) -> Batch:
        """The samples that have left makers and early stages; aborted ones leave the step."""
        batch = tracker.take(positions)
        aborted = [
            sample
            for sample in self._ledger.samples
            if sample.id.prompt in positions and sample.scalars.get("finish") == "abort"
        ]
        self._whole(aborted)
        return batch


def check_generates_once(graph: Graph) -> None:
    """Raise `ValueError` for a recipe whose prompts have samples of several rounds of a step."""
    updates: list[str] = []
    for stage in graph.stages.values():
        if stage.makes_more:
            raise ValueError(
                f"a recipe that generates once a step (stage {stage.name!r} makes more samples of "
                "some prompts)"
            )
        if isinstance(stage, SourceStage) and updates:
            raise ValueError(
                f"a recipe that generates before its first update (stage {stage.name!r} comes "
                f"after {updates[0]!r})"
            )
        if isinstance(stage, UpdateStage):
            updates.append(stage.name)
