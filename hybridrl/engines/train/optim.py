"""The optimizers, and the learning rate over the steps."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybridrl.config import LRSchedule, OptimConfig, OptimName
from hybridrl.engines.train.adamw import ShardedAdamW, local_shard
from hybridrl.engines.train.muon import MatrixOwners, Muon

STATE = "exp_avg", "exp_avg_sq", "momentum_buffer"
"""Tensors of a parameter's shape that an optimizer may have for it."""


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    config: OptimConfig,
    total_steps: int,
    steps_done: int = 0,
    owners: MatrixOwners | None = None,
) -> tuple[Optimizer, LambdaLR]:
    """The optimizer of `parameters`, and its schedule, stepped once a step.

    AdamW (Loshchilov and Hutter 2019) by its name in `config`, or `Muon` on the matrices of
    `owners`. The schedule begins after `steps_done` of `total_steps`; the state begins at zero.
    """
    settings: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.betas[0], config.betas[1]),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    optimizer: Optimizer
    match config.name:
        case OptimName.adamw:
            optimizer = ShardedAdamW(parameters, **settings, fused=True)
        case OptimName.adamw8bit:
            from hybridrl.engines.train.adamw8bit import ShardedAdamW8bit

            optimizer = ShardedAdamW8bit(parameters, **settings)
        case OptimName.muon:
            assert owners is not None, "Muon needs the owners of matrices"
            optimizer = Muon(parameters, owners, **settings, fused=True)
    for group in optimizer.param_groups:
        group["initial_lr"] = config.lr
    last = steps_done - 1
    return optimizer, LambdaLR(optimizer, lambda step: lr_factor(step, config, total_steps), last)


def moment_names(group: dict[str, Any]) -> tuple[str, ...]:
    """The moments of a parameter of an optimizer's group, where they are as the parameter is."""
    return ("momentum_buffer",) if "momentum" in group else ("exp_avg", "exp_avg_sq")


def own_moments(
    optimizer: Optimizer, parameter: nn.Parameter, steps: int
) -> dict[str, torch.Tensor] | None:
    """The state after `steps` steps, of an optimizer with moments of its own kind; else None."""
    zeros = getattr(optimizer, "zeros", None)
    return None if zeros is None else zeros(parameter, steps)


def dequantized(tensor: torch.Tensor) -> torch.Tensor:
    """Moments of 8 bits as float32 in host memory; any other tensor itself."""
    local = local_shard(tensor)
    if not is_traceable_wrapper_subclass(local):
        return tensor
    values = local.dequantize().cpu()
    return DTensor(values, tensor._spec, requires_grad=False)


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
