import math

import pytest
import torch

from hybridrl.config import LRSchedule, OptimConfig
from hybridrl.engines.train.optim import lr_factor, make_optimizer


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        (LRSchedule.constant, [0.5, 1, 1, 1, 1, 1, 1, 1]),
        (LRSchedule.linear, [0.5, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (
            LRSchedule.cosine,
            [0.5, 1] + [0.2 + 0.8 * (1 + math.cos(math.pi * min(i, 4) / 4)) / 2 for i in range(6)],
        ),
    ],
)
def test_schedules(schedule, want):
    config = OptimConfig(lr=3.0, schedule=schedule, warmup_steps=2, min_lr_ratio=0.2)
    got = [lr_factor(step, config, total_steps=6) for step in range(8)]
    assert got == pytest.approx(want)
    optimizer, scheduler = make_optimizer([torch.nn.Parameter(torch.ones(2))], config, 6)
    rates = []
    for _ in range(8):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([3 * factor for factor in want])
