"""torch's own record of what a rank does in a step: operations for the trace, memory of a GPU."""

from pathlib import Path

import torch
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from hybridrl.telemetry.trace import ThreadSlice

MAX_SLICES = 50_000
"""The longest operations of a rank and step that are kept; Perfetto is slow with many more."""
_MAX_ALLOCATIONS = 100_000


class StepProfile:
    """Records from its creation to `end`, on all threads of the process."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_gpu]
        every_thread = _ExperimentalConfig(profile_all_threads=True)
        self._profiler = profile(activities=kinds, experimental_config=every_thread)
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        self._profiler.start()

    def end(self, snapshot: Path) -> list[ThreadSlice]:
        """The longest operations by start; on a GPU its allocations go to the file `snapshot`."""
        self._profiler.stop()
        if self._on_gpu:
            snapshot.parent.mkdir(parents=True, exist_ok=True)
            partial = snapshot.with_name(f".{snapshot.name}")
            torch.cuda.memory._dump_snapshot(str(partial))
            partial.replace(snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
        assert self._profiler.profiler is not None
        results = self._profiler.profiler.kineto_results
        assert results is not None
        events = sorted(results.events(), key=lambda event: -event.duration_ns())[:MAX_SLICES]
        slices = [
            ThreadSlice(
                event.name(),
                event.start_ns() / 1e9,
                event.end_ns() / 1e9,
                thread=f"stream {event.device_resource_id()}"
                if event.device_type() == DeviceType.CUDA
                else f"thread {event.start_thread_id()}",
            )
            for event in events
        ]
        return sorted(slices, key=lambda one: (one.start, -one.end))
