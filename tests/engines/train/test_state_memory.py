"""Weights and moments that leave the device and return: on CPUs, whose "device" is other memory.

Two kinds of copies stand in for a GPU's stream. One copies at once, the other only when something
waits for it. So a read that does not wait sees other bytes, and a write that is early is copied.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from surrogate_loss import Surrogate
from torch.cuda import _pin_memory_utils

from hybridrl.algorithms.critic import ValueLoss
from hybridrl.checkpoint import distributed
from hybridrl.config import (
    LoraConfig,
    ModelConfig,
    OptimConfig,
    OptimName,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train import state_memory
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.fused_update import FusedUpdate, UpdateInputs
from hybridrl.engines.train.pinned import pinned_bytes
from hybridrl.engines.train.state_memory import Block, CopyStream

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
STEPS = 3


class Copied:
    """The event behind a copy, which is made when something waits for it."""

    def __init__(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.pair: tuple[torch.Tensor, torch.Tensor] | None = (to, source)

    def synchronize(self) -> None:
        if self.pair is not None:
            to, source = self.pair
            self.pair = None
            to.copy_(source)


class LateCopies(CopyStream):
    """Makes each copy when something waits for it, or when the next one of its memory begins."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._begun: list[Copied] = []

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Copied:
        for copied in self._begun:  # one stream: in order
            if copied.pair is not None and any(x is y for x in copied.pair for y in (to, source)):
                copied.synchronize()
        self._begun = [copied for copied in self._begun if copied.pair is not None]
        self._begun.append(Copied(to, source))
        return self._begun[-1]

    def wait(self, copied: Copied | None) -> None:
        if copied is not None:
            copied.synchronize()


@contextmanager
def moving(late: bool) -> Iterator[list[str]]:
    """State of engines that are built within leaves for other memory; gives the copies made.

    Device memory that has been given up is overwritten, so a view of it that is left is found.
    """
    kind, copies = LateCopies if late else CopyStream, list[str]()
    move, send, come = Block._move, Block.send, Block.come

    def overwritten(self: Block, memory: torch.Tensor) -> None:
        before = self.memory
        move(self, memory)
        if not self.on_host:  # it leaves
            before.fill_(255)  # NaN in every format

    def counted(name: str, call: Callable[[Block], None]) -> Callable[[Block], None]:
        def counting(self: Block) -> None:
            event, equal, host = self._copied, self._is_equal, self.on_host
            call(self)
            if (equal, host) != (self._is_equal, self.on_host) or event is not self._copied:
                copies.append(name)

        return counting

    with ExitStack() as stack:
        patch = mock.patch.object
        stack.enter_context(patch(state_memory, "leaves_device", lambda device: True))
        stack.enter_context(patch(state_memory, "CopyStream", kind))
        stack.enter_context(patch(Block, "_move", overwritten))
        stack.enter_context(patch(Block, "send", counted("out", send)))
        stack.enter_context(patch(Block, "come", counted("in", come)))
        yield copies


def make(
    path: str, case: dict[str, Any], values: bool = False, reverse: bool = False
) -> TrainEngine:
    """An engine of the case: `layout`, `optim`, `lora`."""
    optim = OptimConfig(name=case.get("optim", OptimName.adamw), lr=1e-2, eps=1e-3)
    lora = LoraConfig(rank=case["lora"], alpha=8.0) if "lora" in case else None
    return TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=40, optim=optim, layout=TrainLayoutConfig(**case["layout"])
        ),
        device=CPU,
        gives_values=values,
        lora=lora,
        reverse=reverse,
    )


def state_of(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Whole weights and moments by name, copies."""
    return {
        name: distributed.dequantized(tensors[0]).full_tensor().clone()
        for name, tensors in distributed._tensors(engine)
    }


def leave_and_return(engine: TrainEngine, sequences: Any) -> None:
    """A step's phases besides training: the switch, generation, scores of another phase."""
    engine.start_offload()
    engine.named_shards()  # the switch reads them meanwhile
    engine.offload()
    assert all(block.on_host for block in engine.memory._all())
    engine.onload_weights()
    engine.log_probs(sequences)
    engine.offload()
    engine.onload()


def train(path: str, sequences: Any, case: dict[str, Any], late: bool | None) -> Any:
    """Steps of a role, moving where `late` is not None; its state, metrics and copies a step."""
    torch.manual_seed(0)
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    metrics, copies_by_step = [], []
    with ExitStack() as stack:
        copies = [] if late is None else stack.enter_context(moving(late))
        engine = make(path, case)
        for _ in range(STEPS):
            copies.clear()
            metrics.append(engine.update(mine, Surrogate()))
            if late is not None:
                leave_and_return(engine, mine)
            copies_by_step.append(list(copies))
        return state_of(engine), metrics, copies_by_step


CASES: dict[str, dict[str, Any]] = {
    "adamw": {"layout": {"fsdp": 2}},
    "muon": {"layout": {"fsdp": 2}, "optim": OptimName.muon},
    "adapters": {"layout": {"fsdp": 2}, "lora": 2},
    "tensor parallel": {"layout": {"tp": 2, "fsdp": 1}},
    "pipeline": {"layout": {"pp": 2, "fsdp": 1}},
    "replicas": {"layout": {"replicas": 2, "fsdp": 1}},
}


def train_in_ways(path: str, sequences: Any, case: dict[str, Any]) -> Any:
    """What `train` gives for state that stays, and for state that is copied at once and late."""
    return [train(path, sequences, case, late) for late in (None, False, True)]


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_bit_for_bit(ranks, tiny, sequences, name: str) -> None:
    case = CASES[name]
    ways = ranks(2, train_in_ways, tiny("qwen3"), sequences, case)
    pairs = [(stayed, moved) for stayed, *others in ways for moved in others]
    for (state, metrics, _), (other, other_metrics, copies) in pairs:
        assert state.keys() == other.keys()
        assert any(key.startswith(("exp_avg/", "momentum_buffer/")) for key in state)
        for key, tensor in state.items():
            assert torch.equal(tensor, other[key]), key
        assert metrics == other_metrics
        # Weights and moments out once and in once, and weights once more for the scores. What
        # is frozen never leaves again.
        frozen = "lora" in case
        assert copies[0] == ["out"] * (2 + frozen) + ["in"] * (1 + frozen) + ["in"] * (2 + frozen)
        assert copies[1] == copies[2] == ["out"] * 2 + ["in"] * (3 + 2 * frozen)


def train_two(path: str, sequences: Any, late: bool | None, together: bool) -> Any:
    """An actor and a critic that take turns on the device, or train together."""
    torch.manual_seed(0)
    case = {"layout": {"pp": 2, "fsdp": 1}}
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    for sequence in mine:
        size = (sequence.response_tokens,)
        sequence.fields |= {"returns": torch.full(size, 0.5), "values": torch.zeros(size)}
    losses = [Surrogate(), ValueLoss()]
    with ExitStack() as stack:
        if late is not None:
            stack.enter_context(moving(late))
        engines = [make(path, case), make(path, case, values=True, reverse=together)]
        fused = FusedUpdate(engines) if together else None
        for _ in range(STEPS):
            for engine, loss in zip(engines, losses, strict=True):
                if late is not None:
                    engine.onload()
                if fused is None:
                    engine.update(mine, loss)
                    if late is not None:
                        engine.offload()
            if fused is not None:
                inputs = [UpdateInputs(sequences=mine, loss=loss) for loss in losses]
                fused.update(list(zip(engines, inputs, strict=True)), even=True)
                for engine in engines if late is not None else ():
                    engine.offload()
        on_host = [block.on_host for engine in engines for block in engine.memory._all()]
        assert on_host == [late is not None] * 4
        return [state_of(engine) for engine in engines]


@pytest.mark.parametrize("together", [False, True], ids=["in turns", "together"])
def test_two_roles_are_the_same_bit_for_bit(ranks, tiny, sequences, together: bool) -> None:
    path = tiny("qwen3")
    stayed = ranks(2, train_two, path, sequences, None, together)
    moved = ranks(2, train_two, path, sequences, True, together)
    for one, other in zip(stayed, moved, strict=True):
        for state, same in zip(one, other, strict=True):
            assert all(torch.equal(tensor, same[key]) for key, tensor in state.items())


def write_away(path: str, folder: Any, sequences: Any, late: bool) -> Any:
    """Checkpoints written and read, and weights replaced, while the state is on the host."""
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    case = CASES["adamw"]
    states: dict[str, Any] = {}
    with moving(late):
        engine = make(path, case)
        engine.update(mine, Surrogate())
        before = state_of(engine)
        engine.start_offload()
        engine.offload()
        distributed.save(folder, engine, {})
        progress = distributed.progress_of(engine)
        states["on host"] = state_of(engine)
        engine.onload()
        engine.update(mine, Surrogate())
        engine.offload()
        states["updated"] = state_of(engine)
        # Read while it is away, then while it is here.
        for here in (False, True):
            if here:
                engine.onload()
                engine.update(mine, Surrogate())
            distributed.load(folder, engine, progress, {})
            engine.offload()
            engine.onload()
            states["read here" if here else "read away"] = state_of(engine)
        engine.take_weights([(name, torch.full(x, 0.5)) for name, x in engine.shapes().items()])
        engine.offload()
        engine.onload()
        taken = [t.full_tensor() for t in engine.named_shards().values()]
        assert all(bool((t == 0.5).all()) for t in taken)
        engine.reset_optimizer(engine.optim, 9)
        engine.offload()
        assert not engine.memory._moments
        engine.onload()
        engine.update(mine, Surrogate())
        assert len(engine.memory._moments) == 1
    return before, states


@pytest.mark.parametrize("late", [False, True], ids=["copied at once", "copied late"])
def test_state_is_saved_and_replaced_wherever_it_is(
    ranks, tiny, sequences, tmp_path, late: bool
) -> None:
    for before, states in ranks(2, write_away, tiny("qwen3"), tmp_path / "state", sequences, late):
        for name in ("on host", "read away", "read here"):
            assert before.keys() == states[name].keys()
            for key, tensor in before.items():
                assert torch.equal(tensor, states[name][key]), (name, key)
        assert not all(torch.equal(x, states["updated"][key]) for key, x in before.items())


def stay(path: str, sequences: Any) -> Any:
    """A step of a role that stays; the copies made, and where its state is."""
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    with moving(late=True) as copies:
        engine = make(path, CASES["adamw"])
        engine.memory.stays = True
        engine.update(mine, Surrogate())
        engine.start_offload()
        engine.offload()
        engine.onload_weights()
        engine.offload()
        engine.onload()
        return list(copies), [block.on_host for block in engine.memory._all()]


def test_what_stays_is_not_copied(ranks, tiny, sequences) -> None:
    for copies, on_host in ranks(2, stay, tiny("qwen3"), sequences):
        assert copies == []
        assert on_host == [False, False]


class Stream:
    """Writes down what a stream is asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        self.log.append(f"{self.name} records")
        return "the copy"

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append("on main")


class CopiedTensor:
    """Writes down a copy."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def copy_(self, source: "CopiedTensor", non_blocking: bool = False) -> None:
        self.log.append("copies" if non_blocking else "copies while the host waits")


def test_a_copy_follows_the_work_before_it_and_precedes_what_waits(monkeypatch) -> None:
    """On the streams of CUDA, which are not here."""
    log: list[str] = []
    main, side = Stream("main", log), Stream("side", log)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    copies = CopyStream(torch.device("cuda"))
    copied = copies.copy(CopiedTensor(log), CopiedTensor(log))  # type: ignore[arg-type]
    copies.wait(copied)
    assert log == [
        "side waits for main", "on side", "copies", "side records", "on main",
        "main waits for the copy",
    ]  # fmt: skip


def test_a_mirror_is_registered_once_and_given_back(monkeypatch) -> None:
    """With CUDA, which is not here; a CPU's is ordinary memory."""
    pinned: list[tuple[int, int]] = []
    monkeypatch.setattr(_pin_memory_utils, "pin_memory", lambda *args: pinned.append(args))
    monkeypatch.setattr(_pin_memory_utils, "unpin_memory", lambda at: pinned.append((at, 0)))
    assert pinned_bytes(100, CPU).tolist() == [0] * 100
    assert pinned == []
    memory = pinned_bytes(100, torch.device("cuda"))
    address = memory.data_ptr()
    view = memory[:4].view(torch.float32)
    del memory
    assert pinned == [(address, 100)]  # a view keeps it
    del view
    assert pinned == [(address, 100), (address, 0)]
