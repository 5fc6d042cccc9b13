"""The peak of a device: what its products of large matrices reach. Imports torch when called."""

import statistics
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CPU_WIDTH, _GPU_WIDTH = 512, 8192
_CALLS = 5


def measure_peak(device: "torch.device", dtype: "torch.dtype") -> float:
    """Floating-point operations a second of a product of square matrices; takes below a second.

    With the threads that torch has. The median of five products, after one that warms up.
    """
    import torch

    width = _GPU_WIDTH if device.type == "cuda" else _CPU_WIDTH
    # Not the process's own random state, and no constants: these take less power on a GPU.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(width, width, generator=generator, device=device, dtype=dtype) for _ in range(2)
    )
    out, seconds = torch.empty_like(a), []
    for _ in range(1 + _CALLS):
        _wait(device)
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * width**3 / statistics.median(seconds[1:])


def _wait(device: "torch.device") -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
