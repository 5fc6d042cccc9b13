"""Seconds and bytes a second of moving the training state to the host and back."""

import time
from collections.abc import Callable

import torch

from gpu_steps.figures import Figures
from gpu_steps.ranks import one_rank, run_config
from gpu_steps.sizes import sizes_of
from gpu_steps.steps import Settings
from gpu_steps.timing import seconds, synchronize
from gpu_steps.training import sequences, train_engine
from hybridrl.algorithms.losses import ReinforceLoss

_ROUNDS = 3


def measure(settings: Settings, figures: Figures) -> None:
    """Master weights and moments, after an optimizer step has made them.

    The first time the host memory is allocated and pinned, once for the run.
    """
    with one_rank(settings) as device:
        engine = train_engine(run_config(settings), device)
        engine.update(sequences(sizes_of(settings), micro_batches=1), ReinforceLoss())
        size = engine.memory.nbytes
        first = seconds(engine.offload, device)
        engine.onload()
        out, back, launches = [], [], []
        for _ in range(_ROUNDS):
            engine.memory.changed()  # as an update does; else nothing is copied
            out.append(seconds(engine.offload, device))
            back.append(seconds(engine.onload, device))
            engine.memory.changed()
            launches.append(_launch(engine.offload, device) + _launch(engine.onload, device))
    for name, took in (("offload", min(out)), ("onload", min(back))):
        figures.add(f"{name}_s", took, "s", bytes=size)
        figures.add(f"{name}_rate", size / took / 1e9, "GB/s")
    figures.add("offload_first_s", first, "s", bytes=size)
    figures.add("offload_launch_s", min(launches), "s")


def _launch(call: Callable[[], None], device: torch.device) -> float:
    """Seconds until the call returns, while its copies may be under way."""
    synchronize(device)
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
