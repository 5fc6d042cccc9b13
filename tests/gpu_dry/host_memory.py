"""Which host memory is pinned: a GPU copies from it and to it while the host goes on.

Memory is pinned by torch's `pin_memory()` and `pin_memory=True`, and by a copy from the device that
torch is asked not to wait for. `cudaHostRegister` pins memory that is there already.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_REGISTERED: dict[int, int] = {}
"""Bytes by address, of all that `cudaHostRegister` has pinned."""


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, whose memory is pinned from now on; all views of it see that."""
    storage: Any = tensor.untyped_storage()
    storage.is_pinned_here = True
    return tensor


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether the memory of a host tensor is pinned."""
    storage = tensor.untyped_storage()
    if getattr(storage, "is_pinned_here", False):
        return True
    address = storage._cdata if isinstance(tensor, FakeTensor) else storage.data_ptr()
    return _REGISTERED.get(address, -1) >= storage.nbytes()


def cudart() -> SimpleNamespace:
    """The functions of CUDA's runtime that pin memory, in place of `torch.cuda.cudart`."""
    return SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister)


def _register(address: int, size: int, _: int) -> int:
    assert address not in _REGISTERED, "CUDA refuses to register memory twice"
    _REGISTERED[address] = size
    return 0


def _unregister(address: int) -> int:
    del _REGISTERED[address]
    return 0
