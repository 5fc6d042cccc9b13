"""A virtual executor whose instances have ranks of their own: pushes, loads, and one trainer."""

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from virtual_executor import VirtualExecutor

from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    TRAINING_POOL,
    Advanced,
    Command,
    Compared,
    Computed,
    EarlyTrained,
    Event,
    LoadWeights,
    Phase,
    Prepared,
    Replied,
    SamplesRead,
    Scope,
    UpdateDone,
    UpdateRefused,
    WeightsPushed,
    WeightsReady,
    WorkerDied,
)
from hybridrl.flow.graph import ComputeStage, Stage, StageMethod, UpdateStage
from hybridrl.flow.sample import Sample, SampleId


@dataclass(frozen=True, slots=True)
class Latencies:
    """The most seconds of a push, of a load, of an update; other calls take up to one second."""

    push: float = 1.0
    load: float = 1.0
    update: float = 1.0


class SeparateExecutor(VirtualExecutor):
    """As `VirtualExecutor`; models train and score in the pool `actor`, instances generate alone.

    An instance loads weights that are pushed and still kept, as the first command of a call, and
    unless `in_flight` while it has no unfinished sample. `passes` has what the pool computed:
    stage, version, ids. `num_overlapped` counts calls of instances that began in an update.
    """

    separate = True
    steady = WeightsReady | Prepared

    def __init__(
        self, num_instances: int = 2, seed: int = 0, *args: Any,
        latencies: Latencies = Latencies(), in_flight: bool = False, tells: bool = False,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_instances, seed, *args, **more)
        self.latencies, self.in_flight, self.tells = latencies, in_flight, tells
        self.pushed: set[int] = set()  # what can be loaded
        self.loaded: dict[int, int] = {}  # by instance
        self.loads: list[tuple[int, int]] = []
        self.passes: list[tuple[str, int, tuple[SampleId, ...]]] = []
        self.compared: list[tuple[int, set[int]]] = []  # the version, and the prompts
        self.num_overlapped = 0
        self.num_copied = 0  # samples with tokens, from a checkpoint
        # Updates, and calls that train early, of whose samples there are no copies yet; with what
        # each has trained early.
        self._copying: dict[str, dict[SampleId, Any]] = {}
        self.num_refused = 0
        self._loads_s = 0.0
        self._newest = -1

    def continues(self, before: "SeparateExecutor", versions: Collection[int]) -> None:
        """Take up a run at a checkpoint, which has these pushed versions and finished samples."""
        assert versions <= before.pushed, "a checkpoint without weights that samples go on with"
        self.version, self.pushed = before.version, {*versions}

    def place(self, id: SampleId, rank: int, tensors: dict[str, Any]) -> None:
        """A finished sample of a checkpoint comes to a rank."""
        self._where[id], self.tensors[id] = rank, tensors

    def scope(self, stage: Stage) -> Scope:
        """Models are with the actor; what has no model is where samples are."""
        if isinstance(stage, ComputeStage) and stage.method is not StageMethod.SCORE:
            return Scope.POOL
        return super().scope(stage)

    def pool(self, stage: Stage) -> str:
        return "critic" if stage.role == "critic" else "actor"

    def push_weights(self) -> None:
        self._push(WeightsPushed(self.version), self.latencies.push)

    def keep_versions(self, versions: Collection[int]) -> None:
        self.pushed &= {*versions, self._newest}

    def sync_weights(self) -> None:
        assert not any(self._left.values()), "weights change under samples"
        self.loaded = dict.fromkeys(self.instances, self.version)
        self._push(WeightsReady(self.version))

    def prepare(self, places: Sequence[int], phase: Phase) -> None:
        assert (set(places), phase) == (self.alive, Phase.TRAIN)
        self._push(Prepared(tuple(places), phase), 0.0)

    def advance(
        self,
        instance: int,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> None:
        if commands and isinstance(first := commands[0], LoadWeights):
            assert self.in_flight or not self._left[instance], "weights change under samples"
            assert first.version in self.pushed, f"version {first.version} is not there"
            self.loaded[instance] = first.version
            self.loads.append((instance, first.version))
            self._loads_s, commands = self.latencies.load, commands[1:]
        assert not any(isinstance(command, LoadWeights) for command in commands)
        self.num_overlapped += any(isinstance(e, UpdateDone) for _, _, e in self._pending)
        super().advance(instance, commands, num_decode_steps, enough_turns)

    def _push(self, event: Event, most: float = 1.0) -> None:
        if isinstance(event, Advanced):
            most, self._loads_s = most + self._loads_s, 0.0
        elif isinstance(event, UpdateDone):
            most = self.latencies.update
        super()._push(event, most)

    def wait(self) -> list[Event]:
        events = super().wait()
        if not isinstance(events[0], WorkerDied) and self._random.random() < 0.5:
            self._copying.clear()
        for event in events:
            if isinstance(event, WeightsPushed):
                self.pushed.add(event.version)
                self._newest = event.version
        return events

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, no environment replies."""
        replies = [entry for entry in self._pending if isinstance(entry[2], Replied)]
        self._pending = [entry for entry in self._pending if entry not in replies]
        heapq.heapify(self._pending)
        yield
        for entry in replies:
            heapq.heappush(self._pending, entry)

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        if self.scope(stage) is Scope.POOL:
            self.passes.append((stage.name, self.version, tuple(s.id for s in samples)))
        super().compute(stage, samples)

    def compare(self, stage: UpdateStage, samples: Sequence[Sample]) -> None:
        """The trainer's weights have made the samples, which no update has had."""
        for sample in samples:
            assert {span.version for span in sample.spans if span.trained} == {self.version}
            assert self._where[sample.id] == sample.rank
        self.compared.append((self.version, {sample.id.prompt for sample in samples}))
        self._push(Compared({"mismatch/mean": 0.5}))

    def train_early(self, stage: Stage, instance: int, samples: Sequence[Sample]) -> None:
        """All ranks that train compute a gradient of copies, with nothing else in their pool."""
        assert instance == TRAINING_POOL, "instances do not train"
        in_pool = [
            event
            for _, _, event in self._pending
            if isinstance(event, UpdateDone | EarlyTrained)
            or (isinstance(event, Computed) and event.stage in {name for name, *_ in self.passes})
        ]
        assert not in_pool, "two calls in flight in one pool"
        early, ids = self.early.setdefault(stage.name, {}), tuple(s.id for s in samples)
        assert early.keys().isdisjoint(ids), "trained twice"
        for sample in samples:
            assert self._where[sample.id] == sample.rank, "not where it lies"
            early[sample.id] = instance, {x: self._field(sample, x) for x in stage.inputs}
        self.passes.append((stage.name, self.version, ids))
        self._copying[stage.name] = {}
        self._on.update(ids)
        self._push(EarlyTrained(stage.name, instance, ids, 0.5), self.latencies.update)

    def _update(self, stage: UpdateStage, samples: Sequence[Sample]) -> None:
        early = self.early.get(stage.name, {})
        super()._update(stage, samples)
        self._copying[stage.name] = early

    def _die(self, instance: int) -> list[Event]:
        dead = {id for id, where in self._where.items() if where == instance}
        kept = []
        for when, number, event in self._pending:
            if isinstance(event, EarlyTrained | UpdateDone) and event.stage in self._copying:
                event = self._without(event, dead)
            elif isinstance(event, SamplesRead):
                results = [self._of_those(x, dead) for x in self._unread.pop(event.ids)]
                event = replace(event, ids=tuple(id for id in event.ids if id not in dead))
                if not event.ids:
                    continue
                self._unread[event.ids] = [x for x in results if x.ids]
            kept.append((when, number, event))
        self._pending = kept
        return super()._die(instance)

    def _of_those(self, event: Computed, dead: set[SampleId]) -> Computed:
        where = self._where
        self._where = {id: rank for id, rank in where.items() if id not in dead}
        event = self._of_those_that_are(event)
        self._where = where
        return event

    def _without(self, event: Event, dead: set[SampleId]) -> Event:
        """What comes instead of an event, since samples died before they were copied."""
        if isinstance(event, EarlyTrained):
            prompts = {id.prompt for id in event.ids if id in dead}
            passed = [id for id in event.ids if id.prompt in prompts]
            self.num_refused += len(passed)
            for id in passed:
                del self.early[event.stage][id]
            self._on.subtract(passed)
            return replace(event, ids=tuple(id for id in event.ids if id not in passed))
        assert isinstance(event, UpdateDone), event
        early = self._copying[event.stage]
        name, seen = self.updates[-1]
        if name != event.stage or not any(id in dead and id not in early for id, _ in seen):
            return event
        self.updates.pop()
        self.early[event.stage] = early
        self.version -= 1
        self.num_early -= len(early)
        self.num_refused += len(seen)
        return UpdateRefused(event.stage)

    def _outputs(self, stage: Stage, sample: Sample) -> dict[str, Any]:
        """With `tells` a reward depends on which weights made the tokens."""
        outputs = super()._outputs(stage, sample)
        if self.tells and getattr(stage, "method", None) is StageMethod.SCORE:
            value, _ = stage.scalars
            outputs[value] += sum(
                1 + s.version for s in sample.spans for _ in range(s.start, s.stop)
            )
        return outputs

    def most_loads(self) -> int:
        """How often one instance has loaded one version, at most."""
        return max(Counter(self.loads).values(), default=0)

    def _is_in(self, phase: Phase) -> bool:
        return True

    def _version_on(self, instance: int) -> int:
        return self.loaded[instance]
