"""A virtual executor: instances, ranks and phases with random latencies under a virtual clock."""

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hybridrl.flow.clock import VirtualClock
from hybridrl.flow.executor import (
    Advanced,
    Command,
    Computed,
    Event,
    Finished,
    Park,
    Parked,
    Phase,
    Placed,
    Resume,
    Submit,
)
from hybridrl.flow.graph import Stage
from hybridrl.flow.sample import Sample, SampleId


class VirtualExecutor:
    """One rank per instance; what a sample is depends on its id alone, when it is made on `seed`.

    Holds callers to the seam's rules: phases, one advance per instance, nothing in flight at a
    whole-group call, no sample used after its release, parked samples resumed once and under the
    weights that they began with. `length_of` gives response tokens, `reward_of` (reward, status).
    """

    def __init__(
        self,
        num_instances: int = 2,
        seed: int = 0,
        length_of: Callable[[SampleId], int] | None = None,
        reward_of: Callable[[SampleId], tuple[float, str]] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.num_instances = num_instances
        self.length_of = length_of or (lambda id: random.Random(f"{id} length").randrange(0, 20))
        self.reward_of = reward_of or (
            lambda id: (float(random.Random(f"{id} reward").randrange(0, 2)), "ok")
        )
        self.tensors: dict[SampleId, dict[str, Any]] = {}
        self.prompts: dict[SampleId, Any] = {}
        self.submits: list[tuple[int, Submit]] = []
        self.resumes: list[tuple[int, SampleId]] = []
        self.finish_order: list[SampleId] = []
        self.updates: list[tuple[str, list[tuple[SampleId, dict[str, Any]]]]] = []
        self.entered: list[Phase] = []
        self.released: list[SampleId] = []
        self.version = 0
        self._random = random.Random(seed)
        self._pending: list[tuple[float, int, Event]] = []
        self._num_calls = 0
        self._left: list[dict[SampleId, int]] = [{} for _ in range(num_instances)]
        self._busy: set[int] = set()
        self._parked: set[SampleId] = set()
        self.most_held = [0] * num_instances

    def enter(self, phase: Phase) -> None:
        assert not self._working(), "a phase change while calls are in flight"
        assert not any(self._left), "a phase change while samples are unfinished"
        assert not self._parked, "a phase change while samples are parked"
        self.entered.append(phase)
        self.clock.advance_to(self.clock.now() + 1.0)

    def advance(self, instance: int, commands: Sequence[Command], num_decode_steps: int) -> None:
        assert self.entered[-1:] == [Phase.GENERATE]
        assert instance not in self._busy, "two advances in flight on one instance"
        self._busy.add(instance)
        left = self._left[instance]
        parked = [p for command in commands for p in self._obey(instance, command)]
        self.most_held[instance] = max(self.most_held[instance], len(left))
        done = [id for id, tokens in left.items() if tokens <= num_decode_steps]
        steps = min(num_decode_steps, max(left.values(), default=0))
        for id in left:
            left[id] -= num_decode_steps
        for id in done:
            del left[id]
        self._random.shuffle(done)
        self.finish_order += done
        finished = tuple(self._finish(id, instance) for id in done)
        self._push(Advanced(instance, len(left), steps, finished, tuple(parked)))

    def _obey(self, instance: int, command: Command) -> list[Parked]:
        left = self._left[instance]
        match command:
            case Submit():
                self.submits.append((instance, command))
                for id in command.ids:
                    assert id not in self.prompts
                    self.prompts[id] = command.prompt
                    left[id] = self.length_of(id)
            case Park(ids=ids):
                state = {id: left.pop(id) for id in ids if id in left}
                self._parked |= state.keys()
                return [Parked(tuple(state), self.version, state)]
            case Resume(ids=ids, parked=parked):
                assert parked.version == self.version, "resumed under other weights"
                assert set(ids) <= set(parked.ids)
                for id in ids:
                    self._parked.remove(id)
                    self.resumes.append((instance, id))
                    left[id] = parked.state[id]
        return []

    def place(self, stage: Stage, ids: Sequence[SampleId], prompts: Sequence[Any]) -> None:
        self.prompts.update(zip(ids, prompts, strict=True))
        for rank in range(self.num_instances):
            mine = ids[rank :: self.num_instances]
            if mine:
                self._push(Placed(stage.name, tuple(self._finish(id, rank) for id in mine)))

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        for rank in range(self.num_instances):
            here = [sample for sample in samples if sample.rank == rank]
            self._push(self._run(stage, here))

    def wait(self) -> list[Event]:
        if not self._pending:
            raise RuntimeError("nothing is in flight")
        when, _, event = heapq.heappop(self._pending)
        self.clock.advance_to(max(when, self.clock.now()))
        if isinstance(event, Advanced):
            self._busy.remove(event.instance)
        return [event]

    def update(self, stage: Stage, samples: Sequence[Sample]) -> dict[str, float]:
        assert self.entered[-1:] == [Phase.TRAIN]
        assert not self._working()
        seen = [(s.id, {x: self._field(s, x) for x in stage.inputs}) for s in samples]
        self.updates.append((stage.name, seen))
        self.version += 1
        return {"loss": 0.5, "num_samples": float(len(samples))}

    def release(self, ids: Sequence[SampleId]) -> None:
        self.released += ids
        for id in ids:
            self.tensors.pop(id, None)

    def _working(self) -> bool:
        return any(not isinstance(e, Computed) or bool(e.ids) for _, _, e in self._pending)

    def _push(self, event: Event) -> None:
        self._num_calls += 1
        when = self.clock.now() + self._random.random()
        heapq.heappush(self._pending, (when, self._num_calls, event))

    def _finish(self, id: SampleId, rank: int) -> Finished:
        length = self.length_of(id)
        draw = random.Random(f"{id} tokens")
        self.tensors[id] = {
            "tokens": [draw.randrange(50) for _ in range(3 + length)],
            "log_probs": [-draw.random() for _ in range(length)],
        }
        return Finished(id, rank, 3, length, "stop", self.version)

    def _field(self, sample: Sample, name: str) -> Any:
        if name in sample.scalars:
            return sample.scalars[name]
        assert name in sample.tensors
        return self.tensors[sample.id][name]

    def _run(self, stage: Stage, samples: Sequence[Sample]) -> Computed:
        made: dict[str, list[Any]] = {name: [] for name in stage.scalars}
        for sample in samples:
            for name, value in self._outputs(stage, sample).items():
                if name in made:
                    made[name].append(value)
                else:
                    self.tensors[sample.id][name] = value
        ids = tuple(sample.id for sample in samples)
        tensors = tuple(name for name in stage.outputs if name not in made)
        return Computed(stage.name, ids, {k: tuple(v) for k, v in made.items()}, tensors)

    def _outputs(self, stage: Stage, sample: Sample) -> dict[str, Any]:
        inputs = [self._field(sample, name) for name in stage.inputs]
        if stage.method == "map":
            values = stage.options["function"](*inputs)
            values = values if isinstance(values, tuple) else (values,)
            return dict(zip(stage.options["returns"], values, strict=True))
        if stage.method == "score":
            value, status = stage.scalars
            return dict(zip((value, status), self.reward_of(sample.id), strict=True))
        assert self.entered[-1:] == [Phase.TRAIN], "a forward pass outside of TRAIN"
        draw = random.Random(f"{sample.id} {stage.name}")
        return {x: [-draw.random() for _ in range(sample.response_tokens)] for x in stage.outputs}


@pytest.fixture(scope="session")
def virtual_executor() -> type[VirtualExecutor]:
    """The class, to be made with a test's own lengths, rewards and latencies."""
    return VirtualExecutor
