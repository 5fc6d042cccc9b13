"""torch's CPU build with a CUDA device that holds nothing: `load` before torch, then `install`.

`load` builds `fake_cuda.cpp` (2 seconds of g++, once a torch) and loads it. `install` replaces
the host side of `torch.cuda`, which a CPU build lacks: streams, events, memory, random states.
Both change the process for good, so a dry run is a process of its own.
"""

import ctypes
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SOURCE = Path(__file__).with_suffix(".cpp")
MEMORY_BYTES = 80 * 2**30
_KERNELS: list[Any] = []
"""Libraries of kernels, which torch forgets with their object."""
PROPERTIES = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


def load() -> None:
    """Load the device's guard and hooks; torch must not be imported yet."""
    assert "torch" not in sys.modules, "torch asks for its CUDA hooks once, at import"
    ctypes.CDLL(str(_build()))


def _build() -> Path:
    """The compiled library of this source and this torch, made once."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations
    torch = Path(spec.submodule_search_locations[0])
    folder = SOURCE.parents[2] / ".cache" / "gpu_dry"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"fake_cuda_{version('torch')}.so"
    if library.exists() and library.stat().st_mtime > SOURCE.stat().st_mtime:
        return library
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch) / "fake_cuda.so"
        command = ["g++", "-O0", "-shared", "-fPIC", "-std=c++20", f"-I{torch / 'include'}"]
        command += [str(SOURCE), "-o", str(built), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, f"-Wl,-rpath,{torch / 'lib'}"], check=True)
        built.replace(library)  # whole or not at all: two dry runs may build
    return library


class Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> "Event":
        return self

    def wait(self, *_: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "Event") -> float:
        return 0.0


class Stream:
    """A CUDA stream with nothing in it."""

    stream_id, device_index, device_type = 0, 0, 1

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: "Stream") -> None:
        pass

    def wait_event(self, _: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def install(synchronized: Callable[[str], None]) -> None:
    """Replace the host side of `torch.cuda`; `synchronized` hears of each wait for the device."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from gpu_dry.host_memory import cudart

    cuda: Any = torch.cuda
    only = Stream()
    Event.synchronize = lambda self: synchronized("event.synchronize")
    Stream.synchronize = lambda self: synchronized("stream.synchronize")
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda *_: only,
        "default_stream": lambda *_: only,
        "device_of": lambda tensor: nullcontext(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: synchronized("torch.cuda.synchronize"),
        "empty_cache": lambda: None,
        "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "get_device_properties": lambda device: PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: None,
        "manual_seed_all": lambda seed: None,
        "cudart": cudart,
    }
    for name, stand_in in replaced.items():
        assert hasattr(cuda, name), f"torch.cuda has no {name}"
        setattr(cuda, name, stand_in)
    torch.Tensor.record_stream = lambda self, stream: None
    torch.version.cuda = "13.0"
    torch.backends.cuda.is_flash_attention_available = lambda: True  # as CUDA builds have it
    # One kernel on CUDA; where a device has none, torch takes it apart, with more memory.
    _KERNELS.append(torch.library.Library("aten", "IMPL", "CUDA"))
    _KERNELS[-1].impl("silu_backward", lambda grad, x: torch.empty_like(x))
    # Fake tensors would run a kernel to start the device.
    FakeTensorMode.avoid_device_init = property(lambda self: True)
