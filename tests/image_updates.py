"""Samples with and without images to train on, and a step on each alone in transformers' model."""

from typing import Any

import torch
from image_prompts import A, B, C, ImageModel
from surrogate_loss import Surrogate
from transformers import AutoModelForImageTextToText

from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.image_text import own_name

LOSS = Surrogate(entropy_bonus=0.0)
PROMPTS = [(4, (A,), 0), (12, (), 1), (3, (B, A), 2), (4, (C,), 0), (4, (A,), 0), (5, (), 3)]
"""An image, none, two, another picture of the first prompt, and a sample of its group."""


def samples(model: ImageModel) -> list[TrainSequence]:
    sequences = []
    for number, (length, images, seed) in enumerate(PROMPTS):
        draw = torch.Generator().manual_seed(number)
        prompt, response = (
            model.prompt(length, images, seed),
            torch.randint(3, 59, (5,), generator=draw),
        )
        fields = {
            "advantages": float(torch.randn((), generator=draw)),
            "old_log_probs": torch.full((5,), -3.0),
        }
        ids = torch.tensor([*prompt, *response.tolist()])
        sequences.append(TrainSequence(ids, 5, fields, images=images))
    return sequences


def alone(model: ImageModel, sequences: list[TrainSequence]) -> Any:
    """Log-probabilities and gradients of transformers' own model in float64, sample by sample."""
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    whole = AutoModelForImageTextToText.from_pretrained(model.path, **eager).double().eval()
    double = ImageModel(model.path, whole, model.tower)
    scores, tokens = [], sum(x.response_tokens for x in sequences)
    for x in sequences:
        log_probs = double.log_probs(x.ids, x.images, x.response_tokens)
        fields = {
            "advantages": torch.tensor(x.fields["advantages"]),
            "old_log_probs": x.fields["old_log_probs"],
        }
        (LOSS(log_probs, None, fields)[0].sum() / tokens).backward()
        scores.append(log_probs.detach().float())
    gradients = {
        own: p.grad.float()
        for name, p in whole.named_parameters()
        if (own := own_name(name)) is not None and p.grad is not None
    }
    return scores, gradients
