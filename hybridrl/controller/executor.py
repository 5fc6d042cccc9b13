"""The executor of real runs: worker groups and wall time behind the schedules' seam."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hybridrl.config import Config, Engine, RewardKind
from hybridrl.controller.worker_group import WorkerGroup
from hybridrl.engines.train.balance import balance
from hybridrl.flow.clock import Clock, WallClock
from hybridrl.flow.executor import Advanced, Command, Computed, Event, Phase, Scope
from hybridrl.flow.graph import Graph, Kind, Stage
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.workers.rank import Published
from hybridrl.workers.training import UpdateShare

# Moving samples costs a few milliseconds a step; below this surplus of the fullest rank's tokens
# over the mean they train where they were made.
_TOLERATED_IMBALANCE = 0.02


@dataclass(slots=True)
class _Infer:
    """A forward pass that gathers its samples: `waiting` sources have not sent theirs.

    By receiving rank: the samples that arrive, and references of what they are in.
    """

    stage: Stage
    instance: int
    samples: Sequence[Sample]
    waiting: int = 0
    arriving: dict[int, list[SampleId]] = field(default_factory=lambda: defaultdict(list))
    parcels: dict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))


class RayExecutor:
    """`hybridrl.flow.executor.Executor` over a `WorkerGroup`.

    `on_switch` hears of every weight switch: one accounting per rank. An instance of several ranks
    gets every call on all of them; their answers become one event. A rank that dies ends the run
    (`WorkerError`), since its training shard is gone, so there is never a `Died`.
    """

    def __init__(
        self,
        group: WorkerGroup,
        config: Config,
        on_switch: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self.group, self.config, self.on_switch = group, config, on_switch
        self.clock: Clock = WallClock()
        self.version = -1
        self._instance_of = {
            rank: number for number, ranks in enumerate(group.instances) for rank in ranks
        }
        # Calls in flight: the rank, and what becomes of the answer.
        self._pending: dict[Any, tuple[int, Callable[[Any], list[Event]]]] = {}
        self._answers: dict[int, list[Any]] = defaultdict(list)
        # Where a sample's tensors can be had without its rank: references by field.
        self._published: dict[SampleId, dict[str, Any]] = defaultdict(dict)

    @property
    def instances(self) -> Sequence[int]:
        """All generation instances."""
        return range(len(self.group.instances))

    def instance_of(self, rank: int) -> int:
        """The instance that a rank belongs to."""
        return self._instance_of[rank]

    def scope(self, stage: Stage) -> Scope:
        """Who takes part in a per-sample stage; see `scope_of`."""
        return scope_of(stage, self.config)

    def has_passes(self, graph: Graph) -> bool:
        """Whether samples of `graph` may move, since spare instances run forward passes."""
        stages = [stage for stage in graph.stages.values() if stage.kind is Kind.COMPUTE]
        passes = any(self.scope(stage) is Scope.INSTANCE for stage in stages)
        return passes and len(self.instances) > 1

    def enter(self, phase: Phase) -> None:
        """Bring every rank into `phase`."""
        answers = self.group.enter(phase)
        self.version = answers[0]["version"]
        reports = [answer["switch"] for answer in answers]
        if any(reports):
            self.on_switch(reports)

    def advance(self, instance: int, commands: Sequence[Command], num_decode_steps: int) -> None:
        """Start a bounded generation call on an instance."""
        calls = self.group.call_advance(instance, commands, num_decode_steps)
        for call, rank in calls.items():
            self._pending[call] = rank, self._advanced

    def place(self, stage: Stage, ids: Sequence[SampleId], prompts: Sequence[Any]) -> None:
        """Deal the dataset's targets to the ranks."""
        for rank in range(self.group.size):
            mine = slice(rank, None, self.group.size)
            if ids[mine]:
                call = self.group.call_place(rank, stage, tuple(ids[mine]), tuple(prompts[mine]))
                self._pending[call] = rank, _event

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        """Start a stage where the samples lie; if it needs the world, on the other ranks too."""
        by_rank: dict[int, list[Sample]] = defaultdict(list)
        for sample in samples:
            by_rank[sample.rank].append(sample)
        world = self.scope(stage) is Scope.WORLD
        start = self.group.call_compute if world else self.group.call_judge
        for rank in range(self.group.size) if world else sorted(by_rank):
            ids = tuple(sample.id for sample in by_rank[rank])
            fields = tuple(
                {x: sample.scalars[x] for x in stage.inputs if x in sample.scalars}
                for sample in by_rank[rank]
            )
            self._pending[start(rank, stage, ids, fields)] = rank, _event

    def infer(self, stage: Stage, instance: int, samples: Sequence[Sample]) -> None:
        """Have samples from elsewhere sent, each to one rank of the instance; then start.

        What their ranks have published is fetched as it is; only for the rest they are asked, and
        answer when their present call ends.
        """
        ranks = self.group.instances[instance]
        call = _Infer(stage, instance, samples)
        asked: dict[int, dict[int, list[SampleId]]] = {}
        for sample in samples:
            if sample.rank in ranks:
                continue
            receiver = ranks[(sample.id.prompt + sample.id.k) % len(ranks)]
            call.arriving[receiver].append(sample.id)
            known = self._published[sample.id]
            if known.keys() >= sample.tensors:
                call.parcels[receiver] += [known[name] for name in sorted(sample.tensors)]
            else:
                asked.setdefault(sample.rank, {}).setdefault(receiver, []).append(sample.id)
            sample.rank = receiver
        call.waiting = len(asked)
        for source, by_receiver in asked.items():
            sent = self.group.call_send(source, by_receiver)
            self._pending[sent] = source, partial(self._sent, call)
        if not asked:
            self._start(call)

    def _sent(self, call: _Infer, parcels: dict[int, list[Any]]) -> list[Event]:
        for receiver, some in parcels.items():
            call.parcels[receiver] += some
        call.waiting -= 1
        if not call.waiting:
            self._start(call)
        return []

    def _start(self, call: _Infer) -> None:
        for rank in self.group.instances[call.instance]:
            mine = [sample.id for sample in call.samples if sample.rank == rank]
            once = {id(reference): reference for reference in call.parcels[rank]}
            started = self.group.call_infer(
                rank, call.stage, call.instance, mine, call.arriving[rank], list(once.values())
            )
            self._pending[started] = rank, self._inferred

    def wait(self) -> list[Event]:
        """Events of the calls that have ended, at least one, in the order they were started."""
        if not self._pending:
            raise RuntimeError("nothing is in flight")
        events: list[Event] = []
        while not events:
            for reference in self.group.launcher.wait(list(self._pending)):
                rank, then = self._pending.pop(reference)
                events += then(self.group.take(rank, reference))
        return events

    def _all(self, answer: Any) -> list[Any]:
        """The answers of all ranks of an instance, once they are there; else none."""
        answers = self._answers[answer.instance]
        answers.append(answer)
        if len(answers) < len(self.group.instances[answer.instance]):
            return []
        return self._answers.pop(answer.instance)

    def _known(self, published: Published, ids: Sequence[SampleId], fields: Sequence[str]) -> None:
        if published.reference is not None:
            for sample in ids:
                self._published[sample] |= dict.fromkeys(fields, published.reference)

    def _advanced(self, published: Published) -> list[Event]:
        """One event for an instance: every rank's finished samples, every place's parked state."""
        answer: Advanced = published.event
        self._known(published, [f.id for f in answer.finished], ("tokens", "log_probs"))
        answers: list[Advanced] = self._all(answer)
        if not answers:
            return []
        finished = sorted((f for a in answers for f in a.finished), key=lambda f: f.id)
        parked = [
            replace(same[0], state={place: state for p in same for place, state in p.state.items()})
            for same in zip(*(a.parked for a in answers), strict=True)
        ]
        slowest = max((a.work for a in answers), key=lambda work: work.seconds)
        return [replace(answer, finished=tuple(finished), parked=tuple(parked), work=slowest)]

    def _inferred(self, published: Published) -> list[Event]:
        """One event for an instance: each rank has the results of its own samples."""
        answer: Computed = published.event
        self._known(published, answer.ids, answer.tensors)
        answers: list[Computed] = self._all(answer)
        if not answers:
            return []
        some = [a for a in answers if a.ids]
        names = some[0].scalars if some else {}
        return [
            replace(
                answer,
                ids=tuple(id for a in some for id in a.ids),
                scalars={name: tuple(x for a in some for x in a.scalars[name]) for name in names},
                seconds=max(a.seconds for a in answers),
            )
        ]

    def update(self, stage: Stage, samples: Sequence[Sample]) -> dict[str, float]:
        """Spread the samples by tokens, move those that must move, and train."""
        fields = dict(stage.options["fields"])
        atom = stage.options.get("atom", 1)
        ranks = assign_ranks(samples, self.group.size, atom, move=self.config.strict)
        parcels = self._move(samples, ranks)
        wanted = {
            sample.id: {
                field: float(sample.scalars[field])
                for field in fields.values()
                if field in sample.scalars
            }
            for sample in samples
        }
        versions = {s.id: min((x.version for x in s.spans), default=-1) for s in samples}
        num = stage.options["mini_batches"] or self.config.trainer.mini_batches
        atoms = -(-len(samples) // atom)
        bounds = [atoms * i // num * atom for i in range(num)] + [len(samples)]
        shares = []
        for rank in range(self.group.size):
            mini_batches = tuple(
                tuple(samples[i].id for i in range(a, b) if ranks[i] == rank)
                for a, b in itertools.pairwise(bounds)
                if a < b
            )
            mine = [id for ids in mini_batches for id in ids]
            scalars = {id: wanted[id] for id in mine}
            oldest = {id: versions[id] for id in mine}
            shares.append(UpdateShare(mini_batches, scalars, oldest, tuple(parcels[rank])))
        return self.group.update(stage, shares)

    def release(self, ids: Sequence[SampleId]) -> None:
        """Let the ranks forget samples."""
        for sample in ids:
            self._published.pop(sample, None)
        self.group.release(tuple(ids))

    def _move(self, samples: Sequence[Sample], ranks: Sequence[int]) -> list[list[Any]]:
        """Have samples sent to the ranks that train them; returns references by receiver.

        With all tensors that every one of them has: another update may read others than this one.
        """
        size = self.group.size
        moves: list[list[list[SampleId]]] = [[[] for _ in range(size)] for _ in range(size)]
        for sample, rank in zip(samples, ranks, strict=True):
            if sample.rank != rank:
                moves[sample.rank][rank].append(sample.id)
        incoming: list[list[Any]] = [[] for _ in range(size)]
        if any(ids for row in moves for ids in row):
            common = set.intersection(*(sample.tensors for sample in samples))
            tensors = tuple(sorted(common))
            sent = self.group.export([tuple(map(tuple, row)) for row in moves], tensors)
            for row in sent:
                for rank, parcel in enumerate(row):
                    if parcel is not None:
                        incoming[rank].append(parcel)
            for sample, rank in zip(samples, ranks, strict=True):
                if sample.rank != rank:
                    sample.rank = rank
                    sample.tensors &= common
        return incoming


def scope_of(stage: Stage, config: Config) -> Scope:
    """Who takes part in a per-sample stage.

    Old-policy log-probabilities use the native engine's weights, where these have the format that
    training computes in; else they need the training shards. vLLM's are packed for itself.
    """
    if stage.method == "map":
        return Scope.RANK
    if stage.method == "score":
        assert stage.role is not None
        neural = config.judge_of(stage.role).kind is RewardKind.model
        return Scope.INSTANCE if neural else Scope.RANK
    rollout = config.rollout
    lent = rollout.engine is Engine.native and rollout.dtype is config.model.compute_dtype
    if stage.method == "log_probs" and (stage.role != "actor" or lent):
        return Scope.INSTANCE
    return Scope.WORLD


def _event(answer: Event) -> list[Event]:
    return [answer]


def assign_ranks(
    samples: Sequence[Sample], num_ranks: int, atom: int = 1, move: bool = False
) -> list[int]:
    """Which rank trains which sample: where it lies if that is balanced, else by tokens.

    `atom` consecutive samples stay together. Depends on lengths and places only, never on time;
    with `move` on lengths alone, whatever lies where.
    """
    here = [sample.rank for sample in samples]
    loads = [0] * num_ranks
    for sample in samples:
        loads[sample.rank] += sample.tokens
    together = all(len(set(here[i : i + atom])) == 1 for i in range(0, len(here), atom))
    if not move and together and max(loads) <= (1 + _TOLERATED_IMBALANCE) * sum(loads) / num_ranks:
        return here
    atoms = [samples[i : i + atom] for i in range(0, len(samples), atom)]
    parts = balance([sum(s.tokens for s in group) for group in atoms], num_ranks)
    ranks = [0] * len(samples)
    for rank, part in enumerate(parts):
        for index in part:
            for i in range(index * atom, min((index + 1) * atom, len(samples))):
                ranks[i] = rank
    return ranks
