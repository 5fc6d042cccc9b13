"""Dropout of adapters in an update."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def enabled_dropout(
    modules: Sequence[nn.Dropout], device: torch.device, version: int
) -> Iterator[None]:
    """Enable `modules`, seeded by `version` and rank, so that a resumed run repeats the update."""
    if not any(module.p for module in modules):
        yield
        return
    # Of this device alone: by default torch saves the states of every GPU that it sees.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(version * dist.get_world_size() + dist.get_rank())
        for module in modules:
            module.train()
        yield
        for module in modules:
            module.eval()
