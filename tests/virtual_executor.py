"""A virtual executor: instances, ranks and phases with random latencies under a virtual clock."""

import copy
import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hybridrl.flow.clock import VirtualClock
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Advanced,
    Answer,
    Command,
    Computed,
    CopyTokens,
    EarlyTrained,
    EpisodeReply,
    Event,
    Finished,
    Park,
    Parked,
    Phase,
    Prepared,
    Replied,
    Resume,
    SamplesRead,
    Scope,
    Submit,
    TargetsLoaded,
    TurnEnded,
    UpdateDone,
    WeightsReady,
    WorkerDied,
)
from hybridrl.flow.graph import ComputeStage, MapStage, Stage, StageMethod, UpdateStage
from hybridrl.flow.sample import (
    NO_VERSION,
    OUT_OF_TOKENS,
    Sample,
    SampleId,
    TokenSpan,
)
from hybridrl.layout.wide import wide_instances


class VirtualExecutor:
    """One rank per instance; what a sample is depends on its id alone, when it is made on `seed`.

    Holds callers to the seam's rules: phases, one call per instance, nothing in flight at a
    whole-group call, one update per pool. No sample is used after its release or where it is not,
    or moves while something runs on it. Parked samples are resumed once. `length_of` gives response
    tokens, `reward_of` (reward, status), `finish_of` how it ends. `deaths` maps the number of a
    `wait` to the instance that dies then. A sample whose reward `hangs` takes as long as all else
    together. `outputs_of` gives the fields that the engine and the roles make, by id and name, in
    place of drawn ones. `map` computes with them for real. With `cuts` a response ends at its
    `max_new_tokens`, and `length_of` may change with `version`. `widths` are the numbers of
    instances that may be one. `turns_of` gives the response's lengths after each turn and each
    reply in turn (odd entries end replies); the last is `length_of`.
    """

    separate = False

    steady: Any = UpdateDone | WeightsReady | Prepared
    """Nobody dies while one of these is to come."""

    def __init__(
        self,
        num_instances: int = 2,
        seed: int = 0,
        length_of: Callable[[SampleId], int] | None = None,
        reward_of: Callable[[SampleId], tuple[float, str]] | None = None,
        finish_of: Callable[[SampleId], str] | None = None,
        hangs: Callable[[SampleId], bool] | None = None,
        deaths: dict[int, int] | None = None,
        scopes: dict[str, Scope] | None = None,
        outputs_of: Callable[[SampleId, str], Any] | None = None,
        cuts: bool = False,
        widths: Sequence[int] = (),
        turns_of: Callable[[SampleId], Sequence[int]] | None = None,
    ) -> None:
        self.turns_of = turns_of
        self.more_tensors: Sequence[str] = ()  # that the engine makes, of `outputs_of`
        self._rests: dict[SampleId, int] = {}
        self._held: dict[SampleId, int] = {}  # waits for a reply: tokens that are left
        self._stops: dict[SampleId, list[int]] = {}  # of a conversation that goes on
        self._num_stops: dict[SampleId, int] = {}
        self.num_answered = Counter[SampleId]()
        self.calls: list[tuple[int, tuple[Command, ...], int]] = []
        self.clock = VirtualClock()
        self.num_instances = num_instances
        self.length_of = length_of or (lambda id: random.Random(f"{id} length").randrange(0, 20))
        self.reward_of = reward_of or (
            lambda id: (float(random.Random(f"{id} reward").randrange(0, 2)), "ok")
        )
        self.finish_of = finish_of or (lambda id: "stop")
        self.hangs = hangs or (lambda id: False)
        self.deaths = deaths or {}
        self.scopes = scopes or {}  # by role, where it is not the method's
        self.outputs_of = outputs_of
        self.cuts = cuts
        self._lengths: dict[SampleId, tuple[int, bool]] = {}  # tokens, and whether cut
        self.tensors: dict[SampleId, dict[str, Any]] = {}
        self.prompts: dict[SampleId, Any] = {}
        self.submits: list[tuple[int, Submit]] = []
        self.resumes: list[tuple[int, SampleId]] = []
        self.infers: list[tuple[str, int, tuple[SampleId, ...]]] = []
        self.parks_with_kv: list[bool] = []
        self.finish_order: list[SampleId] = []
        self.updates: list[tuple[str, list[tuple[SampleId, dict[str, Any]]]]] = []
        self.entered: list[Phase] = []
        self.released: list[SampleId] = []
        # By update: samples whose gradient is there or on its way, with the instance and the fields
        # that it read; and by instance, whether it has left GENERATE.
        self.early: dict[str, dict[SampleId, tuple[int, dict[str, Any]]]] = {}
        self.gone_training: set[int] = set()
        self.num_early = 0
        self.training: dict[str, str] = {}  # pools of updates, by stage
        self.most_updates = 0  # at a time
        self.fuses_updates = False
        self.calls_of_updates: list[list[str]] = []
        self.fuses_scores = False
        self.calls_of_scores: list[list[str]] = []
        self.version = 0
        self.stale_resumes = self.num_moved = self.num_moved_open = 0
        self.alive = set(range(num_instances))
        self._random = random.Random(seed)
        self._pending: list[tuple[float, int, Event]] = []
        self._num_calls = self._num_waits = 0
        self._table = wide_instances(num_instances, widths)
        numbers = [*range(num_instances), *self._table]
        self._left: dict[int, dict[SampleId, int]] = {number: {} for number in numbers}
        self.widened: list[SampleId] = []
        self._where: dict[SampleId, int] = {}
        self._spans: dict[SampleId, list[TokenSpan]] = {}
        self.loses: random.Random | None = None
        """Says when a sample loses its keys and values, which would have stayed."""
        self._recomputed = set[SampleId]()
        self._busy: set[int] = set()
        self._on: Counter[SampleId] = Counter()
        self._arriving: set[SampleId] = set()
        self.parked: set[SampleId] = set()
        self.most_held = [0] * len(numbers)
        self.judged: list[tuple[SampleId, ...]] = []
        self._unread: dict[tuple[SampleId, ...], list[Computed]] = {}

    @property
    def instances(self) -> list[int]:
        return sorted(self.alive)

    @property
    def wide(self) -> dict[int, tuple[int, ...]]:
        return self._table

    def _members(self, instance: int) -> tuple[int, ...]:
        return self._table.get(instance, (instance,))

    def instance_of(self, rank: int) -> int:
        return rank

    def scope(self, stage: Stage) -> Scope:
        usual = {StageMethod.SCORE: Scope.RANK, StageMethod.VALUES: Scope.WORLD}
        if isinstance(stage, MapStage):
            return Scope.RANK
        return self.scopes.get(stage.role) or usual.get(stage.method, Scope.INSTANCE)

    def pool(self, stage: Stage) -> str:
        return "critic" if self.scopes.get(stage.role) is Scope.POOL else "actor"

    def sync_weights(self) -> None:
        self.early.clear()
        self._change(Phase.GENERATE, WeightsReady(self.version))

    def prepare(self, places: Sequence[int], phase: Phase) -> None:
        assert set(places) == self.alive
        assert phase is Phase.TRAIN
        self._change(phase, Prepared(tuple(places), phase))

    def _change(self, phase: Phase, event: Event) -> None:
        assert not self._working(), "a phase change while calls are in flight"
        assert not any(self._left.values()), "a phase change while samples are unfinished"
        self.entered.append(phase)
        self.gone_training.clear()
        self._num_calls += 1
        heapq.heappush(self._pending, (self.clock.now() + 1.0, self._num_calls, event))

    def advance(
        self,
        instance: int,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> None:
        assert self._is_in(Phase.GENERATE)
        members = self._members(instance)
        assert self.gone_training.isdisjoint(members), "it has no generation weights any more"
        if len(members) > 1:
            assert not any(self._left[i] for i in members), "a member decodes samples of its own"
        self._occupy(instance)
        left = self._left[instance]
        parked: list[Parked] = []
        lost: list[SampleId] = []
        ended: list[SampleId] = []
        for command in commands:
            self._obey(instance, command, parked, lost, ended)
        going = [id for id in left if id not in self._held and id not in ended]
        assert commands or going, "a call that does nothing"
        self.calls.append((instance, tuple(commands), num_decode_steps))
        self.most_held[instance] = max(self.most_held[instance], len(left))
        done, turns = ended, []
        for id in going:
            steps = min(num_decode_steps, self._left_of_turn(id, left[id]))
            if self._rests.get(id):
                steps = min(steps, self._rests[id] - self._num_tokens(id, left))
            self._grow(id, steps, self._version_on(instance))
            left[id] -= steps
            if self.turns_of is None:
                done += [id] if not left[id] else []
            elif not self._left_of_turn(id, left[id]):
                self._held[id] = left[id]
                turns.append(self._turn(id))
        unfinished = [id for id in going if left[id]]
        rested = [id for id in unfinished if self._rests.get(id) == self._num_tokens(id, left)]
        if rested:
            parked.append(self._park(instance, rested, 1))
        for id in done:
            del left[id]
        self._random.shuffle(done)
        self.finish_order += done
        # A finished sample stays on one rank of the instance.
        finished = tuple(
            self._finish(id, members[(id.prompt + id.k) % len(members)]) for id in done
        )
        running = sum(id not in self._held for id in left)
        advanced = (instance, running, finished, tuple(parked), tuple(lost))
        wanted = any(isinstance(command, CopyTokens) for command in commands)
        copies = (self._copies(left),) if wanted else ()
        self._push(Advanced(*advanced, turns=tuple(turns), copies=copies))

    def _copies(self, left: dict[SampleId, int]) -> Parked:
        """What `take_up` needs of each of these samples."""
        state = {id: self._snapshot(id, num) for id, num in left.items()}
        tokens = tuple(3 + self._lengths[id][0] - num for id, num in left.items())
        return Parked(tuple(state), tokens, self.version, state)

    def _snapshot(self, id: SampleId, left: int) -> Any:
        tables = [t.get(id) for t in (self._lengths, self._stops, self._num_stops)]
        return copy.deepcopy((left, self._spans[id], id in self._held, tables))

    def snapshot(self, id: SampleId, parked: Parked) -> Any:
        """What `take_up` needs of a sample that is parked, or was copied."""
        if isinstance(parked.state, dict):
            return parked.state[id]
        _, left = parked.state
        return self._snapshot(id, left[id])

    def take_up(self, copies: dict[SampleId, Any]) -> tuple[int, dict[SampleId, int]]:
        """The run continues here with these copies; gives what they resume from."""
        for id, (num, spans, waits, tables) in copies.items():
            self._spans[id] = [*spans]
            self._lengths[id] = tables[0]
            if self.turns_of is not None:
                self._stops[id], self._num_stops[id] = [*tables[1]], tables[2]
            self.parked.add(id)
            if waits:
                self._held[id] = num
                self._reply(self._turn(id))
        return min(self.alive), {id: num for id, (num, *_) in copies.items()}

    def _num_tokens(self, id: SampleId, left: dict[SampleId, int]) -> int:
        return self._lengths[id][0] - left[id]

    def _park(self, instance: int, ids: Sequence[SampleId], width: int) -> Parked:
        left = self._left[instance]
        state = {id: left.pop(id) for id in ids if id in left}
        self.parked |= state.keys()
        tokens = tuple(3 + self._lengths[id][0] - n for id, n in state.items())
        return Parked(tuple(state), tokens, self.version, (instance, state), width)

    def replay_episodes(self) -> None:
        """The run continues elsewhere: what waits is replayed, and answered once more."""
        self._pending = [entry for entry in self._pending if not isinstance(entry[2], Replied)]
        heapq.heapify(self._pending)
        for id in self._held:
            self._reply(self._turn(id))

    def _end_episode(self, id: SampleId) -> None:
        """No reply of it comes any more."""
        self._held.pop(id, None)
        old = [e for e in self._pending if isinstance(e[2], Replied) and e[2].replies[0].id == id]
        self._pending = [entry for entry in self._pending if entry not in old]
        heapq.heapify(self._pending)

    def _left_of_turn(self, id: SampleId, left: int) -> int:
        """Tokens of the present turn that are to come, of `left` tokens of the response."""
        if self.turns_of is None:
            return left
        return self._stops[id][0] - (self._lengths[id][0] - left)

    def _turn(self, id: SampleId) -> TurnEnded:
        number = self._num_stops[id] - len(self._stops[id])
        assert number % 2 == 0
        return TurnEnded(id, (), f"turn {number // 2}", "stop", self._stops[id][0])

    def _reply(self, turn: TurnEnded) -> None:
        """The environment knows of a turn, and replies in its time."""
        stops = self._stops[turn.id]
        reply = EpisodeReply(turn.id, None, "stop", (1.0,), {"num_turns": turn.text})
        if len(stops) > 1:
            reply = EpisodeReply(turn.id, (0,) * (stops[1] - stops[0]))
        seconds = self._random.expovariate(1.0)
        self._num_calls += 1
        event = self.clock.now() + seconds, self._num_calls, Replied((reply,), (seconds,))
        heapq.heappush(self._pending, event)

    def _obey(
        self,
        instance: int,
        command: Command,
        parked: list[Parked],
        lost: list[SampleId],
        ended: list[SampleId],
    ) -> None:
        left = self._left[instance]
        if isinstance(command, Submit | Resume):
            self._rests |= dict.fromkeys(command.ids, 0)
            self._rests |= dict(zip(command.ids, command.rests_at, strict=False))
            self._recomputed -= {*command.ids}
            if isinstance(command, Resume) and command.recompute:
                self._recomputed |= {*command.ids}
        match command:
            case Submit():
                self.submits.append((instance, command))
                for id in command.ids:
                    assert id not in self._where, "made again though it lies somewhere"
                    self.prompts[id] = command.prompt
                    self.parked.discard(id)  # made anew: its keeper died before it arrived
                    self._spans[id] = []
                    self._end_episode(id)
                    left[id] = self._draw_length(id, command.sampling.max_new_tokens)
            case Park(ids=ids, with_kv=with_kv, width=width):
                self.parks_with_kv.append(with_kv)
                parked.append(self._park(instance, ids, width))
            case Answer(replies=replies):
                for reply in replies:
                    if reply.id in lost:
                        continue
                    assert reply.id in left, "answered where it is not"
                    assert self._held.pop(reply.id) == left[reply.id], "it does not wait"
                    self.num_answered[reply.id] += 1
                    self._stops[reply.id].pop(0)
                    if reply.tokens is None:
                        assert left[reply.id] == 0, "an episode that ends too soon"
                        ended.append(reply.id)
                        continue
                    self._grow(reply.id, len(reply.tokens))
                    left[reply.id] -= len(reply.tokens)
                    self._stops[reply.id].pop(0)
            case Resume(ids=ids, parked=before):
                owner, state = before.state
                assert set(ids) <= set(before.ids)
                assert before.width == len(self._members(instance)), "parked for another width"
                self.stale_resumes += before.version != self.version
                for id in ids:
                    self.parked.remove(id)
                    if owner in self.alive:
                        self.resumes.append((instance, id))
                        self.num_moved_open += id in self._held
                        self.widened += [id] if before.width > 1 else []
                        left[id] = state[id]
                    else:
                        lost.append(id)

    def _is_in(self, phase: Phase) -> bool:
        """Whether all ranks are in a phase."""
        return self.entered[-1:] == [phase]

    def _version_on(self, instance: int) -> int:
        """The version of an instance's weights."""
        return self.version

    def _grow(self, id: SampleId, num: int, version: int = NO_VERSION) -> None:
        """So many more tokens, under a version or of the environment."""
        if not num:
            return
        trained = version != NO_VERSION
        *before, last = self._spans[id] or [TokenSpan(0, 0, version, trained)]
        again = trained and self._computes_again(id, version)
        if (last.version, last.trained) != (version, trained) or again:
            last, before = TokenSpan(last.stop, last.stop, version, trained, again), [*before, last]
        self._spans[id] = [*before, replace(last, stop=last.stop + num)]

    def _computes_again(self, id: SampleId, version: int) -> bool:
        """Whether a version computes what others have: as told, or where a cache is lost."""
        anew = id in self._recomputed or (self.loses is not None and self.loses.random() < 0.2)
        self._recomputed.discard(id)
        versions = set[int]()
        for span in self._spans[id]:
            versions = set() if span.recomputed else versions
            versions |= {span.version} if span.trained else set()
        return anew and bool(versions - {version})

    def load_targets(self, stage: Stage, ids: Sequence[SampleId], prompts: Sequence[Any]) -> None:
        self.prompts.update(zip(ids, prompts, strict=True))
        ranks = sorted(self.alive)
        for i, rank in enumerate(ranks):
            mine = ids[i :: len(ranks)]
            for id in mine:
                length = self._draw_length(id)
                self._spans[id] = [TokenSpan(0, length, -1)] if length else []
            if mine:
                self._push(TargetsLoaded(stage.name, tuple(self._finish(id, rank) for id in mine)))

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        assert self.scope(stage) is not Scope.INSTANCE
        assert self._arriving.isdisjoint(s.id for s in samples), "started before it has arrived"
        if self.scope(stage) is Scope.POOL:
            self._compute(stage, samples, None, None)
            return
        if self.scope(stage) is Scope.DRIVER:
            self._judge(stage, samples)
            return
        for rank in sorted(self.alive):
            self._compute(stage, [s for s in samples if s.rank == rank], rank, None)

    def infer(self, stage: Stage, instance: int, samples: Sequence[Sample]) -> None:
        assert self.scope(stage) is Scope.INSTANCE
        assert samples
        assert not self._left[instance], "a forward pass on an instance that generates"
        assert stage.role != "actor" or instance not in self.gone_training, "no generation weights"
        self._occupy(instance)
        self._move(instance, samples)
        self.infers.append((stage.name, instance, tuple(s.id for s in samples)))
        self._compute(stage, samples, instance, instance)

    def _move(self, instance: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            if sample.rank != instance:
                assert not self._on[sample.id], "moved while something runs on it"
                sample.rank = self._where[sample.id] = instance
                self._arriving.add(sample.id)
                self.num_moved += 1

    def train_early(self, stage: Stage, instance: int, samples: Sequence[Sample]) -> None:
        assert self.entered[-1:] == [Phase.GENERATE]
        assert samples
        assert not self._left[instance], "training on an instance that generates"
        self._occupy(instance)
        self._move(instance, samples)
        self.gone_training.add(instance)
        early = self.early.setdefault(stage.name, {})
        for sample in samples:
            assert sample.id not in early, "trained twice"
            assert self._where[sample.id] == instance, "not where it lies"
            early[sample.id] = instance, {x: self._field(sample, x) for x in stage.inputs}
        self._on.update(sample.id for sample in samples)
        ids = tuple(sample.id for sample in samples)
        self._push(EarlyTrained(stage.name, instance, ids, 0.5), 3.0)

    def _compute(
        self, stage: Stage, samples: Sequence[Sample], rank: int | None, instance: int | None
    ) -> None:
        for s in samples:
            assert self._where[s.id] == s.rank, "not where it lies"
            assert rank in (None, s.rank), "not where it lies"
        computed = self._run(stage, samples, instance)
        self._on.update(computed.ids)
        hangs = stage.method is StageMethod.SCORE and any(self.hangs(s.id) for s in samples)
        self._push(computed, 1000.0 if hangs else 1.0)

    def _judge(self, stage: Stage, samples: Sequence[Sample]) -> None:
        """Results of single samples, or of groups, in any order, once all samples are read."""
        units: dict[Any, list[Sample]] = {}
        for sample in samples:
            whole = isinstance(stage, ComputeStage) and stage.whole_groups
            units.setdefault(sample.id.prompt if whole else sample.id, []).append(sample)
        ids = tuple(sample.id for sample in samples)
        self._on.update(ids)
        self.judged += [tuple(sample.id for sample in unit) for unit in units.values()]
        self._unread[ids] = [self._run(stage, unit, None) for unit in units.values()]
        self._push(SamplesRead(stage.name, ids))

    def wait(self) -> list[Event]:
        trains = any(isinstance(event, self.steady) for _, _, event in self._pending)
        self._num_waits += not trains  # nobody dies in training, or while phases change
        dying = self.deaths.get(self._num_waits)
        if dying in self.alive and not trains:
            return self._die(dying)
        if not self._pending:
            raise RuntimeError("nothing is in flight")
        when, _, event = heapq.heappop(self._pending)
        self.clock.advance_to(max(when, self.clock.now()))
        if isinstance(event, Advanced):
            for turn in event.turns:
                self._reply(turn)
        if isinstance(event, Advanced | EarlyTrained):
            self._busy -= {event.instance, *self._members(event.instance)}
        if isinstance(event, EarlyTrained):
            self._on.subtract(event.ids)
            self._arriving.difference_update(event.ids)
        if isinstance(event, SamplesRead):
            self._on.subtract(event.ids)
            for computed in self._unread.pop(event.ids):
                self._push(computed, 10.0)
        elif isinstance(event, Computed) and self.scopes.get(event.stage) is not Scope.DRIVER:
            self._on.subtract(event.ids)
            self._arriving.difference_update(event.ids)
            if event.instance is not None:
                self._busy.remove(event.instance)
        return [event]

    def _die(self, instance: int) -> list[Event]:
        self.alive.remove(instance)
        # Wide instances die with it, and their other members are free.
        gone_with_it = {n for n in self._left if instance in self._members(n)}
        for number in gone_with_it:
            if number in self._busy and len(self._members(number)) > 1:
                self._busy -= set(self._members(number))
            self._busy.discard(number)
            self._left[number].clear()
        for early in self.early.values():
            for id in [id for id, (where, _) in early.items() if where == instance]:
                del early[id]  # its gradient is gone
        for id in [id for id, where in self._where.items() if where == instance]:
            del self._where[id], self.tensors[id]
            self._on[id] = 0
            self._arriving.discard(id)
        kept = []
        for when, number, event in self._pending:
            gone = False
            match event:
                case Advanced(instance=who):
                    gone = who in gone_with_it
                    if gone:  # what it parked and finished in that call has reached nobody
                        for parked in event.parked:
                            self.parked -= set(parked.ids)
                        for finished in event.finished:
                            self._where.pop(finished.id, None)
                            self.tensors.pop(finished.id, None)
                case EarlyTrained():
                    gone = event.instance == instance
                case Computed(ids=ids) if event.instance is None:
                    event = self._of_those_that_are(event)
                    gone = bool(ids) and not event.ids
                case Computed():
                    gone = event.instance == instance
                case TargetsLoaded(finished=finished):
                    gone = any(f.rank == instance for f in finished)
            if not gone:
                kept.append((when, number, event))
        self._pending = kept
        heapq.heapify(self._pending)
        return [WorkerDied(instance)]

    def _of_those_that_are(self, event: Computed) -> Computed:
        """Without the samples that died meanwhile."""
        kept = [i for i, id in enumerate(event.ids) if id in self._where]
        scalars = {name: tuple(values[i] for i in kept) for name, values in event.scalars.items()}
        return replace(event, ids=tuple(event.ids[i] for i in kept), scalars=scalars)

    def scores_together(self, stages: Sequence[Stage], stage: Stage) -> bool:
        return self.fuses_scores and stage.role not in {other.role for other in stages}

    def compute_together(self, stages: Sequence[Stage], samples: Sequence[Sample]) -> None:
        assert len(stages) > 1
        assert {self.scope(stage) for stage in stages} == {Scope.WORLD}
        self.calls_of_scores.append([stage.name for stage in stages])
        for stage in stages:
            self.compute(stage, samples)

    def fuses(self, stages: Sequence[UpdateStage], stage: UpdateStage) -> bool:
        return self.fuses_updates and stage.role not in {other.role for other in stages}

    def update(self, updates: Sequence[tuple[UpdateStage, Sequence[Sample]]]) -> None:
        self.calls_of_updates.append([stage.name for stage, _ in updates])
        flying = {e.stage for _, _, e in self._pending if isinstance(e, UpdateDone)}
        for stage, samples in updates:
            assert self.pool(stage) == self.pool(updates[0][0])
            assert self.pool(stage) not in {self.training[name] for name in flying}
            self._update(stage, samples)

    def _update(self, stage: UpdateStage, samples: Sequence[Sample]) -> None:
        assert self._is_in(Phase.TRAIN)
        flying = [e for _, _, e in self._pending if not isinstance(e, Computed) or e.ids]
        flying = [e for e in flying if not isinstance(e, Replied)]
        assert self.separate or all(isinstance(event, UpdateDone) for event in flying)
        # Every sample counts once, early or late, with the same fields.
        early = self.early.pop(stage.name, {})
        assert all(self._where[s.id] == s.rank for s in samples if s.id not in early)
        seen = [
            (
                s.id,
                {x: self._field(s, x) for x in stage.inputs}
                if s.id in self._where
                else early[s.id][1],
            )
            for s in samples
        ]
        assert early.keys() <= {id for id, _ in seen}, "a sample that is not of the batch"
        for id, fields in seen:
            assert id not in early or early[id][1] == fields, id
        self.num_early += len(early)
        self.updates.append((stage.name, seen))
        self.version += 1
        self.training[stage.name] = self.pool(stage)
        updates = sum(isinstance(event, UpdateDone) for event in flying)
        self.most_updates = max(self.most_updates, 1 + updates)
        self._push(UpdateDone(stage.name, {"loss": 0.5, "num_samples": float(len(samples))}))

    def release(self, ids: Sequence[SampleId]) -> None:
        self.released += ids
        for id in ids:
            self._end_episode(id)
            self.tensors.pop(id, None)
            self._where.pop(id, None)

    def _occupy(self, instance: int) -> None:
        together = {instance, *self._members(instance)}
        assert set(self._members(instance)) <= self.alive, "a call to the dead"
        assert self._busy.isdisjoint(together), "two calls in flight on one instance"
        holding = [n for n, members in self._table.items() if self._left[n] and instance in members]
        assert not holding, "a call to a member of a wide instance"
        self._busy |= together

    def _working(self) -> bool:
        """Whether calls are in flight, besides answers without samples."""
        events = [event for _, _, event in self._pending if not isinstance(event, Replied)]
        return any(not isinstance(e, Computed) or bool(e.ids) for e in events)

    def _push(self, event: Event, most: float = 1.0) -> None:
        self._num_calls += 1
        when = self.clock.now() + most * self._random.random()
        heapq.heappush(self._pending, (when, self._num_calls, event))

    def _finish(self, id: SampleId, rank: int) -> Finished:
        length, is_cut = self._lengths[id]
        draw = random.Random(f"{id} tokens")
        self._where[id] = rank
        self.tensors[id] = {
            "tokens": [draw.randrange(50) for _ in range(3 + length)],
            "log_probs": [-draw.random() for _ in range(length)],
        }
        if self.outputs_of:
            self.tensors[id] = {name: self.outputs_of(id, name) for name in self.tensors[id]}
            self.tensors[id] |= {name: self.outputs_of(id, name) for name in self.more_tensors}
        finish = "length" if is_cut else self.finish_of(id)
        spans, more = tuple(self._spans[id]), tuple(self.more_tensors)
        scalars = {} if self.turns_of is None else {OUT_OF_TOKENS: int(is_cut)}
        return Finished(id, rank, 3, length, finish, spans, more, scalars)

    def _draw_length(self, id: SampleId, most: int | None = None) -> int:
        length = self.length_of(id)
        is_cut = self.cuts and most is not None and length > most
        self._lengths[id] = most if is_cut else length, is_cut
        if self.turns_of is not None:
            stops = [*self.turns_of(id)]
            if is_cut:  # within a turn, or since a reply does not fit
                kept = [stop for stop in stops if stop < most]
                stops = kept if len(kept) % 2 else [*kept, most]
                self._lengths[id] = stops[-1], is_cut
            self._stops[id], self._num_stops[id] = stops, len(stops)
        return self._lengths[id][0]

    def _field(self, sample: Sample, name: str) -> Any:
        if name in sample.scalars:
            return sample.scalars[name]
        assert name in sample.tensors
        return self.tensors[sample.id][name]

    def _run(self, stage: Stage, samples: Sequence[Sample], instance: int | None) -> Computed:
        scalars: dict[str, list[Any]] = {name: [] for name in stage.scalars}
        for sample in samples:
            for name, value in self._outputs(stage, sample).items():
                if name in scalars:
                    scalars[name].append(value)
                else:
                    self.tensors[sample.id][name] = value
        ids = tuple(sample.id for sample in samples)
        tensors = tuple(name for name in stage.outputs if name not in scalars)
        return Computed(
            stage.name, ids, {k: tuple(v) for k, v in scalars.items()}, tensors, instance
        )

    def _outputs(self, stage: Stage, sample: Sample) -> dict[str, Any]:
        inputs = [self._field(sample, name) for name in stage.inputs]
        if isinstance(stage, MapStage):
            return self._map(stage, sample, inputs)
        if self.scope(stage) is Scope.WORLD:
            assert self._is_in(Phase.TRAIN), "the training shards are not there"
        if stage.role == "actor" and self.scope(stage) is Scope.INSTANCE:
            assert self._is_in(Phase.GENERATE), "the generation weights are not there"
        if self.outputs_of:
            return {name: self.outputs_of(sample.id, name) for name in stage.outputs}
        if stage.method is StageMethod.SCORE:
            value, status = stage.scalars
            return dict(zip((value, status), self.reward_of(sample.id), strict=True))
        draw = random.Random(f"{sample.id} {stage.name}")
        return {x: [-draw.random() for _ in range(sample.response_tokens)] for x in stage.outputs}

    def _map(self, stage: MapStage, sample: Sample, inputs: list[Any]) -> dict[str, Any]:
        values = stage.function(*inputs)
        values = values if isinstance(values, tuple) else (values,)
        return dict(zip(stage.returns, values, strict=True))


@pytest.fixture(scope="session")
def virtual_executor() -> type[VirtualExecutor]:
    """The class, to be made with a test's own lengths, rewards and latencies."""
    return VirtualExecutor
