"""A forward pass with a snapshot between the calls of a client's model, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridrl.algorithms.tinker_losses import tinker_loss
from hybridrl.config import LoraConfig, ModelConfig, TrainerConfig
from hybridrl.engines.train.adamw import local_shard
from hybridrl.engines.train.client_models import ClientModels
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.optimizer_steps import AdamWSettings

ADAM = AdamWSettings(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)


def steps(path: str, sequences: list[TrainSequence], rank: int, holds: bool) -> dict[str, Any]:
    """Three steps of a model; within the last one it `holds` the first one's snapshot, or not.

    `scores` are those of the snapshot, then or when it was made.
    """
    lora, cpu = LoraConfig(rank=rank) if rank else None, torch.device("cpu")
    engine = TrainEngine(path, model=ModelConfig(), trainer=TrainerConfig(), device=cpu, lora=lora)
    models, loss = ClientModels(engine, path, seed=0), tinker_loss("cross_entropy", {}, 0)
    models.create("one", seed=3)
    for one in sequences:
        one.fields, one.mask = {"weights": torch.ones(one.response_tokens)}, None
    engine.accumulate_gradient(sequences, loss)
    metrics = [engine.step(ADAM)]
    snapshot, scores = models.snapshot(), engine.log_probs(sequences)
    engine.accumulate_gradient(sequences, loss)
    metrics.append(engine.step(ADAM))
    metrics.append(engine.accumulate_gradient(sequences[:4], loss)[1])
    if holds:
        with models.holding(snapshot):
            scores = engine.log_probs(sequences)
    metrics.append(engine.accumulate_gradient(sequences[4:], loss)[1])
    metrics.append(engine.step(ADAM))
    states = [engine.optimizer.state[parameter] for parameter in engine.trained_parameters()]
    return {
        "metrics": metrics,
        "version": engine.version,
        "scores": scores,
        "weights": list(models.snapshot().values()),
        "moments": [local_shard(x).clone() for state in states for x in state.values()],
    }


@pytest.mark.parametrize("rank", [0, 4])
def test_a_snapshot_that_is_held_changes_no_bit_of_training(
    tiny: Callable[..., str],
    sequences: list[TrainSequence],
    ranks: Callable[..., list[Any]],
    rank: int,
) -> None:
    """With all weights, too: weights, moments and half a gradient are the model's own again."""
    path = tiny("qwen3")
    (held,), (bare,) = (ranks(1, steps, path, sequences, rank, holds) for holds in (True, False))
    for name in ("metrics", "version"):
        assert held[name] == bare[name]
    for name in ("scores", "weights", "moments"):
        assert all(map(torch.equal, held[name], bare[name])), name
        assert len(held[name]) == len(bare[name])
