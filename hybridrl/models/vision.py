"""The tower that makes features of images: frozen, or a part of the model that trains.

A frozen one has the same weights on every rank, once a process, and neither gradients nor the
switch know of it. One that trains is a part of the model (`image_text.attach_tower`): a pass that
may have gradients computes features anew, and generation keeps those of its present weights. An
image goes through a tower alone, so that its features do not depend on others, bit for bit.
"""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.models.buffers import fill_buffers
from hybridrl.models.flops import TowerFlops
from hybridrl.models.image_files import Images, digest_of
from hybridrl.models.image_text import has_tower, language_config, meta_tower, whole_model
from hybridrl.models.images import (
    Grid,
    ImageProcessor,
    ImageTokens,
    Patches,
    PlacedImages,
    RowImages,
    RowPixels,
    image_config,
    tower_features,
)
from hybridrl.models.quantized import dequantized
from hybridrl.models.weight_files import first_few, open_file, weight_files

_PREFIXES = ("model.visual.", "visual.")
"""Before the names of a tower's tensors in files."""
KEPT_BYTES = 1 << 28
"""Features, or pixels, that a process keeps of images seen lately: those of a step's prompts are
used again by each of its samples and stages."""


class ImageReader:
    """Places the images of prompts for the model at `path`, on a stage that embeds no tokens.

    Subclasses read them, and keep what they make of images seen lately, by the digest of their
    bytes.
    """

    def __init__(self, path: str) -> None:
        """Read the settings. Raises ValueError for a model without a tower."""
        config = image_config(path)
        if config is None:
            raise ValueError(f"{path} has no image tower that is computed")
        self.tokens = ImageTokens.of(config)
        self._processor = ImageProcessor(path)
        self._image_flops = TowerFlops.of(meta_tower(language_config(config)))
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._kept_bytes = 0

    def row(self, pads: torch.Tensor, images: Images) -> RowImages | RowPixels | None:
        """The `images` of a row's prompts, whose pads are at these places [pads] in it.

        None on a stage that embeds no tokens: it gets hidden states.
        """
        return None

    def grid(self, image: bytes) -> Grid:
        """How many patches an image has."""
        return self._processor.grid(image)

    def flops(self, images: Images) -> int:
        """Operations of a forward pass over a prompt's images, whether features are kept or not."""
        return sum(self._image_flops(math.prod(self.grid(image))) for image in images)

    def placed(self, ids: Sequence[int], images: Images) -> PlacedImages:
        """The images of a prompt of these `ids`."""
        return PlacedImages.of(ids, images, self.tokens, list(map(self.grid, images)))

    def _recent(self, image: bytes, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What is kept of an image, or what is made and kept now."""
        key = digest_of(image)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        tensor = self._kept[key] = make()
        self._kept_bytes += tensor.nbytes
        while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.nbytes
        return tensor


class PixelReader(ImageReader):
    """Reads the pixels of images for a tower that is a part of the model and computes in a pass."""

    def row(self, pads: torch.Tensor, images: Images) -> RowPixels:
        """See `ImageReader.row`."""
        places, start = dict[bytes, torch.Tensor](), 0
        for image in dict.fromkeys(images):
            stop = start + self.tokens.num_pads(self.grid(image))
            places[image] = torch.arange(start, stop)
            start = stop
        of_pads = torch.cat([places[image] for image in images])
        return RowPixels(pads, of_pads, tuple(map(self.patches, places)))

    def patches(self, image: bytes) -> Patches:
        """The pixels of an image on the host, and how many patches it has."""
        pixels = self._recent(image, lambda: self._processor.patches(image)[0])
        return Patches(pixels, self.grid(image))


class VisionTower(ImageReader):
    """The image tower of the model at `path`, with its processor, for passes without gradients.

    Attention over an image is SDPA, in both directions. Features of images seen lately are kept, by
    the digest of their bytes.
    """

    def __init__(
        self,
        path: str,
        dtype: torch.dtype,
        device: torch.device,
        model: PreTrainedModel | None = None,
    ) -> None:
        """Read the tower, whose weights stay as they are; or compute with those of a `model`.

        After these have changed, `forget` follows. Raises ValueError for a model without a tower,
        or whose files lack a part or have another.
        """
        super().__init__(path)
        self.device = device
        self._model = _read_tower(path, dtype).to(device) if model is None else model

    def row(self, pads: torch.Tensor, images: Images) -> RowImages:
        """See `ImageReader.row`."""
        return RowImages(pads, self.features(images))

    def features(self, images: Images) -> torch.Tensor:
        """Features [pads, 1 + deep, hidden] of a prompt's images; see `RowImages`."""
        return torch.cat([self.image_features(image) for image in images])

    def image_features(self, image: bytes) -> torch.Tensor:
        """Features [pads, 1 + deep, hidden] of one image, which are kept: not to be written."""
        return self._recent(image, functools.partial(self._compute, image))

    def forget(self) -> None:
        """Drop all features, which are those of other weights."""
        self._kept.clear()
        self._kept_bytes = 0

    @torch.no_grad()
    def _compute(self, image: bytes) -> torch.Tensor:
        patches = Patches(*self._processor.patches(image))
        return tower_features(self._model, patches.to(self.device))


Tower = Callable[[], ImageReader]
"""Gives what reads the images of an engine's model, once the first image comes."""


def tower_of(
    config: PretrainedConfig, dtype: torch.dtype, device: torch.device, embeds: bool
) -> Tower:
    """What reads images for the model with this `config` (`models.load.load_config`).

    It gives features of a frozen tower, or pixels for one that is a part of the model; without
    `embeds`, on a stage that gets hidden states, neither.
    """
    path = config.name_or_path
    if not embeds:
        return functools.partial(image_reader, path)
    if has_tower(config):
        return functools.partial(pixel_reader, path)
    return functools.partial(vision_tower, path, dtype, device)


@functools.cache
def vision_tower(path: str, dtype: torch.dtype, device: torch.device) -> VisionTower:
    """The process's frozen tower of the model at `path`: its engines and roles share it."""
    return VisionTower(path, dtype, device)


@functools.cache
def pixel_reader(path: str) -> PixelReader:
    """The process's reader of pixels for the model at `path`."""
    return PixelReader(path)


@functools.cache
def image_reader(path: str) -> ImageReader:
    """What places images for the model at `path` on the process's stages without embedding."""
    return ImageReader(path)


def check_tower(path: str) -> None:
    """Raise ValueError or OSError for a directory whose frozen tower could not be read.

    No tensor is read. Ranks fetch a hub's model and check it as they read it.
    """
    if Path(path).is_dir():
        with ExitStack() as files:
            _tower_slices(path, _meta_tower(path), files)


def _meta_tower(path: str) -> PreTrainedModel:
    whole: Any = whole_model(path)
    model: PreTrainedModel = whole.model.visual
    return model


def _tower_slices(path: str, model: PreTrainedModel, files: ExitStack) -> dict[str, Any]:
    """The slices of the tower's tensors by their names in `model`, which are complete."""
    opened: dict[Path, Any] = {}
    stored = {}
    for name, file in weight_files(path).items():
        for prefix in _PREFIXES:
            if name.startswith(prefix):
                if file not in opened:
                    opened[file] = files.enter_context(open_file(file))
                stored[name.removeprefix(prefix)] = opened[file].get_slice(name)
    stored, wanted = dequantized(stored, path), model.state_dict()
    if missing := sorted(wanted.keys() - stored.keys()):
        raise ValueError(f"{path}: the image tower lacks {first_few(missing)}")
    if others := sorted(stored.keys() - wanted.keys()):
        raise ValueError(f"{path}: the image tower has no {first_few(others)}, which its files do")
    for name, tensor in wanted.items():
        if (shape := list(stored[name].get_shape())) != list(tensor.shape):
            allowed = f"{path}: the image tower's {name} has the shape {shape}"
            raise ValueError(f"{allowed}, wanted {list(tensor.shape)}")
    return stored


def _read_tower(path: str, dtype: torch.dtype) -> PreTrainedModel:
    model = _meta_tower(path)
    model.set_attn_implementation("sdpa")  # not causal, as packed rows' is
    with ExitStack() as files:
        slices = _tower_slices(path, model, files)
        tensors = {name: tensor[...].to(dtype) for name, tensor in slices.items()}
    model.load_state_dict(tensors, assign=True)
    fill_buffers(model, torch.device("cpu"))
    return model.eval().requires_grad_(False)
