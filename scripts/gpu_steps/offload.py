"""Seconds and bytes a second of moving the training state to the host and back."""

import torch
from torch.distributed.tensor import DTensor

from gpu_steps.figures import Figures
from gpu_steps.ranks import one_rank, run_config
from gpu_steps.sizes import sizes_of
from gpu_steps.steps import Settings
from gpu_steps.timing import seconds
from gpu_steps.training import sequences, train_engine
from hybridrl.algorithms.losses import ReinforceLoss
from hybridrl.engines.train.engine import TrainEngine

_ROUNDS = 2


def measure(settings: Settings, figures: Figures) -> None:
    """Master weights and moments, after an optimizer step has made them."""
    with one_rank(settings) as device:
        engine = train_engine(run_config(settings), device)
        engine.update(sequences(sizes_of(settings), micro_batches=1), ReinforceLoss())
        size = _state_bytes(engine)
        out, back = [], []
        for _ in range(_ROUNDS):
            out.append(seconds(engine.offload, device))
            back.append(seconds(engine.onload, device))
    for name, took in (("offload", min(out)), ("onload", min(back))):
        figures.add(f"{name}_s", took, "s", bytes=size)
        figures.add(f"{name}_rate", size / took / 1e9, "GB/s")


def _state_bytes(engine: TrainEngine) -> int:
    """Bytes of this rank's master weights and moments."""
    parameters = engine.trained_parameters()
    moments = [v for state in engine.optimizer.state.values() for v in state.values()]
    tensors = [x for x in (*parameters, *moments) if isinstance(x, torch.Tensor) and x.ndim]
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)
