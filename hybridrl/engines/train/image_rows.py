"""Rows whose prompts have images: rotary positions, and the features in place of pads."""

from collections.abc import Sequence

import numpy as np
import torch

from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.images import RowImages, RowPixels
from hybridrl.models.vision import Tower


def place_images(
    members: Sequence[TrainSequence], positions: torch.Tensor, tower: Tower | None
) -> tuple[torch.Tensor, RowImages | RowPixels | None]:
    """Positions of a row's tokens, and its images; of `members` without any as they are, and None.

    `positions` [tokens] are the numbers of the tokens of `members`, one after the other. With
    images they are [4, tokens], with the rotary positions behind them. The images themselves are
    None on a stage that embeds no tokens.
    """
    if not any(member.images for member in members):
        return positions, None
    assert tower is not None, "sequences with images"
    start, pads = 0, []
    rotations = positions.expand(3, -1).clone()
    for member in members:
        length = member.ids.shape[0]
        if member.images:
            prompt = member.ids[: length - member.response_tokens].tolist()
            placed = tower().placed(prompt, member.images)
            rotations[:, start : start + length] = torch.from_numpy(placed.at(0, length))
            pads.append(torch.from_numpy(placed.pads) + start)
        start += length
    images = tuple(image for member in members for image in member.images)
    return torch.cat([positions[None], rotations]), tower().row(torch.cat(pads), images)


def check_images_came(sequences: Sequence[TrainSequence], pads: Sequence[int]) -> None:
    """Raise ValueError for a prompt with some of the `pads`, and no images: it lost them.

    Where a sequence is `ended`, its response cannot be told from its prompt.
    """
    for number, sequence in enumerate(sequences if pads else ()):
        if sequence.images or sequence.is_ended:
            continue
        prompt = sequence.ids[: sequence.ids.shape[0] - sequence.response_tokens]
        if lost := int(torch.isin(prompt, torch.tensor(pads)).sum()):
            raise ValueError(
                f"sequence {number} of {len(sequences)}, of {len(sequence.ids)} tokens, has {lost} "
                "pads of images, and no images came with it"
            )


def sharing_prompts(images: RowImages | RowPixels, places: torch.Tensor) -> RowImages | RowPixels:
    """The images of a row that has shared prompts once: `places` are those of its tokens there."""
    pads, first = np.unique(places[images.pads].numpy(), return_index=True)
    return images.chosen(torch.from_numpy(pads), torch.from_numpy(first))
