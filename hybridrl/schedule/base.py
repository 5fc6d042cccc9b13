"""The base of every schedule: a step's prompts, its rounds, its barriers, its record."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, final

from hybridrl.costs.instance import UNLIMITED, Costs
from hybridrl.costs.meter import CostMeter
from hybridrl.flow.barriers import run_barrier
from hybridrl.flow.executor import (
    Computed,
    Event,
    Executor,
    Parked,
    Phase,
    Prepared,
    Replied,
    SamplesRead,
    Sampling,
    Scope,
    UpdateDone,
    UpdateRefused,
    WeightsReady,
    WorkerDied,
)
from hybridrl.flow.graph import (
    CollectStage,
    ComputeStage,
    Graph,
    SourceStage,
    Stage,
    UpdateStage,
    gate_of,
)
from hybridrl.flow.ledger import (
    Drop,
    DropReason,
    Ledger,
    before_take,
    generation_first,
    groups,
    new_samples,
    phase_of,
    ready,
    record_computed,
    wanted,
)
from hybridrl.flow.sample import ENVIRONMENT_FAILURE, Sample, SampleId
from hybridrl.flow.turns import OpenTurns
from hybridrl.flow.versions import VersionRecord
from hybridrl.schedule import StageSpan, StepResult
from hybridrl.schedule.events import Guest, learn, next_events
from hybridrl.schedule.lost_samples import InstanceDied, SamplesDied, not_died

logger = logging.getLogger(__name__)

Prompt = tuple[int, Any]  # position in the run's prompt stream, and what schedules do not look into
Batch = dict[str, list[Sample]]  # the samples that have left each stage, in training order

_ABORTED = "aborted by the rollout engine"


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings of a step: the sampling (where a stage has no other) and how many prompts.

    `decode_steps` bound one call of an instance. Its rows guess `draft_tokens` tokens ahead (0:
    none, None: as many as pay), and a pass has at most `pass_tokens`. `counted` are seconds of
    work on an instance by its operations, which calls scale; None where they are not counted.
    """

    sampling: Sampling
    decode_steps: int
    prompts_per_step: int
    draft_tokens: int | None = 0
    pass_tokens: int = UNLIMITED
    counted: Costs | None = None


@dataclass(frozen=True, slots=True)
class PendingSample:
    """A sample for a later step: its tensors are on `rank`, or its tokens in `parked`.

    `prompt` and `sampling` are those of its `Submit`. One that `waits` is between two turns: where
    the run continues its episode is replayed, and the reply comes once more (`Replied`).
    """

    id: SampleId
    prompt: Any
    sampling: Sampling | None
    rank: int
    parked: Parked | None
    waits: bool = False


class Schedule(ABC):
    """Runs a graph step by step; a subclass says how the stages of a step overlap.

    A step: pull prompts; make samples; run every further stage; update. With a `take` in the graph,
    the stages before it run in rounds of prompts until it has enough groups, the rest once.

    Invariants: samples are trained in the stream's order, in whatever order they finished. Every
    dispatched sample is used or dropped, and the ranks keep it until `release`.

    `prompts` gives positions (growing over the run) and prompts. `meter` learns the costs of work
    from every call.
    """

    def __init__(
        self, graph: Graph, executor: Executor, prompts: Iterator[Prompt], settings: StepSettings
    ) -> None:
        graph.check()
        self.graph, self.executor, self.prompts = graph, executor, prompts
        self.settings = settings
        self.meter = CostMeter(settings.draft_tokens, settings.pass_tokens, settings.counted)
        self._order = generation_first(list(graph.stages.values()))
        self._take, self._in_rounds = before_take(graph)
        self._ledger, self._turns = Ledger(), OpenTurns()
        self.steps_done = 0
        self._clear(0)

    def run_step(self, step: int) -> StepResult:
        """One iteration. `step` is for the record. Its samples stay on the ranks until `release`.

        Raises `ValueError` when the prompts end, when `take` does not get enough groups, and when a
        recipe's function returns a result that does not fit. Raises `RuntimeError` when no instance
        is left, or one dies while a stage runs that waits for the whole batch.
        """
        self.release()
        num_before = len(self._ledger.samples)  # pending since earlier steps
        dispatched_before = self._ledger.num_dispatched
        logger.debug("step %d begins with %d pending samples", step, num_before)
        self._begin_step(step)
        batch = (
            self._run_rounds() if self._take else self._begin_round(self.settings.prompts_per_step)
        )
        self._run_stages([s for s in self._order if s.name not in batch], batch)
        self._step_ended()
        pending = self._pending_ids()
        used, dropped = self._ledger.settle(pending)
        num_dispatched = self._ledger.num_dispatched - dispatched_before
        assert num_before + num_dispatched == len(used) + len(dropped) + len(pending), (
            f"step {step}: {num_before} samples were pending and {num_dispatched} dispatched, but"
            f" {len(used)} used, {len(dropped)} dropped, {len(pending)} are pending"
        )
        logger.debug(
            "step %d ended: %d samples used, %d dropped, %d pending",
            step,
            len(used),
            len(dropped),
            len(pending),
        )
        self.steps_done += 1
        if self._train_costs:  # of every role that the step trains
            seconds, tokens = zip(*self._train_costs, strict=True)
            self.meter.saw_train(sum(seconds), max(tokens))
        return self._result(used, dropped, pending)

    def _result(
        self,
        used: Sequence[Sample],
        dropped: dict[SampleId, Drop],
        pending: Collection[SampleId] = (),
    ) -> StepResult:
        """The record of the present step, whose samples are settled but those `pending`."""
        return StepResult(
            self.step,
            tuple(used),
            tuple([s for s in self._ledger.samples if s.id not in pending]),
            dropped,
            self._summary(used, len(dropped)),
            tuple(self._spans),
            self.versions,
        )

    def release(self) -> None:
        """Let the ranks forget the last step's samples; the next step does it by itself."""
        if gone := self._ledger.forget(self._pending_ids()):
            self._turns.forget(gone)
            self.executor.release(gone)

    def close(self) -> dict[SampleId, Drop]:
        """End the run: release everything; gives the unfinished samples, with the reason."""
        self.release()
        return {}

    def pause(self) -> None:  # noqa: B027  # most leave nothing to instances
        """Have instances park what they have, so that another schedule may use them."""

    @property
    def takes_guests(self) -> bool:
        """Whether a guest may use the instances while training goes on (`LoopSchedule.admit`)."""
        return False

    def admit(self, guest_of: Callable[[int], Guest]) -> None:
        """Have a guest, made of the weights' version, use the instances until it is over."""
        raise AssertionError("a schedule without guests")

    def wait_for_guest(self) -> None:  # noqa: B027
        """Wait until no guest uses the instances."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Every sample since the last release, in order of dispatch, pending ones too."""
        return self._ledger.samples

    def state_dict(self) -> dict[str, Any]:
        """The state that the next step continues with, in plain JSON types; between steps."""
        waits = self._turns.waits_seen.state_dict()
        return {
            "steps_done": self.steps_done,
            "meter": self.meter.state_dict(),
            "waits": waits,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue from a `state_dict`, before the first step. The prompts must be where they were.

        `prompt_at` gives the prompt at a position. The tensors of the samples that are `pending`
        then must be on their `ranks`, or where `restore_parked` says.
        """
        self.steps_done = state["steps_done"]
        self.meter.load_state_dict(state["meter"])
        if "waits" in state:  # an older checkpoint has none
            self._turns.waits_seen.load_state_dict(state["waits"])

    def pending(self) -> tuple[PendingSample, ...]:
        """Samples for a later step that have tensors, which `state_dict` does not hold."""
        return ()

    def copy_open(self) -> None:  # noqa: B027  # most leave nothing to instances
        """Have in `state_dict` and `pending` the tokens so far of what instances go on with."""

    def needs_versions(self) -> tuple[int, ...]:
        """Pushed weights, older than those that train, that unfinished samples go on with."""
        return ()

    @property
    def group_fields(self) -> frozenset[str]:
        """Fields of samples for a later step that follow from those of all of their prompt."""
        return frozenset()

    def restore_parked(self, state: Any) -> None:
        """After `load_state_dict`: `state` refers to all parked tokens (`Parked.state`)."""
        raise AssertionError("nothing is parked")

    def _pending_ids(self) -> Collection[SampleId]:
        """Samples that a later step trains on."""
        return ()

    # -- prompts and rounds --------------------------------------------------------------------

    @final
    def _clear(self, step: int) -> None:
        """Nothing of `step` has run yet. The constructor calls it, so no subclass overrides it."""
        self.step = step
        self._spans: list[StageSpan] = []
        self.metrics: dict[str, float] = {}
        self.versions: VersionRecord = {}
        self._num_preempted = self.meter.num_preempted
        self._drafts = self.meter.num_drafted, self.meter.num_accepted
        self._phase: Phase | None = None
        self._has_updated = False  # an update of the step has ended
        self._refused: list[str] = []  # updates, by instances that died
        self._has_run: set[str] = set()  # stages that an earlier one has taken along
        self.pulled: list[Prompt] = []
        self._train_costs: list[tuple[float, int]] = []  # seconds, tokens of the step's updates
        self._early_train_s = 0.0  # of an update that is to come, as if all instances had shared it

    def _begin_step(self, step: int) -> None:
        """A step begins; a subclass resets here its counts and state of one step."""
        self._clear(step)

    def _begin_round(self, num: int) -> Batch:
        """A round of `num` prompts begins; its batch has none but them."""
        self.pulled = self._pull(num)
        return {"prompts": []}

    def _pull(self, num: int) -> list[Prompt]:
        """The prompts of a round, in so far as they are known before it."""
        return self.next_prompts(num)

    def next_prompts(self, num: int) -> list[Prompt]:
        """The next prompts; raises ValueError where there are fewer."""
        pulled = list(islice(self.prompts, num))
        if len(pulled) < num:
            raise ValueError(f"the prompts have ended: got {len(pulled)}, wanted {num}")
        return pulled

    def _run_rounds(self) -> Batch:
        """Pull and run rounds of prompts until the take has its groups; then merge the rounds."""
        take = self._take
        assert take is not None
        wanted = take.num_groups or self.settings.prompts_per_step
        num_prompts = take.round_prompts or self.settings.prompts_per_step
        merged: Batch = {}
        all_pulled: list[Prompt] = []
        passed: list[list[Sample]] = []
        for _ in range(take.max_rounds):
            batch = self._begin_round(num_prompts)
            before = [s for s in self._order if s.name in self._in_rounds]
            self._run_stages([s for s in before if s.name not in batch], batch)
            all_pulled += self.pulled
            for name, samples in batch.items():
                merged.setdefault(name, []).extend(samples)
                # A later round may have earlier prompts, where groups come as they complete.
                merged[name].sort(key=lambda sample: sample.id.prompt)
            passed = groups(merged[take.upstream[0]])
            logger.debug("%s: %d groups have come, %d wanted", take.name, len(passed), wanted)
            if len(passed) >= wanted:
                break
        if len(passed) < wanted and not take.allow_fewer:
            raise ValueError(
                f"take {take.name!r}: got {len(passed)} groups out of {len(all_pulled)} prompts in "
                f"max_rounds={take.max_rounds} rounds, wanted {wanted}; raise max_rounds or "
                "round_prompts, or loosen the filter before it"
            )
        past = f"take: past the first {wanted} groups of {take.name}"
        for group in passed[wanted:]:
            self._ledger.leave(group, DropReason.TAKE, past)
        merged[take.name] = [sample for group in passed[:wanted] for sample in group]
        self.pulled = sorted(all_pulled, key=itemgetter(0))
        return merged

    # -- stages --------------------------------------------------------------------------------

    @abstractmethod
    def _run_stages(self, stages: Sequence[Stage], batch: Batch) -> None:
        """Run `stages`, in their order or as if so; `batch` gets the samples that leave each."""

    def _step_ended(self) -> None:  # noqa: B027  # most do nothing then
        """All stages of a step have run, of all its rounds."""

    def _run(self, stage: Stage, batch: Batch) -> None:
        """Run one stage on everything that has left its upstream."""
        upstream, *others = (batch[name] for name in stage.upstream)
        if stage.name in self._has_run:
            self._has_run.remove(stage.name)
            batch[stage.name] = upstream
            return
        phase = phase_of(stage, self._scope(stage))
        # A stage without samples is left out, so that a step whose groups are all filtered away
        # neither switches weights nor takes an optimizer step.
        if upstream and phase:
            self._enter(phase)
        together = self._together(stage, upstream)
        with ExitStack() as spans:
            for one in together:
                spans.enter_context(self._span(one.name, len(upstream)))
            batch[stage.name] = upstream
            match stage:
                case ComputeStage():
                    self._compute(together, upstream)
                case CollectStage():
                    self._ledger.use(upstream)
                case _:
                    batch[stage.name] = run_barrier(
                        stage, upstream, others[0] if others else [], self._ledger
                    )

    def _together(self, stage: Stage, samples: Sequence[Sample]) -> list[Stage]:
        """The stage, and later ones whose forward passes share its call.

        They are of scope WORLD, too, have the same samples come to them, and read what is there
        already. No update is between, since it changes weights.
        """
        together = [stage]
        if self._scope(stage) is not Scope.WORLD or not samples:
            return together
        gate = gate_of(self.graph, stage)
        for other in self._order[self._order.index(stage) + 1 :]:
            if isinstance(other, UpdateStage):
                break
            if (
                self._scope(other) is Scope.WORLD
                and gate_of(self.graph, other) == gate
                and all(ready(other, sample) for sample in samples)
                and self.executor.scores_together(together, other)
            ):
                together.append(other)
                self._has_run.add(other.name)
        return together

    def _scope(self, stage: Stage) -> Scope | None:
        return self.executor.scope(stage) if isinstance(stage, ComputeStage) else None

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            start = self.executor.clock.now()
            with self._span(f"to_{phase.value}"):
                if phase is Phase.GENERATE:
                    self.executor.sync_weights()
                else:
                    self.executor.prepare(self.executor.instances, phase)
                while not (ended := self._wait()):  # replies alone
                    pass
                for event in ended:
                    if isinstance(event, WorkerDied):
                        number = event.instance
                        raise InstanceDied(f"generation instance {number} died between phases")
                    assert isinstance(event, WeightsReady | Prepared), event
            saw = self.meter.saw_switch if phase is Phase.GENERATE else self.meter.saw_train_switch
            saw(self.executor.clock.now() - start)
            self._phase = phase

    def _begin_samples(
        self, stage: SourceStage, pulled: Sequence[Prompt], batch: Batch
    ) -> list[tuple[Prompt, list[Sample]]]:
        """Dispatch the samples that a stage makes: prompts with one or more each."""
        (upstream,) = stage.upstream
        numbers = wanted(stage, (position for position, _ in pulled), batch[upstream])
        dispatched = new_samples(stage, numbers)
        self._ledger.dispatch(sample for group in dispatched for sample in group)
        num_samples = sum(map(len, dispatched))
        logger.debug("stage %s: %d samples of %d prompts", stage.name, num_samples, len(pulled))
        return [(prompt, group) for prompt, group in zip(pulled, dispatched, strict=True) if group]

    def _whole(self, samples: Iterable[Sample]) -> list[Sample]:
        """Return the samples that the engine has finished; aborted ones leave."""
        samples = list(samples)
        for sample in samples:
            if sample.scalars["finish"] == "abort":
                failure = sample.scalars.get(ENVIRONMENT_FAILURE)
                reason = f"its episode has failed ({failure})" if failure else _ABORTED
                self._ledger.leave([sample], DropReason.ABORTED, reason)
        return [s for s in samples if s.scalars["finish"] != "abort"]

    def _compute(self, stages: Sequence[Stage], samples: Sequence[Sample]) -> None:
        """Run a per-sample stage on the samples' ranks, or several as one (`_together`)."""
        if not samples:
            return
        stage, *others = stages
        assert not [sample.id for one in stages for sample in samples if not ready(one, sample)]
        by_id = {sample.id: sample for sample in samples}
        if self._scope(stage) is Scope.INSTANCE:
            by_instance: dict[int, list[Sample]] = {}
            for sample in samples:
                by_instance.setdefault(self.executor.instance_of(sample.rank), []).append(sample)
            for instance, here in by_instance.items():
                self.executor.infer(stage, instance, here)
        elif others:
            self.executor.compute_together(stages, samples)
        else:
            self.executor.compute(stage, samples)
        waiting = {(one.name, id) for one in stages for id in by_id}
        whole = isinstance(stage, ComputeStage) and stage.whole_groups
        while waiting := not_died(waiting, self._died, whole):
            for event in self._wait():
                if isinstance(event, WorkerDied):
                    raise InstanceDied(
                        f"generation instance {event.instance} died while {stage.name!r} ran"
                    )
                if isinstance(event, SamplesRead):
                    continue
                assert isinstance(event, Computed), event
                record_computed(self.graph.stages[event.stage], by_id, event)
                waiting.difference_update([(event.stage, id) for id in event.ids])
                learn(self.meter, event, [by_id[id] for id in event.ids])
        self._check_alive()

    @property
    def _died(self) -> Collection[SampleId]:
        """Samples of the step that have died since it has taken them."""
        return ()

    def _update(self, stages: Sequence[UpdateStage], batch: Batch) -> None:
        """Updates that follow each other: those of different pools of ranks run at once.

        Those of one pool go out as one call where the executor fuses them, else in the recipe's
        order. None reads another one's results.
        """
        for stage in stages:
            batch[stage.name] = batch[stage.upstream[0]]
        due = [s for s in stages if batch[s.name] and self.steps_done >= s.after]
        if not due:
            return
        self._check_alive()
        self._enter(Phase.TRAIN)
        begun, running = self.executor.clock.now(), dict[str, float]()
        for call in self._calls(due):
            updates = [(stage, batch[stage.name]) for stage in call]
            for stage, samples in updates:
                assert all(ready(stage, sample) for sample in samples), stage
                self._ledger.use(samples)
            pool = self.executor.pool(call[0])
            while any(self.executor.pool(self.graph.stages[name]) == pool for name in running):
                self._trained(running)
            running |= {stage.name: self.executor.clock.now() for stage in call}
            self.executor.update(updates)
        while running:
            self._trained(running)
        if refused := self._refused:
            self._refused = []
            text = f"an instance died with samples that {refused[0]!r} was to train on"
            raise (InstanceDied if self._has_updated else SamplesDied)(text)
        seconds = self.executor.clock.now() - begun + self._early_train_s
        tokens = max(sum(sample.tokens for sample in batch[stage.name]) for stage in due)
        self._train_costs.append((seconds, tokens))
        self._early_train_s = 0.0

    def _calls(self, stages: Sequence[UpdateStage]) -> list[list[UpdateStage]]:
        """The updates of each call. Those of one pool are adjacent if none of it is between."""
        calls: list[list[UpdateStage]] = []
        last_of_pool: dict[str, list[UpdateStage]] = {}
        for stage in stages:
            pool = self.executor.pool(stage)
            last = last_of_pool.get(pool)
            if last and self.executor.fuses(last, stage):
                last.append(stage)
            else:
                last_of_pool[pool] = [stage]
                calls.append(last_of_pool[pool])
        return calls

    def _trained(self, running: dict[str, float]) -> None:
        """Wait until an update or more have ended; they leave `running`, which has their starts."""
        for event in self._wait():
            if isinstance(event, WorkerDied):
                raise InstanceDied(f"generation instance {event.instance} died during training")
            if isinstance(event, UpdateRefused):
                del running[event.stage]
                self._refused.append(event.stage)
                continue
            assert isinstance(event, UpdateDone), event
            self._has_updated = True
            stage, start = self.graph.stages[event.stage], running.pop(event.stage)
            self._spans.append(StageSpan(stage.name, start, self.executor.clock.now()))
            for name, value in event.metrics.items():
                self.metrics[f"{stage.role}/{name}"] = value

    def _check_alive(self) -> None:  # noqa: B027  # most begin on what no death takes away
        """Raise SamplesDied where samples of the step have died since it has taken them."""

    def _wait(self) -> list[Event]:
        """Events other than replies, which may come at any time."""
        events = next_events(self.executor)
        for event in events:
            if isinstance(event, Replied):
                self._turns.replied(event)
        return [event for event in events if not isinstance(event, Replied)]

    # -- the record ----------------------------------------------------------------------------

    @contextmanager
    def _span(self, name: str, num_samples: int | None = None) -> Iterator[None]:
        """Record the time of a stage or a change of phase; a change has no samples."""
        if num_samples is None:
            logger.debug("%s begins", name)
        else:
            logger.debug("%s begins on %d samples", name, num_samples)
        start = self.executor.clock.now()
        yield
        logger.debug("%s ended", name)
        self._spans.append(StageSpan(name, start, self.executor.clock.now()))

    def _summary(self, used: Sequence[Sample], num_dropped: int) -> dict[str, float]:
        summary = {
            **self.metrics,
            "samples/used": float(len(used)),
            "samples/dropped": float(num_dropped),
            "samples/step_failed": float(self._ledger.num_step_failed),
            "samples/prompts": float(len(self.pulled)),
            "samples/preempted": float(self.meter.num_preempted - self._num_preempted),
            "samples/tokens": float(sum(sample.tokens for sample in used)),
        }
        if self.meter.num_drafted:  # the engine guesses tokens
            drafted = self.meter.num_drafted - self._drafts[0]
            accepted = self.meter.num_accepted - self._drafts[1]
            summary["samples/drafted_tokens"] = float(drafted)
            summary["samples/accepted_tokens"] = float(accepted)
            summary["samples/draft_acceptance"] = accepted / drafted if drafted else 0.0
        return summary | {f"state/{name}": value for name, value in self.graph.states.items()}
