import math

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

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


def both_optimizers():
    """Parameters after three steps, by torch on DTensors and by our step on their shards."""
    generator = torch.Generator().manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    cuts = [(mesh, [Shard(0), Shard(1)]), (mesh, [Shard(0), Replicate()]), (mesh["tp"], [Shard(0)])]
    full = [torch.randn(shape, generator=generator) for shape in ((6, 4), (3,), (1, 8))]
    gradients = [torch.randn_like(tensor) for tensor in full for _ in range(3)]
    config = OptimConfig(lr=0.1, betas=[0.9, 0.95], weight_decay=0.1)
    settings = {"lr": 0.1, "betas": (0.9, 0.95), "eps": config.eps, "weight_decay": 0.1}
    ends = []
    for ours in (False, True):
        parameters = [
            torch.nn.Parameter(distribute_tensor(tensor, *cut))
            for tensor, cut in zip(full, cuts, strict=True)
        ]
        if ours:
            optimizer, _ = make_optimizer(parameters, config, 3)
        else:  # torch takes the parameters of one mesh at a time
            groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
            optimizer = torch.optim.AdamW(groups, **settings, fused=True)
        for step in range(3):
            for number, (parameter, cut) in enumerate(zip(parameters, cuts, strict=True)):
                parameter.grad = distribute_tensor(gradients[3 * number + step], *cut)
            optimizer.step()
        states = [optimizer.state[parameter] for parameter in parameters]
        ends.append(
            [parameter.full_tensor().detach() for parameter in parameters]
            + [state[name].full_tensor() for state in states for name in ("exp_avg", "exp_avg_sq")]
            + [state["step"] for state in states]
        )
    return ends


@pytest.mark.long
def test_a_step_equals_torch_bit_for_bit(ranks):
    for torchs, ours in ranks(4, both_optimizers):
        for want, got in zip(torchs, ours, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0)
