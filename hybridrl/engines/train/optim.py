"""AdamW and the learning rate over the steps."""

import math
from collections.abc import Iterable

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from hybridrl.config import LRSchedule, OptimConfig


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter],
    config: OptimConfig,
    total_steps: int,
    steps_done: int = 0,
) -> tuple[AdamW, LambdaLR]:
    """AdamW (Loshchilov and Hutter 2019) on `parameters`, and its schedule, stepped once a step.

    The schedule begins after `steps_done` of `total_steps`; the moments begin at zero.
    """
    optimizer = AdamW(
        parameters,
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = config.lr
    last = steps_done - 1
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, config, total_steps), last)


def lr_factor(step: int, config: OptimConfig, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0), relative to the peak.

    Warm-up rises to 1 over `warmup_steps`. Until `total_steps` the rate is constant, or falls to
    `min_lr_ratio` along a line or half a cosine. Then it keeps the last value.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule is LRSchedule.constant:
        return 1.0
    done = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    left = 1 - done if config.schedule is LRSchedule.linear else (1 + math.cos(math.pi * done)) / 2
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * left
