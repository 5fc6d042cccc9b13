"""Prompts with images for tiny checkpoints, and transformers' own log-probabilities."""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_checkpoints import image_checkpoint
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedModel

from hybridrl.models.image_files import Images
from hybridrl.models.images import PlacedImages
from hybridrl.models.vision import VisionTower

TOKENS = {
    "image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62,
    "vision_end_token_id": 63,
}  # fmt: skip
FAMILIES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


def tolerance(family: str) -> float:
    """Largest difference of a log-probability; Gated DeltaNet rounds more."""
    return 1e-4 if family.startswith("qwen3_5") else 1e-5


@dataclass(frozen=True)
class ImageModel:
    """A checkpoint at `path`, the whole model in transformers' eager form, and its tower here."""

    path: Path
    whole: PreTrainedModel
    tower: VisionTower

    def inputs(self, ids: torch.Tensor, images: Images) -> dict[str, Any]:
        """What the whole model takes of a prompt, or of one with its response."""
        inputs: dict[str, Any] = {
            "input_ids": ids[None],
            "mm_token_type_ids": (ids == TOKENS["image_token_id"]).int()[None],
        }
        if images:
            pixels, grids = zip(*map(self.tower._processor.patches, images), strict=True)
            inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(grids)}
        return inputs

    def log_probs(self, ids: torch.Tensor, images: Images, response: int) -> torch.Tensor:
        """Return those of the last `response` of the `ids`, [response], with gradients."""
        logits = self.whole(**self.inputs(ids, images), use_cache=False).logits[0, :-1]
        of_tokens = logits.float().log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return of_tokens[len(of_tokens) - response :]

    def prompt(self, length: int, images: Images, seed: int) -> list[int]:
        """Text, an image, text, and so on: `length` tokens of text around each image."""
        draw = torch.Generator().manual_seed(seed)
        ids: list[int] = []
        for image in (*images, None):
            ids += torch.randint(3, 59, (length,), generator=draw).tolist()
            if image is not None:
                pads = self.tower.tokens.num_pads(self.tower._processor.grid(image))
                ids += [62, *[60] * pads, 63]
        return ids

    def placed(self, ids: list[int], images: Images) -> PlacedImages:
        return self.tower.placed(ids, images)


def image_model(family: str, folder: Path, **changed: object) -> ImageModel:
    """A model of a family, whose weights make peaked distributions, in `folder`."""
    path = image_checkpoint(family, folder, **changed)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | TOKENS))
    size = {"shortest_edge": 64, "longest_edge": 128**2}
    processor = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    whole = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    if not family.startswith("qwen3_5"):  # more peaked, so that a wrong position shows
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                if "norm" in name:
                    parameter.add_(1)
                elif parameter.dim() > 1:
                    parameter.mul_(1.5)
        whole.save_pretrained(path)
    return ImageModel(path, whole, VisionTower(str(path), torch.float32, torch.device("cpu")))


def picture(width: int, height: int, seed: int) -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


A, B, C = picture(24, 24, 0), picture(40, 16, 1), picture(24, 24, 2)
