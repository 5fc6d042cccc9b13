"""An image tower that trains, against transformers' whole model on each sample alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_prompts import FAMILIES, image_model, tolerance
from image_updates import LOSS, alone, samples

from hybridrl.config import (
    ModelConfig,
    OptimConfig,
    SharePrompts,
    TrainerConfig,
    TrainLayoutConfig,
    Vision,
)
from hybridrl.engines.probe import compare_gradients
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.flops import ForwardFlops
from hybridrl.models.image_text import TOWER


def make_engine(path: Path, **trainer: Any) -> TrainEngine:
    settings = {
        "max_tokens_per_micro_batch": 80,
        "optim": OptimConfig(lr=1e-2, clip_grad_norm=0.0),
    } | trainer
    return TrainEngine(
        str(path),
        model=ModelConfig(vision=Vision.train),
        trainer=TrainerConfig(layout=TrainLayoutConfig(fsdp=dist.get_world_size()), **settings),
        device=torch.device("cpu"),
    )


def step(path: Path, sequences: list[TrainSequence], **trainer: Any) -> Any:
    """Scores, metrics, gradients and new weights; the last rank has the samples without images."""
    engine, size = make_engine(path, **trainer), dist.get_world_size()
    of_rank = [list[TrainSequence]() for _ in range(size)]
    for number, x in enumerate(sequences):
        of_rank[number % max(1, size - 1) if x.images else -1].append(x)
    mine = of_rank[dist.get_rank()]
    scores, gradients = engine.log_probs(mine), {}

    def before_step(*_: Any) -> None:
        for name, p in engine.chunks[0].named_parameters():
            gradients[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    metrics = engine.update(mine, LOSS)
    text = sum(ForwardFlops.of(engine.model.config)(len(x.ids), 5) for x in sequences)
    assert engine.named_shards().keys() == gradients.keys()
    return scores, metrics, gradients, dict(engine.weights()), text


def steps(paths: list[Path], all_sequences: list[list[TrainSequence]]) -> list[Any]:
    results = [step(path, own) for path, own in zip(paths, all_sequences, strict=True)]
    shared = step(paths[0], all_sequences[0], share_prompts=SharePrompts.always)
    assert shared[1]["shared_prompt_share"] > 0
    return [*results, shared]


@pytest.mark.layouts
def test_a_step_is_that_of_each_sample_alone(ranks: Any, tmp_path: Path) -> None:
    """On two ranks, of which one has no image: the tower gets the gradients of all samples."""
    models = [image_model(family, tmp_path / family) for family in FAMILIES]
    sequences = [samples(model) for model in models]
    results = ranks(2, steps, [model.path for model in models], sequences)
    families, models, sequences = (
        [*x, x[0]] for x in (list(FAMILIES), models, sequences)
    )  # the last one shares prompts
    for family, model, own, of_ranks in zip(
        families, models, sequences, zip(*results, strict=True), strict=True
    ):
        wanted_scores, wanted = alone(model, own)
        scores = [score for of_rank in of_ranks for score in of_rank[0]]
        with_images = [x for x, s in zip(wanted_scores, own, strict=True) if s.images]
        texts = [x for x, s in zip(wanted_scores, own, strict=True) if not s.images]
        for got, score in zip(scores, with_images + texts, strict=True):
            torch.testing.assert_close(got, score, atol=tolerance(family), rtol=0)
        for _, metrics, gradients, after, text in of_ranks:
            assert compare_gradients(gradients, wanted, 1e-4) is None
            tower = [name for name in gradients if name.startswith(TOWER)]
            assert len(tower) > 20
            assert all(gradients[name].any() for name in tower)
            of_tower = sum(model.tower.flops(x.images) for x in own)
            assert metrics["flops"] == pytest.approx(3 * (text + of_tower), abs=10_000)
            before = model.whole.state_dict()
            assert not any(torch.equal(after[name], before[name]) for name in tower)
