"""What each choice of `trainer.activations` costs: seconds of an update, and its peak memory."""

import gc
from functools import partial

from gpu_steps.figures import Figures
from gpu_steps.memory import PeakMeter
from gpu_steps.ranks import one_rank, run_config
from gpu_steps.sizes import sizes_of
from gpu_steps.steps import Settings
from gpu_steps.timing import median_seconds
from gpu_steps.training import sequences, train_engine
from hybridrl.algorithms.losses import ReinforceLoss
from hybridrl.config import ActivationMode
from hybridrl.system.memory import free_cached_memory

_ROUNDS = 3


def measure(settings: Settings, figures: Figures) -> None:
    """An update of two packed rows under each of them."""
    rows = sequences(sizes_of(settings))
    with one_rank(settings) as device:
        for mode in (m for m in ActivationMode if m is not ActivationMode.auto):
            config = run_config(settings)
            config.trainer.activations = mode
            engine = train_engine(config, device)
            update = partial(engine.update, rows, ReinforceLoss())
            update()  # makes the moments, and pinned memory
            meter = PeakMeter(device)
            took = median_seconds(update, device, _ROUNDS)
            peak = meter.take().get("allocated", 0) / 2**30
            figures.add(f"activations_{mode.value}", took, "s", peak_gib=round(peak, 2))
            del engine, update
            gc.collect()
            free_cached_memory(device)
