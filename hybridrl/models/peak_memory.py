"""Bytes of tensors on a device, now and at most, whether the device exists or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
        self._peak_mem = {}

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within, nothing changes the peak."""
        before, self._peak_mem = self._peak_mem, {}
        try:
            yield
        finally:
            self._peak_mem = before

    def allocated(self, device: str) -> int:
        """Bytes on devices of this type now."""
        snapshot = self._curr_mem_snap
        return sum(sizes["Total"] for place, sizes in snapshot.items() if place.type == device)

    def peak(self, device: str) -> int:
        """Most bytes since `restart`."""
        most = sum(size for place, size in self._peak_mem.items() if place.type == device)
        return max(most, self.allocated(device))

    def _update_peak_stats(self, peak_state: Any) -> None:
        """The totals alone: torch copies its account of all kinds at each new peak."""
        for place, sizes in self._curr_mem_snap.items():
            if self._peak_mem.get(place, 0) < sizes["Total"]:
                self._peak_mem[place] = sizes["Total"]
