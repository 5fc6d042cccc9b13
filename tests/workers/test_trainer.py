"""A trainer without a generator: it scores what others have made, and trains on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parked_samples import PROMPT, TINY
from transformers import AutoModelForCausalLM

from hybridrl.algorithms.losses import ReinforceLoss
from hybridrl.config import ClusterConfig, Config, Device, ModelConfig, OptimConfig
from hybridrl.flow.graph import ComputeStage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.models.tiny import make_tiny_model
from hybridrl.system.rendezvous import join_group, open_store
from hybridrl.workers.store import SampleStore, StoredSample
from hybridrl.workers.trainer import ActorTrainer
from hybridrl.workers.training import UpdateShare, score, train

IDS = tuple(SampleId(i) for i in range(3))
RESPONSE = 6


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A tiny model's directory; this process is the only rank."""
    make_tiny_model(tmp_path / "model", TINY, seed=0)
    store = open_store("127.0.0.1", 0, listens=True)
    join_group(0, 1, store, "127.0.0.1", ClusterConfig(device=Device.cpu))
    yield str(tmp_path / "model")
    dist.destroy_process_group()


def test_samples_of_others_are_scored_and_trained_on(path: str) -> None:
    """Log-probabilities are those of transformers; the gap to the engine that made them is told."""
    store, random = SampleStore(), torch.Generator().manual_seed(0)
    for id in IDS:
        tokens = torch.randint(3, 13, (3 + RESPONSE,), generator=random)
        store.add(id, StoredSample(RESPONSE, PROMPT, {"tokens": tokens}))
    config = Config(model=ModelConfig(path=path), cluster=ClusterConfig(device=Device.cpu))
    trainer = ActorTrainer(config, path, (1,), store, torch.device("cpu"))
    trainer.train_engine.reset_optimizer(OptimConfig(lr=0.01), 1)

    score([trainer.scoring(ComputeStage(name="old", outputs=("log_probs",)), IDS)], None)
    model = AutoModelForCausalLM.from_pretrained(path)
    for id in IDS:
        ids = store[id].tensors["tokens"]
        logits = model(ids[None]).logits[0, -RESPONSE - 1 : -1].log_softmax(-1)
        wanted = logits.gather(1, ids[-RESPONSE:, None])[:, 0]
        assert (store[id].tensors["log_probs"] - wanted).abs().max() < 1e-5

    stage = UpdateStage(name="update", loss=ReinforceLoss(), fields={}, role="actor")
    share = UpdateShare((IDS,), {id: {"advantages": 1.0} for id in IDS}, dict.fromkeys(IDS, 0), ())
    before = {n: t.to_local().clone() for n, t in trainer.train_engine.named_shards().items()}
    (metrics,) = train([trainer.update_steps(stage, share)], None)
    assert metrics["mismatch/max"] < 1e-5
    after = trainer.train_engine.named_shards()
    assert all(not torch.equal(before[n], after[n].to_local()) for n in before)
    assert trainer.train_engine.version == 1
