"""Host memory of a rank while it loads: its shards and two tensors, never the model.

Torch's memory tracker counts the storages of all tensors that are alive. What is mapped from a file
counts as a whole tensor.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from hybridrl.config import (
    ModelConfig,
    TinyModelConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.score.engine import ScoreEngine
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.layout.mesh import Mesh
from hybridrl.models.activations import PeakMemory
from hybridrl.models.parallel import meta_model
from hybridrl.models.shard import GenParallel
from hybridrl.models.tiny import make_tiny_model

pytestmark = pytest.mark.layouts

CPU = torch.device("cpu")
SMALL = 4096
"""Bytes of what has no weights: rotations, what ranks tell one another."""


def write(folder: Path, experts: int) -> str:
    """Twelve layers, so that two tensors are few of them."""
    config = TinyModelConfig(
        num_layers=12, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        num_experts=experts, experts_per_token=2,
    )  # fmt: skip
    make_tiny_model(folder, config, seed=0)
    return str(folder)


def peak_of(start: Callable[[], list[torch.Tensor]], path: str) -> tuple[int, int, int, int]:
    """Bytes at most while `start` runs, of the tensors that it gives, of the largest, of all."""
    model = meta_model(AutoConfig.from_pretrained(path))
    sizes = [parameter.numel() * 4 for parameter in model.parameters()]
    gc.collect()
    with PeakMemory() as memory:
        own = start()
        most = memory.peak("cpu")
    return most, sum(tensor.nbytes for tensor in own), max(sizes), sum(sizes)


def train(path: str, layout: dict[str, int], values: bool = False) -> tuple[int, int, int, int]:
    def start() -> list[torch.Tensor]:
        engine = TrainEngine(
            path,
            model=ModelConfig(),
            trainer=TrainerConfig(layout=TrainLayoutConfig(**layout)),
            device=CPU,
            gives_values=values,
        )
        kept.append(engine)
        return [p.to_local() for root in engine.roots for p in root.parameters()]  # type: ignore

    kept: list[TrainEngine] = []
    return peak_of(start, path)


def score(path: str, pp: int, tp: int, ep: int) -> tuple[int, int, int, int]:
    parallel = GenParallel.make(Mesh((("instance", 1), ("pp", pp), ("tp", tp))), "cpu", ep)

    def start() -> list[torch.Tensor]:
        engine = ScoreEngine(
            AutoConfig.from_pretrained(path), parallel, dtype=torch.float32, device=CPU
        )
        engine.load(path)
        kept.append(engine)
        return list(engine.model.parameters())

    kept: list[ScoreEngine] = []
    return peak_of(start, path)


def check(results: list[tuple[int, int, int, int]]) -> None:
    for most, own, largest, all_of_it in results:
        assert own < 0.7 * all_of_it
        assert own <= most <= own + 2 * largest + SMALL, (most, own, largest)
        assert own + 2 * largest + SMALL < all_of_it, "the whole model would not be seen"


@pytest.mark.parametrize(
    ("experts", "layout"),
    [
        (0, {"fsdp": 2}),
        (0, {"fsdp": 1, "tp": 2}),
        (0, {"fsdp": 1, "pp": 2}),
        (8, {"fsdp": 2}),
        (8, {"fsdp": 2, "ep": 2}),
        (8, {"fsdp": 1, "pp": 2}),
    ],
)
def test_training(ranks: Any, tmp_path: Path, experts: int, layout: dict[str, int]) -> None:
    check(ranks(2, train, write(tmp_path, experts), layout))


def test_a_critic(ranks: Any, tmp_path: Path) -> None:
    check(ranks(2, train, write(tmp_path, 0), {"fsdp": 2}, True))


@pytest.mark.parametrize(
    ("experts", "pp", "tp", "ep"), [(0, 1, 2, 1), (0, 2, 1, 1), (8, 1, 2, 1), (8, 1, 2, 2)]
)
def test_generation(ranks: Any, tmp_path: Path, experts: int, pp: int, tp: int, ep: int) -> None:
    check(ranks(2, score, write(tmp_path, experts), pp, tp, ep))
