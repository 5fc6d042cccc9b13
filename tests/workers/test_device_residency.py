"""Who has weights on the device: every transition, with residents that only write down."""

import logging
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hybridrl.engines.rollout.interface import Stats
from hybridrl.engines.rollout.vllm.engine import VLLMEngine
from hybridrl.engines.rollout.vllm.memory import DeviceMemory
from hybridrl.flow.executor import Phase
from hybridrl.flow.graph import UpdateStage
from hybridrl.system.memory import MemoryReading
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.colocated import ColocatedActor
from hybridrl.workers.device_residency import DeviceResidency, DeviceStatus
from hybridrl.workers.training import UpdateShare

CPU = torch.device("cpu")


class Model:
    """A role that writes down when its weights come and go."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def onload(self) -> None:
        self.log.append(f"{self.name}.onload")

    def offload(self) -> None:
        self.log.append(f"{self.name}.offload")

    def onload_weights(self) -> None:
        self.log.append(f"{self.name}.onload_weights")

    def start_offload(self) -> None:
        self.log.append(f"{self.name}.start_offload")


class Rollout:
    """A rollout engine with a cache, as empty of samples as `running` and `waiting` say."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.running, self.waiting, self.has_cache = 0, 0, True

    def sleep(self, keep_weights: bool = False) -> None:
        self.log.append("free cache" if keep_weights else "sleep")
        self.has_cache = False

    def stats(self) -> Stats:
        return cast(Stats, self)


class Rank:
    """A residency with three roles, and what has happened since the last look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.readings: list[MemoryReading] = []
        self.actor, self.critic, self.reference = (
            Model(name, self.log) for name in ("actor", "critic", "reference")
        )
        self.rollout = Rollout(self.log)
        self.residency = DeviceResidency(CPU, self.readings.append, self.rollout)
        monkeypatch.setattr(
            "hybridrl.workers.device_residency.free_cached_memory",
            lambda device: self.log.append("free"),
        )

    def happened(self) -> tuple[list[str], int]:
        """Moves in order, and the number of memory readings."""
        moves, readings = list(self.log), len(self.readings)
        self.log.clear()
        self.readings.clear()
        return moves, readings

    def generate(self) -> bool:
        with self.residency.entering_generation(self.actor) as woken:
            self.log.append("move weights")
        return woken


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    return Rank(monkeypatch)


def test_a_role_comes_after_the_one_before_it_has_left(rank: Rank) -> None:
    residency = rank.residency
    residency.activate(None)
    assert rank.happened() == ([], 0)
    residency.activate(rank.critic)
    assert rank.happened() == (["critic.onload"], 2)
    residency.activate(rank.critic)
    assert rank.happened() == ([], 0)
    residency.activate(rank.actor)
    assert rank.happened() == (["critic.offload", "actor.onload"], 2)
    assert residency.active is rank.actor
    residency.activate(None)
    assert rank.happened() == (["actor.offload"], 2)
    assert residency.active is None
    assert residency.status is DeviceStatus.TRAINING


SWITCH = ["actor.onload_weights", "move weights", "actor.offload", "free"]


@pytest.mark.parametrize(
    ("before", "moves", "readings"),
    [
        (None, SWITCH, 2),
        ("critic", ["critic.offload", *SWITCH], 4),
        # Its shards are there, though perhaps gathered: they leave while the weights move.
        ("actor", ["actor.start_offload", *SWITCH], 2),
    ],
)
def test_the_switch_has_the_actor_and_the_engine_on_the_device(
    rank: Rank, before: str | None, moves: list[str], readings: int
) -> None:
    residency = rank.residency
    residency.activate(getattr(rank, before) if before else None)
    rank.happened()
    with residency.entering_generation(rank.actor) as woken:
        assert woken
        assert residency.status is DeviceStatus.SWITCHING
        assert residency.active is rank.actor
        rank.log.append("move weights")
    assert rank.happened() == (moves, readings)
    assert residency.status is DeviceStatus.GENERATING
    assert residency.active is None
    residency.activate(rank.actor)  # it has left: it must be brought again
    assert rank.happened() == (["actor.onload"], 2)


def test_generation_is_entered_again_without_waking_the_engine(rank: Rank) -> None:
    rank.generate()
    rank.residency.activate(rank.reference)
    rank.happened()
    assert not rank.generate()
    assert rank.happened() == (["reference.offload", "move weights"], 4)
    assert rank.residency.status is DeviceStatus.GENERATING
    assert rank.residency.active is None


@pytest.mark.parametrize("active", [None, "reference"])
def test_training_is_entered_with_an_empty_device(rank: Rank, active: str | None) -> None:
    rank.generate()
    rank.residency.activate(rank.reference if active else None)
    rank.happened()
    rank.residency.enter_training()
    leaving = ["reference.offload"] if active else []
    assert rank.happened() == ([*leaving, "sleep", "free"], 2 + 2 * len(leaving))
    assert rank.residency.status is DeviceStatus.TRAINING
    assert rank.residency.active is None


def test_training_is_entered_again_with_the_engine_asleep(rank: Rank) -> None:
    rank.residency.activate(rank.critic)
    rank.happened()
    rank.residency.enter_training()
    assert rank.happened() == (["critic.offload"], 4)
    assert rank.residency.active is None


def worker_of(rank: Rank, load: Callable[[], None] = lambda: None) -> tuple[ActorWorker, Any]:
    """The worker of a rank whose switch is `load`, and its train engine."""
    worker = object.__new__(ActorWorker)
    engine = SimpleNamespace(has_early_gradient=False, onload=rank.actor.onload)
    engine.offload, engine.discard = rank.actor.offload, lambda: rank.log.append("discard")
    engine.start_offload, engine.onload_weights = (
        rank.actor.start_offload,
        rank.actor.onload_weights,
    )
    worker._spans, worker._memory, worker._passes = [], [], []
    worker.residency = rank.residency
    steps = SimpleNamespace(accumulate=lambda: setattr(engine, "has_early_gradient", True))
    actor = worker.actor = object.__new__(ColocatedActor)
    actor.residency = rank.residency
    actor.trainer = cast(Any, SimpleNamespace(
        train_engine=engine, update_steps=lambda stage, share: steps, averages={}
    ))  # fmt: skip
    actor.generator = cast(Any, SimpleNamespace(version=0, unfinished=0))
    cast(Any, actor).switch_weights = lambda wakes, snapshot: load()
    worker._early_s = 0.0
    return worker, engine


def train_early(worker: ActorWorker) -> Any:
    stage = UpdateStage(name="update", loss=cast(Any, None), fields={})
    return worker.train_early(stage, 1, UpdateShare((), {}, {}, ()), ()).value


def test_a_rank_that_trains_early_keeps_its_shards_at_the_barrier(rank: Rank) -> None:
    """It enters training alone; at the barrier its gradients are there, and nothing moves."""
    worker, engine = worker_of(rank)
    rank.generate()
    rank.happened()
    event = train_early(worker)
    assert (event.stage, event.instance, event.ids) == ("update", 1, ())
    assert rank.happened()[0] == ["sleep", "free", "actor.onload"]
    worker.enter(Phase.TRAIN)
    assert rank.happened()[0] == []
    assert rank.residency.active is engine
    worker.enter(Phase.GENERATE)  # the step has failed
    assert "discard" in rank.happened()[0]


class WorkerOfVLLM:
    """What `DeviceMemory` calls of vLLM's worker on a GPU."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep at level {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.log.append(f"wake {tags}")


def engine_of_vllm(log: list[str]) -> VLLMEngine:
    """An engine that is awake and has no request, on a GPU, without vLLM."""
    engine = object.__new__(VLLMEngine)
    forgets = SimpleNamespace(reset_encoder_cache=lambda: None)
    scheduler = SimpleNamespace(get_request_counts=lambda: (0, 0), **vars(forgets))
    tensors = {"weight": torch.zeros(1)}
    attributes: dict[str, Any] = {
        "_by_key": {}, "_ended": [], "_num_loads": 0, "_entries": {}, "_counts": Counter(),
        "_asleep": False, "_has_cache": True,
        "_kv_bytes_per_token": 1, "_limits": SimpleNamespace(num_blocks=1),
        "_core": SimpleNamespace(scheduler=scheduler, model_executor=forgets),
        "_pool": SimpleNamespace(get_num_free_blocks=lambda: 1),
        "_queue": SimpleNamespace(drain=lambda: log.append("drain")),
        "_engine": SimpleNamespace(reset_prefix_cache=lambda: True),
        "_memory": DeviceMemory(WorkerOfVLLM(log)),
        "_weights": SimpleNamespace(
            repacks=False, tensors=lambda: tensors,
            process=lambda: log.append("process"), fill_constants=lambda: None,
        ),
    }  # fmt: skip
    for name, attribute in attributes.items():
        setattr(engine, name, attribute)
    return engine


def test_vllm_has_left_the_gpu_before_a_rank_trains_early(rank: Rank) -> None:
    """Its weights come back with the next switch, and its cache with the first work after that."""
    engine = engine_of_vllm(rank.log)
    rank.residency.rollout = engine
    worker, _ = worker_of(rank, lambda: engine.load(lambda tensors, names=None: None))
    rank.generate()
    rank.happened()
    train_early(worker)
    train_early(worker)
    assert rank.happened()[0] == ["drain", "sleep at level 2", "free", "actor.onload"]
    worker.enter(Phase.TRAIN)
    assert rank.happened()[0] == []
    assert not engine.stats().has_cache
    worker.enter(Phase.GENERATE)
    switch = ["actor.start_offload", "actor.onload_weights", "drain", "wake ['weights']", "process"]
    assert rank.happened()[0] == ["discard", *switch, "actor.offload", "free"]
    assert not engine.stats().has_cache


@pytest.mark.parametrize(
    ("running", "waiting", "released"), [(0, 0, True), (1, 0, False), (0, 1, False)]
)
def test_only_a_cache_that_no_sample_uses_is_released(
    rank: Rank, running: int, waiting: int, released: bool
) -> None:
    rank.residency.release_idle_cache()  # asleep
    rank.generate()
    rank.happened()
    rank.rollout.running, rank.rollout.waiting = running, waiting
    rank.residency.release_idle_cache()
    rank.residency.release_idle_cache()
    assert rank.happened() == (["free cache"] if released else [], 0)
    assert rank.residency.status is DeviceStatus.GENERATING


@pytest.mark.parametrize(
    "call",
    [
        lambda rank: rank.residency.activate(rank.critic),
        lambda rank: rank.residency.activate(rank.actor),
        lambda rank: rank.residency.enter_training(),
        lambda rank: rank.generate(),
    ],
)
def test_nobody_else_moves_within_the_switch(rank: Rank, call: Callable[[Rank], Any]) -> None:
    with (
        pytest.raises(AssertionError, match="within a switch"),
        rank.residency.entering_generation(rank.actor),
    ):
        call(rank)


def test_a_rank_without_a_rollout_engine_stays_in_training(rank: Rank) -> None:
    residency = DeviceResidency(CPU, rank.readings.append)
    residency.activate(rank.critic)
    residency.release_idle_cache()
    residency.enter_training()
    assert rank.happened() == (["critic.onload", "critic.offload"], 6)
    with (
        pytest.raises(AssertionError, match="no rollout engine"),
        residency.entering_generation(rank.actor),
    ):
        pass


def test_the_log_says_who_is_active_and_which_phase(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="hybridrl.workers.device_residency"):
        rank.generate()
        rank.residency.activate(rank.reference)
        rank.residency.enter_training()
    assert [record.getMessage() for record in caplog.records] == [
        "phase: generating",
        "active on the device: Model",
        "active on the device: no role",
        "phase: training",
    ]
