"""Memory of a rank: on its accelerator and on the host."""

import gc
import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of a process at `when` (Unix seconds), in bytes by kind.

    `resident` is host memory in use (RSS). On an accelerator also `allocated` and `reserved`, by
    PyTorch's allocator in this process, and `free` and `total`, of the device with all processes.
    """

    when: float
    held: dict[str, int]


def measure_memory(device: "torch.device") -> MemoryReading:
    """Memory of this process and its device now. Takes some 10 us and does not synchronize."""
    held = {"resident": resident_bytes()}
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(device)
        held |= {
            "allocated": torch.cuda.memory_allocated(device),
            "reserved": torch.cuda.memory_reserved(device),
            "free": free,
            "total": total,
        }
    return MemoryReading(time.time(), held)


def free_cached_memory(device: "torch.device") -> None:
    """Give freed memory back to the device, for the next process that allocates there.

    First running kernels must end, then torch's cached memory goes.
    """
    if device.type == "cuda":
        import torch

        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def resident_bytes() -> int:
    """Host memory that this process uses now (RSS)."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
