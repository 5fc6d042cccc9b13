"""Shortcuts past torch's fake tensors, with equal results.

FakeTensorMode hashes the metadata of all arguments for its cache, makes an empty tensor and sets
its storage. Dispatch modes are wrapped for a compiler that no dry run starts.
"""

import inspect
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from hybridrl.models.activations import PeakMemory

DEVICE = torch.ops.prim.device.default
"""`x.device`, as C++ asks for it: several times for an index."""
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def no_compiler() -> None:
    """Take the compiler's wrappers off the modes of a dry run."""
    for mode in (FakeTensorMode, MemTracker):
        raw = mode.__dict__["__torch_dispatch__"]
        mode.__torch_dispatch__ = inspect.unwrap(raw)


def fake_view(mode: FakeTensorMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The result of a view of a fake tensor, which is on the tensor's device.

    NotImplemented where another mode's tensor, or a constant, is viewed.
    """
    base = args[0]
    if type(base) is not FakeTensor or base.fake_mode is not mode or base.constant is not None:
        return NotImplemented
    with in_kernel_invocation_manager(mode):
        out = func(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return FakeTensor(mode, out, base.fake_device)
    return [FakeTensor(mode, x, base.fake_device) for x in out]


class FakeResults:
    """Runs operations on fake tensors, and knows the results of those that it has run before.

    A result is that of the operation, the shapes, strides, dtypes and devices of its tensors and
    its other arguments. Operations of aten are known that return new tensors, or their first
    argument. An error is never known, so each call raises it.

    Example: after `add([2, 3], [3])` in bfloat16, the next one makes an empty [2, 3] tensor.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._known: dict[Any, list[Any]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`func(*args, **kwargs)` under the mode."""
        kind = _kind_of_result(func)
        key = kind and self._key((func, args, tuple(kwargs.items()), torch.get_default_dtype()))
        known = self._known.get(key) if key else None
        if known is not None:
            return args[0] if kind == "first" else self._new(known)
        with self._mode:
            out = func(*args, **kwargs)
        if key and (kind == "first" or self._is_plain(out)):
            self._known[key] = [] if kind == "first" else [_metadata(out), out.fake_device]
        return out

    def _new(self, known: list[Any]) -> FakeTensor:
        (shape, stride, dtype), device = known
        with in_kernel_invocation_manager(self._mode):
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self._mode, empty, device)

    def _is_plain(self, out: Any) -> bool:
        """Whether a tensor is the whole of its storage."""
        if type(out) is not FakeTensor or out.constant is not None:
            return False
        again = self._new([_metadata(out), out.fake_device])
        return again.untyped_storage().nbytes() == out.untyped_storage().nbytes()

    def _key(self, value: Any) -> Any:
        """A hashable value that is another where the result may be; None where none is known."""
        if isinstance(value, torch.Tensor):
            if not isinstance(value, FakeTensor) or value.fake_mode is not self._mode:
                return None
            return None if value.constant is not None else (_metadata(value), value.fake_device)
        if isinstance(value, list | tuple):
            keys = tuple(map(self._key, value))
            return None if None in keys else keys
        return type(value), value  # True == 1 == 1.0


def _metadata(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


@cache
def _kind_of_result(func: Any) -> str:
    """`new` for a new tensor, `first` for the first argument; empty for all others."""
    returns, arguments = func._schema.returns, func._schema.arguments
    if func.namespace != "aten" or len(returns) != 1 or str(returns[0].type) != "Tensor":
        return ""
    if torch.Tag.inplace_view in func.tags or func._schema.name in ("aten::set_", "aten::resize_"):
        return ""
    written = [a.alias_info for a in arguments if a.alias_info is not None]
    if not written and returns[0].alias_info is None:
        return "new"
    first, returned = arguments[0].alias_info, returns[0].alias_info
    if len(written) != 1 or first is None or returned is None or not first.is_write:
        return ""
    return "first" if first.before_set == returned.before_set else ""


class FakePeakMemory(PeakMemory):
    """`PeakMemory` without a search through all modes and a function for each tensor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        if DTensor in types or func is torch.ops._c10d_functional.wait_tensor.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        out = func(*args, **(kwargs or {}))
        if torch._C._get_dispatch_mode(_FAKE) is None:
            for x in (out,) if isinstance(out, torch.Tensor) else tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    self._track(_MemRefType.ACT, x)
            self._update_peak_stats(None)
        return out
