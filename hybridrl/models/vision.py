"""The tower that makes features of images, frozen: the same weights on every rank, once a process.

Neither gradients nor the switch know of it. An image goes through it alone, so that its features
do not depend on others, bit for bit, and both engines and all samples of a group share them.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.models.buffers import fill_buffers
from hybridrl.models.flops import TowerFlops
from hybridrl.models.image_files import Images, digest_of
from hybridrl.models.image_text import whole_model
from hybridrl.models.images import ImageProcessor, ImageTokens, PlacedImages, image_config
from hybridrl.models.weight_files import first_few, open_file, weight_files

_PREFIXES = ("model.visual.", "visual.")
"""Before the names of a tower's tensors in files."""
KEPT_BYTES = 1 << 28
"""Features that a process keeps of images seen lately: those of a step's prompts are used again by
each of its samples and stages."""


class VisionTower:
    """The image tower of the model at `path`, with its processor; its own weights stay as they are.

    Attention over an image is SDPA, in both directions. Features of images seen lately are kept, by
    the digest of their bytes.
    """

    def __init__(self, path: str, dtype: torch.dtype, device: torch.device) -> None:
        """Read the tower. Raises ValueError for a model without one, or whose files
        lack a part or have another."""
        config = image_config(path)
        if config is None:
            raise ValueError(f"{path} has no image tower that is computed")
        self.tokens, self.device = ImageTokens.of(config), device
        self._processor = ImageProcessor(path)
        self._model = _read_tower(path, dtype).to(device)
        self._image_flops = TowerFlops.of(self._model)
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._kept_bytes = 0

    def features(self, images: Images) -> torch.Tensor:
        """Features [pads, 1 + deep, hidden] of a prompt's images; see `RowImages`."""
        return torch.cat([self._of_image(image) for image in images])

    @torch.no_grad()
    def _of_image(self, image: bytes) -> torch.Tensor:
        key = digest_of(image)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        pixels, grid = self._processor.patches(image)
        grids = torch.tensor([grid], device=self.device)
        outputs = self._model(pixels.to(self.device, self._model.dtype), grid_thw=grids)
        deep = getattr(outputs, "deepstack_features", None) or ()
        features = torch.stack([outputs.pooler_output, *deep], 1)
        self._kept[key] = features
        self._kept_bytes += features.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes
        return features

    def flops(self, images: Images) -> int:
        """Operations of a forward pass over a prompt's images, whether features are kept or not."""
        return sum(self._image_flops(math.prod(self._processor.grid(image))) for image in images)

    def placed(self, ids: Sequence[int], images: Images) -> PlacedImages:
        """The images of a prompt of these `ids`."""
        return PlacedImages.of(ids, images, self.tokens, list(map(self._processor.grid, images)))


Tower = Callable[[], VisionTower]
"""Gives the tower of an engine's model, which is read when the first image comes."""


def tower_of(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Tower:
    """The tower of the model whose text part has this `config` (`models.load.load_config`)."""
    return functools.partial(vision_tower, config.name_or_path, dtype, device)


@functools.cache
def vision_tower(path: str, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """The process's tower of the model at `path`: its engines and roles share it."""
    return VisionTower(path, dtype, device)


def _read_tower(path: str, dtype: torch.dtype) -> PreTrainedModel:
    whole: Any = whole_model(path)
    model: PreTrainedModel = whole.model.visual
    model.set_attn_implementation("sdpa")  # not causal, as packed rows' is
    tensors = {}
    for name, file in weight_files(path).items():
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                with open_file(file) as opened:
                    tensors[name.removeprefix(prefix)] = opened.get_tensor(name).to(dtype)
    if missing := sorted(set(model.state_dict()) - set(tensors)):
        raise ValueError(f"{path}: the image tower lacks {first_few(missing)}")
    if others := sorted(set(tensors) - set(model.state_dict())):  # such as scales of a quantization
        raise ValueError(f"{path}: the image tower has no {first_few(others)}, which its files do")
    model.load_state_dict(tensors, assign=True)
    fill_buffers(model, torch.device("cpu"))
    return model.eval().requires_grad_(False)
