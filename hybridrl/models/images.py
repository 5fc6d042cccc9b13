"""Images in prompts: how many tokens one takes, and at which positions the tokens of a prompt are.

An image of a Qwen3-VL takes a pad token for each square of `merge` x `merge` patches, row by row.
Rotary positions have three numbers (multimodal RoPE, arXiv 2409.12191): text counts all three
alike, and the pads of an image have their row and column in the second and third. Tokens behind an
image go on at its larger side, so that they are at their number plus a `delta` of 0 or less. Caches
and masks count tokens.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.models.config_json import IMAGE_FAMILIES
from hybridrl.models.image_files import Images
from hybridrl.models.image_text import whole_config

if TYPE_CHECKING:
    from PIL.Image import Image

Grid = tuple[int, int, int]
"""Patches of an image: frames, of which it has one, rows and columns."""
Positions = npt.NDArray[np.int64]
_TURNED = (5, 6, 7, 8)
"""Orientations of EXIF in which rows of the file are columns of the picture."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of a model's images: ids, and `merge`, the side of a pad's square in patches."""

    image: int
    video: int
    start: int
    end: int
    merge: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "ImageTokens":
        """Return the tokens of a model with a tower (`image_config`)."""
        return cls(
            image=config.image_token_id,
            video=config.video_token_id,
            start=config.vision_start_token_id,
            end=config.vision_end_token_id,
            merge=config.vision_config.spatial_merge_size,
        )

    def num_pads(self, grid: Grid) -> int:
        """The tokens that an image of this many patches takes."""
        frames, rows, columns = grid
        return frames * rows * columns // self.merge**2

    def expanded(self, ids: Sequence[int], grids: Sequence[Grid]) -> tuple[int, ...]:
        """A prompt's ids with the pads of each image in place of its one.

        Raises ValueError where it has another number of pads than images.
        """
        if (num_pads := list(ids).count(self.image)) != len(grids):
            raise ValueError(f"{num_pads} image tokens for {len(grids)} images")
        sizes = iter(map(self.num_pads, grids))
        expanded: list[int] = []
        for id in ids:
            expanded += [id] * next(sizes) if id == self.image else [id]
        return tuple(expanded)


def image_config(path: str) -> PretrainedConfig | None:
    """The config of the model at `path` with its tower; None where its images are not computed."""
    config = whole_config(path)
    return config if config is not None and config.model_type in IMAGE_FAMILIES else None


def read_picture(image: bytes) -> "Image":
    """An encoded image in RGB: upright, as its EXIF says, and on white where it is transparent.

    Raises ValueError for bytes that Pillow cannot read, for an animation, and for values that are
    not of 8 bits, which RGB would cut off.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(image)) as opened:
            # A camera's MPO has the same scene again, smaller or from the side.
            frames = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
            mode, picture = opened.mode, ImageOps.exif_transpose(opened)
        if picture.has_transparency_data:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        picture = picture.convert("RGB")
    except Exception as error:  # readers raise many kinds for bytes that are cut off
        raise ValueError(f"no image that Pillow reads: {error}") from error
    if frames > 1:
        raise ValueError(f"{frames} frames, and a picture has one")
    if mode.startswith(("I", "F")):
        raise ValueError(f"mode {mode}, and values of 8 bits are read")
    return picture


def picture_size(image: bytes) -> tuple[int, int]:
    """Width and height of what `read_picture` reads, from the metadata of the file."""
    from PIL import ExifTags, Image

    with Image.open(io.BytesIO(image)) as opened:
        width, height = opened.size
        turned = opened.getexif().get(ExifTags.Base.Orientation) in _TURNED
    return (height, width) if turned else (width, height)


class ImageProcessor:
    """Makes patches of encoded images, as transformers' processor of the model does with Pillow."""

    def __init__(self, path: str) -> None:
        """Read the settings in the directory `path`, or of a hub's model.

        Raises OSError where there are none.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(path)

    def patches(self, image: bytes) -> tuple[torch.Tensor, Grid]:
        """Pixels [patches, channels * frames * side * side], and how many patches there are.

        Raises ValueError for what `read_picture` refuses, and for sides of a ratio above 200.
        """
        inputs = self._processor(images=[read_picture(image)], return_tensors="np")
        frames, rows, columns = map(int, inputs["image_grid_thw"][0])
        return torch.from_numpy(inputs["pixel_values"]).float(), (frames, rows, columns)

    def grid(self, image: bytes) -> Grid:
        """How many patches an image that can be read has: see `picture_size`."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        width, height = picture_size(image)
        own = self._processor
        if own.do_resize:
            side, least, most = own.patch_size, own.size.shortest_edge, own.size.longest_edge
            height, width = smart_resize(height, width, side * own.merge_size, least, most)
        return 1, height // own.patch_size, width // own.patch_size


@dataclass(frozen=True, slots=True, eq=False)
class PlacedImages:
    """The `images` of one prompt among its tokens.

    `rotations` [3, prompt tokens] are the rotary positions of its tokens; a token behind the prompt
    is at its number + `delta` in all three. `pads` [pads] are the numbers of the pads.

    *Example.* Two tokens, an image of 2 x 3 pads, a token: `rotations` are 0 1, 2 2 2 2 2 2, 5 and
    0 1, 2 2 2 3 3 3, 5 and 0 1, 2 3 4 2 3 4, 5. The ninth token is at 5, so `delta` is -3.
    """

    images: Images
    rotations: Positions
    delta: int
    pads: Positions

    @classmethod
    def of(
        cls, ids: Sequence[int], images: Images, tokens: ImageTokens, grids: Sequence[Grid]
    ) -> "PlacedImages":
        """Place images of these patches in a prompt of the expanded `ids`."""
        all_ids = np.asarray(ids, np.int64)
        pads = np.flatnonzero(all_ids == tokens.image)
        assert len(pads) == sum(map(tokens.num_pads, grids)), "pads of the images"
        rotations, delta = rotary_positions(len(all_ids), pads, tokens, grids)
        return cls(images, rotations, delta, pads)

    def at(self, start: int, stop: int) -> Positions:
        """Rotary positions [3, stop - start] of the tokens from `start` on."""
        inside = self.rotations[:, start:stop]
        behind = np.arange(max(start, self.rotations.shape[1]), stop) + self.delta
        return np.concatenate([inside, np.broadcast_to(behind, (3, len(behind)))], 1)

    def within(self, start: int, stop: int) -> slice:
        """Which of the pads are among the tokens from `start` on."""
        first, last = np.searchsorted(self.pads, [start, stop])
        return slice(int(first), int(last))


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of the prompts in a row: what the text model takes for them.

    `pads` [pads] are their places in the row, ascending. `features` [pads, 1 + deep, hidden] are
    what stands there in place of embeddings, then what is added behind each of the first `deep`
    layers (DeepStack, arXiv 2406.04334).
    """

    pads: torch.Tensor
    features: torch.Tensor

    def computed(self, tower: PreTrainedModel | None) -> "RowImages":
        """The images with their features: a frozen tower has made them."""
        return self

    def chosen(self, pads: torch.Tensor, numbers: torch.Tensor) -> "RowImages":
        """The pads of these `numbers` [chosen], which are at other places [chosen]."""
        return RowImages(pads, self.features[numbers])

    def inputs(self, embeddings: torch.Tensor) -> dict[str, Any]:
        """What the text model takes for ids, from their `embeddings` [1, tokens, hidden]."""
        features = self.features.to(embeddings.dtype)
        embeddings = embeddings.index_copy(1, self.pads, features[None, :, 0])
        inputs: dict[str, Any] = {"inputs_embeds": embeddings}
        if features.shape[1] > 1:
            mask = torch.zeros(embeddings.shape[:2], dtype=torch.bool, device=self.pads.device)
            mask[:, self.pads] = True
            deep = list(features[:, 1:].unbind(1))
            inputs |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
        return inputs

    def to(self, device: torch.device) -> "RowImages":
        """Return the images on another device."""
        return RowImages(self.pads.to(device), self.features.to(device))


@dataclass(frozen=True, slots=True)
class Patches:
    """The `pixels` [patches, channels * frames * side * side] of an image, and its `grid`."""

    pixels: torch.Tensor
    grid: Grid

    def to(self, device: torch.device) -> "Patches":
        """Return the pixels on another device."""
        return Patches(self.pixels.to(device), self.grid)


@dataclass(frozen=True, slots=True)
class RowPixels:
    """The images of the prompts in a row, for a tower that is a part of the model.

    `pads` [pads] are those of `RowImages`. `images` are the different ones; `places` [pads] says
    which of their features, one image after the other, each pad has. Pixels are on the host until a
    pass computes them.
    """

    pads: torch.Tensor
    places: torch.Tensor
    images: tuple[Patches, ...]

    def computed(self, tower: PreTrainedModel | None) -> RowImages:
        """The images with their features, which have gradients where the `tower` does."""
        assert tower is not None, "pixels for a tower that is no part of the model"
        device = self.pads.device
        features = torch.cat([tower_features(tower, image.to(device)) for image in self.images])
        return RowImages(self.pads, features.index_select(0, self.places))

    def chosen(self, pads: torch.Tensor, numbers: torch.Tensor) -> "RowPixels":
        """See `RowImages.chosen`."""
        return RowPixels(pads, self.places[numbers], self.images)

    def to(self, device: torch.device) -> "RowPixels":
        """Return the row's places on another device."""
        return RowPixels(self.pads.to(device), self.places.to(device), self.images)


def tower_features(tower: PreTrainedModel, patches: Patches) -> torch.Tensor:
    """Features [pads, 1 + deep, hidden] of an image by a `tower`; see `RowImages`."""
    grids = torch.tensor([patches.grid], device=patches.pixels.device)
    dtype = next(tower.parameters()).dtype
    outputs = tower(patches.pixels.to(dtype), grid_thw=grids)
    deep = getattr(outputs, "deepstack_features", None) or ()
    return torch.stack([outputs.pooler_output, *deep], 1)


def idle_tower(tower: PreTrainedModel) -> torch.Tensor:
    """A zero [] that every weight of a `tower` is in, for a row without images.

    Ranks sum the gradients of all weights, so each of them has some: zeros here.
    """
    weights = (x.to_local() if isinstance(x, DTensor) else x for x in tower.parameters())
    return torch.stack([weight.flatten()[0] for weight in weights]).sum() * 0


def rotary_positions(
    num_tokens: int, pads: Positions, tokens: ImageTokens, grids: Sequence[Grid]
) -> tuple[Positions, int]:
    """Rotary positions [3, tokens] of a prompt with `pads` at these numbers, and the `delta`.

    They are those of transformers' `get_rope_index`.
    """
    rotations = np.zeros((3, num_tokens), np.int64)
    number = position = done = 0
    for frames, rows, columns in grids:
        height, width = rows // tokens.merge, columns // tokens.merge
        size = frames * height * width
        first = int(pads[done])
        before = np.arange(first - number)
        rotations[:, number:first] = position + before
        position += first - number
        inner = np.indices((frames, height, width)).reshape(3, size)
        rotations[:, first : first + size] = position + inner
        position += max(height, width)
        number, done = first + size, done + size
    rotations[:, number:] = position + np.arange(num_tokens - number)
    return rotations, position - number
