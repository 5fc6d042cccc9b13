"""A small model, its prompt, and a data plane between ranks: for tests of parked samples."""

import os
import pickle
import uuid
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from hybridrl.config import (
    ClusterConfig,
    Config,
    DataConfig,
    Device,
    FusedScheduleConfig,
    ModelConfig,
    RolloutConfig,
    TinyModelConfig,
)
from hybridrl.data import Item
from hybridrl.flow.executor import Phase
from hybridrl.flow.sample import SampleId
from hybridrl.workers.actor_worker import ActorWorker

TINY = TinyModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=64, alphabet="abcdefghij",
)  # fmt: skip
PROMPT = Item("abc", (3, 4, 5), "", (), "main", {})


class Files:
    """A data plane of files: what is handed over is pickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, value: Any) -> Any:
        file = self.folder / uuid.uuid4().hex
        file.write_bytes(pickle.dumps(value))
        return str(file)

    def get(self, references: list[Any]) -> list[Any]:
        return [pickle.loads(Path(reference).read_bytes()) for reference in references]


def generating_worker(model: str, folder: Path, rollout: RolloutConfig) -> ActorWorker:
    """This rank of the model at `model`, in GENERATE; the test has made the process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    config = Config(
        model=ModelConfig(path=model),
        cluster=ClusterConfig(ranks=size, device=Device.cpu),
        data=DataConfig(max_prompt_tokens=8),
        rollout=rollout,
        schedule=FusedScheduleConfig(),
    )
    worker = ActorWorker(rank, size, config, model, Files(folder))
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.dict(os.environ, MASTER_ADDR="localhost"),
    ):
        worker.setup(*worker.listen().value)
    worker.enter(Phase.GENERATE)
    return worker


def shared(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def stored(worker: ActorWorker) -> dict[SampleId, Any]:
    """Tokens and log-probabilities of the samples on any rank, each on one of them."""
    mine = {
        id: (s.tensors["tokens"].tolist(), s.tensors["log_probs"].tolist())
        for id, s in worker.store._samples.items()
    }
    shares = shared(mine)
    assert sum(map(len, shares)) == len({id for share in shares for id in share}), "held twice"
    return {id: value for share in shares for id, value in share.items()}
