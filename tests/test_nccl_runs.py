"""Runs of the engines, held to the order that NCCL keeps."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from nccl_order import check

from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.config import (
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    TinyModelConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.tiny import make_tiny_model

TINY = TinyModelConfig(
    hidden_size=16, intermediate_size=24, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=4,
    max_positions=64, alphabet="abcdefghij",
)  # fmt: skip
CPU = torch.device("cpu")
Ranks = Any


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, TINY, seed=0)
    return str(path)


def held_to_nccls_order(ranks: Ranks, size: int, *call: Any) -> None:
    _, logs = ranks.recorded(size, *call)
    faults = check(logs)
    assert not faults, "\n".join(map(str, faults))


def own_sequences() -> list[TrainSequence]:
    """This rank's share of eight sequences of nine tokens."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 13, (8, 9), generator=random)
    return [TrainSequence(row, 5) for row in ids[dist.get_rank() :: dist.get_world_size()]]


def make_engine(path: str, layout: TrainLayoutConfig) -> TrainEngine:
    """In micro-batches of one sequence."""
    trainer = TrainerConfig(
        max_tokens_per_micro_batch=12, optim=OptimConfig(lr=1e-2), layout=layout
    )
    return TrainEngine(path, model=ModelConfig(), trainer=trainer, device=CPU)


def score(path: str, layout: TrainLayoutConfig) -> None:
    make_engine(path, layout).log_probs(own_sequences())


def train(path: str, layout: TrainLayoutConfig) -> None:
    make_engine(path, layout).update(own_sequences(), CrossEntropyLoss())


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize("call", [score, train])
def test_pipelines(
    ranks: Ranks,
    model: str,
    call: Any,
    schedule: PipelineSchedule,
    pp: int,
) -> None:
    held_to_nccls_order(ranks, pp, call, model, TrainLayoutConfig(pp=pp, schedule=schedule))
