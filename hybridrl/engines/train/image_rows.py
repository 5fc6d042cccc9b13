"""Rows whose prompts have images: rotary positions, and the features in place of pads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.vision import VisionTower, vision_tower

Tower = Callable[[], VisionTower]
"""Gives the tower of an engine's model, which is read when the first image comes."""


def tower_of(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> Tower:
    """The tower of the model whose text part has this `config` (`models.load.load_config`)."""
    return partial(vision_tower, config.name_or_path, dtype, device)


@dataclass(frozen=True, slots=True)
class RowImages:
    """The images of a row's prompts; `PlacedImages` has those of one prompt.

    `pads` [pads] are their places in the row, ascending, and `features` [pads, 1 + deep, hidden]
    what stands there, then what is added behind each of the first `deep` layers.
    """

    pads: torch.Tensor
    features: torch.Tensor

    def inputs(self, embeddings: torch.Tensor) -> dict[str, Any]:
        """What the text model takes in place of ids, from their `embeddings` [1, tokens, hidden]."""
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
        """They on another device."""
        return RowImages(self.pads.to(device), self.features.to(device))


def place_images(
    members: Sequence[TrainSequence], positions: torch.Tensor, tower: Tower | None
) -> tuple[torch.Tensor, RowImages | None]:
    """Positions of a row's tokens, and its images; of `members` without any as they are, and None.

    `positions` [tokens] are the numbers of the tokens of `members`, one after the other. With
    images they are [4, tokens], with the rotary positions behind them.
    """
    if not any(member.images for member in members):
        return positions, None
    assert tower is not None, "sequences with images"
    start, pads, features = 0, [], []
    rotations = positions.expand(3, -1).clone()
    for member in members:
        length = member.ids.shape[0]
        if member.images:
            prompt = member.ids[: length - member.response_tokens].tolist()
            placed = tower().placed(prompt, member.images)
            rotations[:, start : start + length] = torch.from_numpy(placed.at(0, length))
            pads.append(torch.from_numpy(placed.pads) + start)
            features.append(placed.features)
        start += length
    images = RowImages(torch.cat(pads), torch.cat(features))
    return torch.cat([positions[None], rotations]), images


def sharing_prompts(images: RowImages, places: torch.Tensor) -> RowImages:
    """The images of a row that has shared prompts once: `places` are those of its tokens there."""
    pads, first = np.unique(places[images.pads].numpy(), return_index=True)
    return RowImages(torch.from_numpy(pads), images.features[torch.from_numpy(first)])
