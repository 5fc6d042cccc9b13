"""Images under tensor and pipeline parallelism, against each sample alone in transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from image_prompts import image_model, tolerance
from image_updates import LOSS, alone, samples

from hybridrl.config import (
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    TrainerConfig,
    TrainLayoutConfig,
    Vision,
)
from hybridrl.engines.probe import compare_gradients
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.flops import ForwardFlops
from hybridrl.models.image_text import TOWER
from hybridrl.models.vision import pixel_reader, vision_tower

Case = tuple[str, Vision, TrainLayoutConfig]
ZERO_BUBBLE = TrainLayoutConfig(pp=2, schedule=PipelineSchedule.zero_bubble)
TWO_RANKS: dict[str, Case] = {
    "frozen, tp": ("qwen3_vl_moe", Vision.frozen, TrainLayoutConfig(tp=2)),
    "frozen, pp": ("qwen3_vl", Vision.frozen, TrainLayoutConfig(pp=2)),
    "trained, tp": ("qwen3_vl", Vision.train, TrainLayoutConfig(tp=2)),
    "trained, pp": ("qwen3_5", Vision.train, TrainLayoutConfig(pp=2)),
    "trained, V": ("qwen3_vl", Vision.train, ZERO_BUBBLE),
}
FOUR_RANKS: dict[str, Case] = {
    "trained, tp x pp": ("qwen3_vl_moe", Vision.train, TrainLayoutConfig(tp=2, pp=2)),
}
# So few tokens a row that some have no image.
SETTINGS = {"optim": OptimConfig(lr=1e-2, clip_grad_norm=0.0), "max_tokens_per_micro_batch": 25}


def step(path: Path, vision: Vision, layout: TrainLayoutConfig, own: list[TrainSequence]) -> Any:
    """Scores, gradients and metrics of a step, the new tower, and whether images were read."""
    vision_tower.cache_clear()
    pixel_reader.cache_clear()
    engine = TrainEngine(
        str(path),
        model=ModelConfig(vision=vision),
        trainer=TrainerConfig(layout=layout, **SETTINGS),
        device=torch.device("cpu"),
    )
    mine = own[dist.get_rank() :: dist.get_world_size()]
    scores, gradients = engine.log_probs(mine), {}

    def before_step(*_: Any) -> None:
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                gradients[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    metrics = engine.update(mine, LOSS)
    metrics["flops"] -= 3 * sum(ForwardFlops.of(engine.model.config)(len(x.ids), 5) for x in own)
    tower = {name: x for name, x in engine.weights() if name.startswith(TOWER)}
    reads = vision_tower.cache_info().misses + pixel_reader.cache_info().misses > 0
    return scores, gradients, metrics, tower, reads


def steps(
    cases: list[Case], paths: dict[str, Path], sequences: dict[str, list[TrainSequence]]
) -> list[Any]:
    return [step(paths[family], *how, sequences[family]) for family, *how in cases]


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("num_ranks", "named"), [(2, TWO_RANKS), pytest.param(4, FOUR_RANKS, marks=pytest.mark.wide)]
)
def test_a_step_is_that_of_each_sample_alone(
    ranks: Any, tmp_path: Path, num_ranks: int, named: dict[str, Case]
) -> None:
    """Gradients, of the tower too, and metrics; a stage without embedding reads no image."""
    cases = [*named.values()]
    families = sorted({family for family, _, _ in cases})
    models = {f: image_model(f, tmp_path / f, num_key_value_heads=2) for f in families}
    sequences = {family: samples(model) for family, model in models.items()}
    wanted = {family: alone(model, sequences[family]) for family, model in models.items()}
    paths = {f: model.path for f, model in models.items()}
    results = ranks(num_ranks, steps, cases, paths, sequences)
    for (family, vision, layout), *of_ranks in zip(cases, *results, strict=True):
        scores, all_gradients = wanted[family]
        trains = vision is Vision.train
        expected = {k: v for k, v in all_gradients.items() if trains or not k.startswith(TOWER)}
        names = set[str]()
        for rank, (own, gradients, _, _, _) in enumerate(of_ranks):
            for one, other in zip(own, scores[rank::num_ranks], strict=True):
                torch.testing.assert_close(one, other, atol=tolerance(family), rtol=0)
            got = {name: x[: len(expected[name])] for name, x in gradients.items()}  # no padding
            of_rank = {name: expected[name] for name in got}
            assert compare_gradients(got, of_rank, 1e-4) is None, (family, vision, layout)
            names |= got.keys()
        assert names == expected.keys()
        norm = torch.stack([x.norm() for x in expected.values()]).norm()
        of_tower = sum(models[family].tower.flops(x.images) for x in sequences[family])
        towers = [tower for _, _, _, tower, _ in of_ranks]
        for _, _, metrics, _, _ in of_ranks:
            assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
            assert metrics["flops"] == pytest.approx((3 if trains else 1) * of_tower, abs=10_000)
        embeds = [rank < num_ranks // layout.pp for rank in range(num_ranks)]
        assert [reads for *_, reads in of_ranks] == embeds
        before = models[family].whole.state_dict()
        for tower in towers:
            assert (len(tower) > 20) == trains
            assert tower.keys() == towers[0].keys()
            assert all(torch.equal(x, towers[0][name]) for name, x in tower.items())
            assert not any(torch.equal(x, before[name]) for name, x in tower.items())
