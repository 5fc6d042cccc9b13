"""Host memory that a GPU copies from and to without a wait of the host."""

import weakref

import torch


def pinned_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Zeros [size] uint8 in host memory, pinned for `device`; ordinary memory where it is a CPU.

    Ordinary memory is registered with CUDA. The allocator of pinned memory in torch would round the
    size up to a power of two. Then 12 GB would take 16.
    """
    memory = torch.zeros(size, dtype=torch.uint8)
    if device.type == "cuda" and size:
        from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

        pin_memory(memory.data_ptr(), size)
        weakref.finalize(memory.untyped_storage(), unpin_memory, memory.data_ptr()).atexit = False
    return memory
