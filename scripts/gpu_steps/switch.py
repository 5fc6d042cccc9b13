"""Seconds and bytes a second of the weight switch, on one rank and on all of the machine."""

from typing import Any

import torch
import torch.distributed as dist

from gpu_steps.figures import Figures
from gpu_steps.ranks import ActorRank, on_ranks, one_rank, run_config
from gpu_steps.steps import Settings
from gpu_steps.timing import seconds
from hybridrl.layout.weight_switch import SwitchStats
from hybridrl.system.memory import free_cached_memory

_ROUNDS = 3
_CPU_RANKS = 2


def measure(settings: Settings, figures: Figures) -> None:
    """From FSDP over the ranks to whole replicas, and to replicas of two ranks."""
    with one_rank(settings) as device:
        _report(_switch(device, settings, 1, 1), figures)
        free_cached_memory(device)  # other ranks come to this GPU
    most = settings.gpus if settings.device == "cuda" else _CPU_RANKS
    if most == 1:
        figures.skip("switch_between_ranks", "there is one GPU")
        return
    for result in on_ranks(most, settings, switches_on_ranks, most):
        _report(result, figures)


def _report(result: dict[str, Any], figures: Figures) -> None:
    ranks, gen_tp, took, size = (result[x] for x in ("ranks", "gen_tp", "seconds", "bytes"))
    name = f"switch_{ranks}_to_{ranks // gen_tp}x{gen_tp}"
    about = {x: result[x] for x in ("path", "received", "received_theory")}
    figures.add(f"{name}_s", took, "s", ranks=ranks, gen_tp=gen_tp, **about)
    figures.add(f"{name}_rate", size / took / 1e9, "GB/s", bytes=size, counts="weights written")
    parts = "onload, wake, switch, offload"
    figures.add(f"{name}_enter_generation_s", result["enter"], "s", counts=parts)


def switches_on_ranks(device: torch.device, settings: Settings, ranks: int) -> list[dict[str, Any]]:
    """To replicas of one rank, and of two."""
    results = []
    for gen_tp in (1, 2):
        if ranks % gen_tp == 0:
            results.append(_switch(device, settings, ranks, gen_tp))
            free_cached_memory(device)
    return results


def _switch(device: torch.device, settings: Settings, ranks: int, gen_tp: int) -> dict[str, Any]:
    """The slowest rank's quickest switch, and its second entry into generation."""
    rank = ActorRank(run_config(settings, ranks=ranks, gen_tp=gen_tp), device)
    actor, residency = rank.actor, rank.residency
    switches: list[SwitchStats] = []
    with residency.entering_generation(rank.trainer.train_engine):
        for _ in range(_ROUNDS):
            stats = actor.switch_weights(wakes=True)
            assert stats is not None
            switches.append(stats)
    residency.enter_training()
    enter = seconds(rank.switch, device)
    slowest = torch.tensor([min(stats.seconds for stats in switches), enter], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    layout = actor.switch_plan.plan.dst
    held = sum(box.size for name in layout.rules for box in layout.local(name, dist.get_rank()))
    rank.generator.close()
    return {
        "ranks": ranks,
        "gen_tp": gen_tp,
        "seconds": slowest[0].item(),
        "enter": slowest[1].item(),
        "bytes": held * torch.bfloat16.itemsize,
        "received": switches[-1].bytes_received,
        "received_theory": switches[-1].bytes_theory,
        "path": switches[-1].path,
    }
