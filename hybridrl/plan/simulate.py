"""The executor of what-if runs: a cost model and known lengths under a virtual clock.

It has the interface of worker groups, so the simulation runs the schedule itself.
"""

import heapq
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.costs.instance import Costs
from hybridrl.costs.mapping import ACTOR
from hybridrl.costs.push import PushCosts
from hybridrl.flow.clock import Clock, VirtualClock
from hybridrl.flow.conversations import ConversationModel, ModeledConversation, reply_to
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    TRAINING_POOL,
    Advanced,
    Command,
    Compared,
    Computed,
    EarlyTrained,
    Event,
    Finished,
    LoadWeights,
    Phase,
    Prepared,
    Replied,
    SamplesRead,
    Scope,
    TargetsLoaded,
    TurnEnded,
    UpdateDone,
    WeightsPushed,
    WeightsReady,
)
from hybridrl.flow.graph import AnswersStage, Stage, StageMethod, UpdateStage
from hybridrl.flow.mapped_work import MappedWork
from hybridrl.flow.modeled_instance import ModeledInstance, ModeledRow
from hybridrl.flow.sample import Sample, SampleId, Scalar, TokenSpan
from hybridrl.layout.wide import wide_instances

_TRAINER = "actor"
"""The pool that trains, where instances have ranks of their own."""

EARLY_BACKWARD = "early backward"
"""The name of an instance's part of an update that others wait for."""

LOAD = "load"
"""The name of an instance's time for new weights, where it has ranks of its own."""


@dataclass(frozen=True, slots=True)
class Slice:
    """An instance was at work from `start` to `stop`."""

    instance: int
    name: str
    start: float
    stop: float


class SimulatedExecutor:
    """`hybridrl.flow.executor.Executor` with `Costs` and known lengths, one rank an instance.

    An instance runs one call at a time, first in first out; a call's event reaches the driver
    `costs.round_trip_s` after its end. `length_of` returns the response tokens of a sample,
    `prompt_tokens_of` those of a prompt, by position. Stages have the scope in `scopes`, else RANK:
    they run concurrently with the instance, verifiers `verifier_s` longer. Samples that move for an
    `infer` arrive at once, even from a busy instance. A stage of scope WORLD shares its tokens
    among the instances. One of scope POOL runs in a separate pool, also one call at a time. One of
    scope DRIVER judges any number of samples at a time, each alone, and keeps no instance busy:
    `max_in_flight` is not modeled. An instance decodes at most `max_running` samples at a time, the
    others wait. `widths` are the numbers of instances that may become one (`layout.wide`). With
    `counts_tokens` a call bounds tokens where rows guess ahead.

    With `apart` instances have ranks of their own. Updates and passes of models are in one other
    pool, which runs one call at a time. An instance decodes with the weights that it has loaded.

    With `conversations` a response has turns. The driver hands each to its environment when it
    knows of it, and the reply comes after the seconds of the model.

    Under a mapping (`mapped`) an instance has the ranks of the mapping's generation layout, and
    forward passes and updates the seconds of their roles. Pools are independent: each runs one call
    at a time, and updates of different pools run at once. `costs` are those of an instance, and
    what the scheduler assumes of the rest.

    Invariants: the clock never decreases; `slices` of an instance do not overlap. A sample's
    response has its known length, whether it was parked or moved or not.

    Example, step_s 1, row_s 0, call_s 0: samples of 3 and 5 tokens in calls of 4 steps end at
    times 4 (with the call) and 5.
    """

    def __init__(
        self,
        costs: Costs,
        num_instances: int,
        length_of: Callable[[SampleId], int],
        prompt_tokens_of: Callable[[int], int],
        *,
        max_running: int,
        scopes: Mapping[str, Scope],
        verifier_s: float = 0.0,
        widths: Sequence[int] = (),
        counts_tokens: bool = False,
        mapped: MappedWork | None = None,
        conversations: ConversationModel | None = None,
        apart: PushCosts | None = None,
    ) -> None:
        self._apart, self.separate = apart, apart is not None
        self._pushed: set[int] = set()
        self._loaded: dict[int, int] = {}
        self._clock = VirtualClock()
        self.clock: Clock = self._clock
        self.costs, self.num_instances = costs, num_instances
        self.instances: Sequence[int] = range(num_instances)
        self.length_of, self.prompt_tokens_of = length_of, prompt_tokens_of
        self.max_running, self.scopes, self.verifier_s = max_running, scopes, verifier_s
        self.version = 0
        self.slices: list[Slice] = []
        self.phase: Phase | None = None
        self._num_updates = 0
        self._early: set[SampleId] = set()
        self._training: set[int] = set()  # instances that have left GENERATE
        self.wide: Mapping[int, tuple[int, ...]] = wide_instances(num_instances, widths)
        ones = {number: (number,) for number in range(num_instances)}
        self.conversations = conversations
        converse = self._conversation if conversations is not None else None
        instance = (self._length, prompt_tokens_of, max_running, counts_tokens, converse)
        self._servers = {
            number: ModeledInstance(costs.at_width(len(members)), *instance)
            for number, members in {**ones, **self.wide}.items()
        }
        self._free_at = [0.0] * num_instances
        self._mapped = mapped
        self._pool_free_at: dict[str, float] = {}  # of pools besides the instances'
        self._active: dict[int | str, str | None] = {}  # the role on an instance, or in a pool
        self._pending: list[tuple[float, int, Event]] = []
        self._num_calls = 0

    def _length(self, id: SampleId) -> int:
        return self.length_of(id)

    def _conversation(self, id: SampleId) -> ModeledConversation:
        assert self.conversations is not None
        return self.conversations.of(id, self.length_of(id))

    def instance_of(self, rank: int) -> int:
        """One rank is one instance."""
        return rank

    def scope(self, stage: Stage) -> Scope:
        """The scope in `scopes`, by the stage's name."""
        return self.scopes.get(stage.name, Scope.RANK)

    def pool(self, stage: Stage) -> str:
        """Return the mapping's pool; without one, all stages of scope POOL share a pool."""
        if self._mapped is not None:
            return self._mapped.pool(stage)
        if self.separate:
            return _TRAINER
        return "critic" if self.scope(stage) is Scope.POOL else "actor"

    def _pass_s(
        self,
        stage: Stage,
        samples: Sequence[Sample],
        places: Sequence[int | str],
        instances: int = 1,
    ) -> float:
        """Seconds of one call of a forward-only stage whose tokens `instances` share.

        Under a mapping its role comes onto the device first, unless it was the last one there.
        """
        if self._mapped is not None and self._mapped.has_pass(stage):
            seconds = self._mapped.pass_s(stage, samples)
            if any(self._active.get(place) != stage.role for place in places):
                seconds += self._mapped.onload_s(stage)
            self._active |= dict.fromkeys(places, stage.role)
            return seconds
        tokens = sum(sample.tokens for sample in samples)
        return self.costs.compute(stage.name, tokens / instances)

    def push_weights(self) -> None:
        """Training ranks pack their weights when they have ended what they do."""
        assert self._apart is not None
        end, version = self._take_pool(_TRAINER, self._apart.push_s), self._num_updates
        self._pushed.add(version)
        self._push(end, WeightsPushed(version))

    def keep_versions(self, versions: Collection[int]) -> None:
        """Others cannot be loaded any more."""
        self._pushed &= {*versions, max(self._pushed, default=0)}

    def sync_weights(self) -> None:
        """The weight switch takes `switch_s`; a push and loads their own seconds."""
        self._early.clear()
        self.version = self._num_updates
        if self._apart is not None:
            self._loaded = dict.fromkeys(self.instances, self.version)
            end = self._take_pool(_TRAINER, self._apart.push_s) + self._apart.load_s
            self._free_at = [max(end, at) for at in self._free_at]
            self._push(end, WeightsReady(self.version))
            return
        self._change(Phase.GENERATE, self.costs.switch_s, WeightsReady(self.version))

    def prepare(self, places: Sequence[int], phase: Phase) -> None:
        """The switch to training takes `train_switch_s`; ranks that do nothing else are there."""
        if self.separate:
            self._push(self.clock.now(), Prepared(tuple(places), phase))
            return
        self._change(phase, self.costs.train_switch_s, Prepared(tuple(places), phase))

    def _change(self, phase: Phase, seconds: float, event: Event) -> None:
        calls = [event for _, _, event in self._pending if not isinstance(event, Replied)]
        assert not calls, "a phase change while calls are in flight"
        self._training.clear()
        self.phase = phase
        self._push(self.clock.now() + seconds, event)

    def advance(
        self,
        instance: int,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> None:
        """Execute the commands, then decode until the steps are done or no row remains."""
        assert self.separate or self.phase is Phase.GENERATE, "generation outside of its phase"
        version, load_s = self.version, 0.0
        if self._apart is not None:
            for command in commands:
                if isinstance(command, LoadWeights):
                    assert command.version in self._pushed, f"nobody keeps {command.version}"
                    self._loaded[instance], load_s = command.version, self._apart.load_s
            version = self._loaded[instance]
        members = self.wide.get(instance, ())
        assert all(self._servers[i].is_empty for i in members), "a member has samples"
        assert self._training.isdisjoint(members), "a member trains"
        self._active.pop(instance, None)
        server = self._servers[instance]
        advance = server.advance(commands, num_decode_steps, version, enough_turns)
        done = tuple(
            Finished(
                row.id,
                instance,
                row.prompt,
                row.num_generated,
                row.finish,
                tuple(row.spans),
                scalars=row.scalars,
            )
            for row in advance.finished
        )
        turns = tuple(
            TurnEnded(row.id, (0,) * row.turns[0].tokens, "", "stop", row.num_generated)
            for row in advance.turns
        )
        event = Advanced(
            instance,
            server.unfinished,
            done,
            advance.parked,
            work=advance.work,
            turns=turns,
            copies=advance.copies,
        )
        name = advance.work.name(wide=bool(members))
        *others, last = members or (instance,)
        for member in members:
            self._free_at[member] = max(self._free_at[i] for i in members)
        for member in others:
            self._serve(member, name, advance.work.seconds)
        if load_s:
            self._serve(last, LOAD, load_s)
        known = self._serve(last, name, advance.work.seconds, event)
        for turn, row in zip(turns, advance.turns, strict=True):
            self._reply(turn, row, known)

    def _reply(self, turn: TurnEnded, row: ModeledRow, known: float) -> None:
        """The environment's reply to a turn that the driver knows of at `known`."""
        modeled = row.turns[0]
        reply = reply_to(turn, modeled, row.num_turns, row.finish)
        self._push(known + modeled.wait_s, Replied((reply,), (modeled.wait_s,)))

    def load_targets(
        self, stage: AnswersStage, ids: Sequence[SampleId], prompts: Sequence[Any]
    ) -> None:
        """The dataset's answers are available at once."""
        targets = []
        for i, id in enumerate(ids):
            length, rank = self.length_of(id), i % self.num_instances
            spans = (TokenSpan(0, length, 0),) if length else ()
            prompt = self.prompt_tokens_of(id.prompt)
            targets.append(Finished(id, rank, prompt, length, "stop", spans))
        self._push(self.clock.now(), TargetsLoaded(stage.name, tuple(targets)))

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        """Judges run concurrently with instances, sharded roles on all or in their own pool."""
        scope, now = self.scope(stage), self.clock.now()
        if scope is Scope.POOL:
            pool = self.pool(stage)
            seconds = self._pass_s(stage, samples, [pool])
            end = self._take_pool(pool, seconds)
            self._push(end, self._computed(stage, samples, seconds=seconds))
            return
        if scope is Scope.DRIVER:
            self._push(now, SamplesRead(stage.name, tuple(sample.id for sample in samples)))
            for sample in samples:
                seconds = self.costs.compute(stage.name, sample.tokens)
                self._push(now + seconds, self._computed(stage, [sample], seconds=seconds))
            return
        if scope is Scope.RANK:
            by_rank: dict[int, list[Sample]] = {}
            for sample in samples:
                by_rank.setdefault(sample.rank, []).append(sample)
            for mine in by_rank.values():
                seconds = self.costs.compute(stage.name, sum(sample.tokens for sample in mine))
                if stage.method is StageMethod.SCORE:
                    seconds += self.verifier_s
                self._push(now + seconds, self._computed(stage, mine, seconds=seconds))
            return
        seconds = self._pass_s(stage, samples, self.instances, self.num_instances)
        end = self._run_on_all(stage.name, seconds)
        self._push(end, self._computed(stage, samples, seconds=seconds))

    def _run_on_all(self, name: str, seconds: float) -> float:
        """Keep all instances busy together, once all are free; gives the end."""
        start = max([self.clock.now(), *self._free_at])
        for instance in range(self.num_instances):
            self._free_at[instance] = start + seconds
            self.slices.append(Slice(instance, name, start, start + seconds))
        return start + seconds

    def scores_together(self, stages: Sequence[Stage], stage: Stage) -> bool:
        """Never without a mapping: a plan of several roles has no costs then."""
        return self._mapped is not None and self._mapped.fuses(stages, stage)

    def compute_together(self, stages: Sequence[Stage], samples: Sequence[Sample]) -> None:
        """The pipelines of all roles as one call, once the roles are on the device."""
        assert self._mapped is not None
        seconds = self._mapped.passes_s(stages, samples)
        seconds += sum(self._mapped.onload_s(stage) for stage in stages)
        end = self._run_on_all(stages[0].name, seconds)
        for stage in stages:
            share = seconds / len(stages)
            self._push(end, self._computed(stage, samples, seconds=share))
        self._active.clear()

    def infer(self, stage: Stage, instance: int, samples: Sequence[Sample]) -> None:
        """A forward-only stage on one instance, to which samples of other instances move."""
        assert self._servers[instance].is_empty, "a forward pass concurrent with unfinished samples"
        seconds = self._pass_s(stage, samples, [instance])
        for sample in samples:
            sample.rank = instance
        event = self._computed(stage, samples, instance, seconds)
        self._serve(instance, stage.name, seconds, event)

    def compare(self, stage: UpdateStage, samples: Sequence[Sample]) -> None:
        """One group's pass in a step costs nothing here."""
        self._push(self.clock.now(), Compared({}))

    def train_early(self, stage: UpdateStage, instance: int, samples: Sequence[Sample]) -> None:
        """A part of an update on one instance, which first changes from generation to training.

        The others do so at the barrier, in the time of all.
        """
        if instance == TRAINING_POOL:
            seconds = self.costs.train_token_s * sum(sample.tokens for sample in samples)
            ids = tuple(sample.id for sample in samples)
            self._early.update(ids)
            end = self._take_pool(_TRAINER, seconds)
            self._push(end, EarlyTrained(stage.name, instance, ids, seconds))
            return
        assert self._servers[instance].is_empty, "training beside unfinished samples"
        per_token = self.costs.train_token_s * self.num_instances
        seconds = per_token * sum(sample.tokens for sample in samples)
        for sample in samples:
            sample.rank = instance
        ids = tuple(sample.id for sample in samples)
        self._early.update(ids)
        event = EarlyTrained(stage.name, instance, ids, seconds)
        if instance not in self._training:
            seconds += self.costs.train_switch_s
        self._training.add(instance)
        self._serve(instance, EARLY_BACKWARD, seconds, event)

    def _computed(
        self,
        stage: Stage,
        samples: Sequence[Sample],
        instance: int | None = None,
        seconds: float = 0.0,
    ) -> Computed:
        """Rewards are all 0: they do not matter here."""
        scalars: dict[str, tuple[Scalar, ...]] = {
            name: ("ok" if name.endswith("_status") else 0.0,) * len(samples)
            for name in stage.scalars
        }
        ids = tuple(sample.id for sample in samples)
        tensors = tuple(name for name in stage.outputs if name not in scalars)
        return Computed(stage.name, ids, scalars, tensors, instance, seconds)

    def wait(self) -> list[Event]:
        """The next event."""
        if not self._pending:
            raise RuntimeError("nothing is in flight")
        when, _, event = heapq.heappop(self._pending)
        self._clock.advance_to(max(when, self.clock.now()))
        return [event]

    def fuses(self, stages: Sequence[UpdateStage], stage: UpdateStage) -> bool:
        """As `scores_together`."""
        return self.scores_together(stages, stage)

    def update(self, updates: Sequence[tuple[UpdateStage, Sequence[Sample]]]) -> None:
        """Takes `train_token_s` a token of the batch, without those that were trained early.

        Under a mapping it takes what the roles' layouts take. Updates of other pools may run.
        """
        (stage, samples), stages = updates[0], [stage for stage, _ in updates]
        in_flight = (isinstance(event, UpdateDone | Replied) for _, _, event in self._pending)
        assert self.separate or all(in_flight), "an update while calls are in flight"
        late = [sample for sample in samples if sample.id not in self._early]
        self._early.clear()
        start, pool = self.clock.now(), self.pool(stage)
        self._active.clear()
        if self._mapped is not None:
            seconds = self._mapped.update_s(stages, late)
        else:
            seconds = self.costs.train_token_s * sum(sample.tokens for sample in late)
        if self.separate:
            end = self._take_pool(_TRAINER, seconds)
            self._num_updates += 1
        elif self._mapped is not None and pool != self._mapped.home:
            end = self._take_pool(pool, seconds)
        else:
            end = start + seconds
            for instance in range(self.num_instances):
                self.slices.append(Slice(instance, stage.name, start, end))
            roles = {stage.role for stage in stages}
            self._num_updates += self._mapped is None or ACTOR in roles
        for stage in stages:
            self._push(end, UpdateDone(stage.name, {}))

    def _take_pool(self, pool: str, seconds: float) -> float:
        """When a separate pool ends this work, which follows its earlier calls."""
        start = max(self.clock.now(), self._pool_free_at.get(pool, 0.0))
        self._pool_free_at[pool] = start + seconds
        return start + seconds

    def release(self, ids: Sequence[SampleId]) -> None:
        """Environments of these samples reply no more; nothing else is stored."""
        gone = {*ids}
        if self.conversations is not None:
            self._pending = [
                entry
                for entry in self._pending
                if not isinstance(entry[2], Replied) or gone.isdisjoint(entry[2].ids)
            ]
            heapq.heapify(self._pending)

    def _serve(self, instance: int, name: str, seconds: float, event: Event | None = None) -> float:
        """Keep an instance busy; gives when the driver knows of the end."""
        start = max(self.clock.now(), self._free_at[instance])
        end = self._free_at[instance] = start + seconds
        self.slices.append(Slice(instance, name, start, end))
        known = end + self.costs.round_trip_s
        if event is not None:
            self._push(known, event)
        return known

    def _push(self, when: float, event: Event) -> None:
        self._num_calls += 1
        heapq.heappush(self._pending, (when, self._num_calls, event))
