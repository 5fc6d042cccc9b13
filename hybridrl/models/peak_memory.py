"""Bytes of tensors on a device, now and at most, whether the device exists or not."""

from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode


class PeakMemory(MemTracker):
    """torch's MemTracker without its accounts by module, which refuse a second micro-batch.

    Within `with` it counts the storages that operations create, on `meta` and fake devices too.
    """

    def __enter__(self) -> "PeakMemory":
        self._fake_mode_on_entry = None
        self._track_resize()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *args: Any) -> None:
        self._restore_resize()
        TorchDispatchMode.__exit__(self, *args)

    def restart(self) -> None:
        """Forget the peak so far."""
        self._peak_mem, self._peak_mem_snap = {}, {}

    def allocated(self, device: str) -> int:
        """Bytes on devices of this type now."""
        return _total(self.get_tracker_snapshot(), device)

    def peak(self, device: str) -> int:
        """Most bytes since `restart`."""
        return max(_total(self.get_tracker_snapshot("peak"), device), self.allocated(device))


def _total(snapshot: dict[torch.device, dict[str, int]], device: str) -> int:
    return sum(sizes["Total"] for place, sizes in snapshot.items() if place.type == device)
