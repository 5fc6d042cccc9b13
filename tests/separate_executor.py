"""A virtual executor whose instances have ranks of their own: pushes, loads, and one trainer."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from virtual_executor import VirtualExecutor

from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Advanced,
    Command,
    Event,
    LoadWeights,
    Phase,
    Prepared,
    Scope,
    UpdateDone,
    WeightsPushed,
    WeightsReady,
)
from hybridrl.flow.graph import ComputeStage, Stage, StageMethod
from hybridrl.flow.sample import Sample, SampleId


@dataclass(frozen=True, slots=True)
class Latencies:
    """The most seconds of a push, of a load, of an update; other calls take up to one second."""

    push: float = 1.0
    load: float = 1.0
    update: float = 1.0


class SeparateExecutor(VirtualExecutor):
    """As `VirtualExecutor`; models train and score in the pool `actor`, instances generate alone.

    An instance loads weights that are pushed and still kept, as the first command of a call, while
    it has no unfinished sample. `passes` has what the pool computed: stage, version, ids.
    `num_overlapped` counts the calls of instances that began while an update ran.
    """

    separate = True

    def __init__(
        self, num_instances: int = 2, seed: int = 0, *args: Any,
        latencies: Latencies = Latencies(), **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(num_instances, seed, *args, **more)
        self.latencies = latencies
        self.pushed: set[int] = set()  # what can be loaded
        self.loaded: dict[int, int] = {}  # by instance
        self.loads: list[tuple[int, int]] = []
        self.passes: list[tuple[str, int, tuple[SampleId, ...]]] = []
        self.num_overlapped = 0
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
            assert not self._left[instance], "weights change under samples"
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
        for event in events:
            if isinstance(event, WeightsPushed):
                self.pushed.add(event.version)
                self._newest = event.version
        return events

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        if self.scope(stage) is Scope.POOL:
            self.passes.append((stage.name, self.version, tuple(s.id for s in samples)))
        super().compute(stage, samples)

    def most_loads(self) -> int:
        """How often one instance has loaded one version, at most."""
        return max(Counter(self.loads).values(), default=0)

    def _is_in(self, phase: Phase) -> bool:
        return True

    def _version_on(self, instance: int) -> int:
        return self.loaded[instance]
