"""The schedule of a loop: per-sample stages overlap generation, and a policy decides the rest."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hybridrl.flow.executor import Event, Executor, Phase, Sampling
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
    next_events,
)
from hybridrl.schedule.groups import BegunPrompts, GenerationTask, tasks_of
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop import Loop
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

    def update_ended(self) -> None:
        """Updates that followed each other have ended."""

    def step_ended(self) -> None:
        """All stages of a step have run."""

    def metrics(self, used: Sequence[Sample]) -> dict[str, float]:
        """Counts of a step that has ended, which trained on `used`."""
        return {}

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
        self.loop.lasts, self.loop.pushed = policy.lasts, policy.pushed

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
        """Return the samples of open prompts that are parked or finished."""
        return self.groups.pending()

    def needs_versions(self) -> tuple[int, ...]:
        """Pushed weights that samples of open prompts, which are not finished, go on with."""
        groups = self.groups
        open_ones = [group for p, group in groups.open.items() if not groups.is_complete(p)]
        return tuple(sorted({g.version for g in open_ones if g.version is not None}))

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
        self.metrics |= {"samples/migrated": 0.0, "samples/restarted": 0.0}
        if self.executor.wide:
            self.metrics |= {"samples/widened": 0.0, "samples/moved_kv_bytes": 0.0}
        if self.policy.keeps:
            self.groups.end_step()
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
            for stage in with_updates_together(left):
                if isinstance(stage, list):
                    self._update(stage, batch)
                    self.policy.update_ended()
                else:
                    self._run(stage, batch)
        self.policy.step_ended()

    def enter(self, phase: Phase) -> None:
        """Bring all ranks into a phase, where they are in another one."""
        self._enter(phase)

    def _wait(self) -> list[Event]:
        """Events of stages across the batch; instances go on meanwhile where they may."""
        if not (self.policy.lasts and self.loop.has_begun):
            return super()._wait()
        return self.loop.take_own(next_events(self.executor))

    def pause(self) -> None:
        """Let instances end what they have, so that another schedule may use them."""
        loop = self.loop
        if not (self.policy.lasts and loop.has_begun):
            return

        def is_idle() -> bool:
            busy = loop.instances.hold_some or loop.instances.in_flight or loop.stages.running
            return not (busy or loop.is_loading or self.policy.waits_for_push)

        loop.run_held(is_idle)
        for instance in loop.instances:
            instance.version = None  # the other schedule loads weights, too

    def _run_round(self, makers: Sequence[SourceStage], batch: Batch) -> Batch:
        """Make samples and run the early stages; gives those that have left these stages."""
        self._makers, self._batch = makers, batch
        stages, policy = self.stages_of(makers[0]), self.policy
        tasks = policy.begin()
        if self.pulled and not tasks:  # none of the prompts has samples of these stages
            return self._streamed(stages.tracker, [])
        phases = {phase_of(s, self._scope(s)) for s in [*makers, *stages.tracker.computes]}
        policy.enter(phases)
        self._open_round = self.step
        self.begin_loop(stages, *policy.tail(stages, tasks))
        policy.make(tasks)
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
        self.metrics["samples/restarted"] += loop.num_restarted
        if self.executor.wide:
            self.metrics["samples/widened"] += tail.num_widened
            self.metrics["samples/moved_kv_bytes"] += loop.kv_bytes
        if "samples/trained_early" in self.metrics:
            self.metrics["samples/trained_early"] += tail.num_trained
            self._early_train_s += tail.train_seconds / len(self.executor.instances)

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
