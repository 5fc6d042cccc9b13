"""Small arrays of a step on their way to the device and back.

A copy from ordinary memory, or to it, makes the host wait until all earlier work of the device is
done. These copies use pinned memory: the host waits only where it reads what the device computed.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

_ALIGNMENT = 8  # bytes of the largest numbers


def upload(arrays: Mapping[str, Array], device: torch.device) -> dict[str, torch.Tensor]:
    """The arrays as tensors on `device`, in one copy that the host does not wait for.

    On a CPU they share the arrays' memory.
    """
    if device.type == "cpu":
        return {n: torch.from_numpy(np.ascontiguousarray(array)) for n, array in arrays.items()}
    # torch gives pinned memory to others only once the copies from it are done.
    packed = torch.from_numpy(pack(arrays)).pin_memory()
    return unpack(packed.to(device, non_blocking=True), arrays)


def pack(arrays: Mapping[str, Array]) -> npt.NDArray[np.uint8]:
    """All bytes of the arrays, in one array."""
    sizes = _sizes(arrays)
    packed = np.zeros(sum(sizes), np.uint8)
    for array, start in zip(arrays.values(), accumulate([0, *sizes[:-1]]), strict=True):
        own = np.ascontiguousarray(array).reshape(-1)
        packed[start : start + array.nbytes] = own.view(np.uint8)
    return packed


def unpack(packed: torch.Tensor, arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Views of `packed` bytes that have the shapes and types of the arrays."""
    pieces = packed.split(_sizes(arrays))
    return {
        name: piece[: array.nbytes].view(_dtype(array)).view(array.shape)
        for (name, array), piece in zip(arrays.items(), pieces, strict=True)
    }


def _sizes(arrays: Mapping[str, Array]) -> list[int]:
    return [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays.values()]


def _dtype(array: Array) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype)).dtype


class Download:
    """Tensors on their way to the host; `wait` waits for all of them at once.

    Work that the device gets in between does not delay them.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._copied: torch.cuda.Event | None = None
        if any(tensor.is_cuda for tensor in tensors):
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> list[torch.Tensor]:
        """The tensors on the host."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        return self._copies
