"""What a rank holds: on its accelerator, and in the host's memory."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What a process held at `when` (Unix seconds), in bytes by kind.

    `resident` is host memory that is in use (RSS). On an accelerator also `allocated` and
    `reserved`, by PyTorch's own allocator in this process, and of the whole device, with all that
    others have there, `free` and `total`.
    """

    when: float
    held: dict[str, int]


def measure_memory(device: "torch.device") -> MemoryReading:
    """What this process and its device hold now. Takes some 10 us and does not synchronize."""
    held = {"resident": int(psutil.Process().memory_info().rss)}
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
