"""What the memory plan counts of images, against storages that torch's tracker sees."""

import copy

import pytest
import torch
from image_prompts import A, B, ImageModel, image_model, picture

from hybridrl.config import Attention
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import pack
from hybridrl.models.activations import PeakMemory
from hybridrl.models.images import Patches, tower_features
from hybridrl.models.load import load_config
from hybridrl.models.tower_sizes import (
    tower_activations,
    tower_sizes,
    trained_tower_activations,
)
from hybridrl.models.vision import VisionTower

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ImageModel:
    return image_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tower_takes_what_is_counted(model: ImageModel, dtype: torch.dtype) -> None:
    tower, config = VisionTower(str(model.path), dtype, CPU), load_config(str(model.path))
    sizes, weights = tower_sizes(config), tower._model
    assert tower_sizes(copy.deepcopy(config)) is sizes
    assert sizes.parameters * dtype.itemsize == sum(x.nbytes for x in weights.parameters())
    memory = PeakMemory()
    memory.track_external(weights)
    before = memory.allocated("cpu")
    with memory:
        features = tower.features((picture(96, 96, 0),))
        peak = memory.peak("cpu") - before
    pads = 12 * 12
    assert features.numel() == pads * sizes.features
    patches = pads * sizes.patches_per_pad
    counted = tower_activations(config, patches, dtype=dtype, on_cpu=True)
    assert counted == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tower_that_trains_takes_what_is_counted(model: ImageModel, dtype: torch.dtype) -> None:
    """Kept until the backward pass, and most within it."""
    tower, config = VisionTower(str(model.path), dtype, CPU), load_config(str(model.path))
    weights = tower._model.requires_grad_(True)
    pixels, grid = tower._processor.patches(picture(96, 96, 0))
    memory = PeakMemory()
    memory.track_external(weights)
    before = memory.allocated("cpu")
    with memory:
        features = tower_features(weights, Patches(pixels.clone(), grid))
        kept = memory.allocated("cpu") - before - features.nbytes
        memory.restart()
        features.backward(torch.ones_like(features))
        backward = memory.peak("cpu") - before - features.nbytes
    patches = 12 * 12 * tower_sizes(config).patches_per_pad
    counted = trained_tower_activations(config, patches, dtype=dtype, on_cpu=True)
    assert counted.kept == pytest.approx(kept, rel=0.05)
    assert counted.backward == pytest.approx(backward, rel=0.05)


def test_rows_have_the_features_of_all_their_pads(model: ImageModel) -> None:
    sizes, images = tower_sizes(load_config(str(model.path))), [(A,), (B, A), ()]
    members, pads = [], 0
    for seed, own in enumerate(images):
        prompt = model.prompt(3, own, seed)
        pads += prompt.count(model.tower.tokens.image)
        members.append(TrainSequence(torch.tensor([*prompt, 4, 5]), 2, images=own))
    row = pack(members, Attention.torch, CPU, tower=lambda: model.tower)
    assert row.images is not None
    assert row.images.features.nbytes == pads * sizes.features * 4
