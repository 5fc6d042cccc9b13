"""A dispatch mode under which CUDA tensors are fake and CPU tensors are real.

So host code computes with its own numbers, while every operation on the device is checked for
shapes, dtypes and devices and counted. What the host reads from the device:

- `tolist`, `item`, `int`, `bool` and copies to the host are counted as reads of the function that
  makes them, and get plausible values (`FakeDevice.integer`, 0.5, True). Some functions need
  another number in a list (`FakeDevice.answers`);
- `if tensor:`, `nonzero`, an index by a mask and other operations whose shape depends on values
  raise. So does what torch refuses under `deterministic=strict` (`refused`).

Large copies to the host stay fake, so that offloaded weights take no memory.
"""

import linecache
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpu_dry.host_memory import is_pinned, pinned
from gpu_dry.refused import refusal
from gpu_dry.shortcuts import DEVICE, FakePeakMemory, FakeResults, fake_view, no_compiler

ROOT = Path(__file__).parents[2]
ROOMS = tuple(f"{ROOT / room}/" for room in ("hybridrl", "kernels"))
READABLE = 2**16
"""Copies to the host of at most so many elements become real tensors, which hosts read."""

_PLAIN = {FakeTensor, torch.Tensor, torch.nn.Parameter}
_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
"""Fake ones take any dtypes."""
ATTENTION = ("counted_attention", "attention_backward", "_varlen_attn", "_varlen_attn_backward")
"""The fake kernels of `world`, and the operators of torch's `varlen_attn`."""
_VIEWS = {"_unsafe_view", "_reshape_alias", "lift_fresh", "detach", "set_"}
_IS_PINNED, _PIN = torch.ops.aten.is_pinned.default, torch.ops.aten._pin_memory.default


@dataclass(slots=True)
class Counts:
    """The work of one phase.

    `kernels` are operations dispatched on the device besides views and allocations. `collectives`
    are calls of process groups with tensors on the device. `syncs` are waits of the host, by
    function and kind: `read` (device to host), `upload` (host to device), `wait`, `pageable`. The
    last is a copy that was not to be waited for, but whose host memory is not pinned. `copies` are
    those between host and device that the host does not wait for, by function: `out` and `in`.
    `replays` are those of CUDA graphs, with `replayed` of the kernels. `peak` is the most bytes on
    the device.
    """

    kernels: int = 0
    replays: int = 0
    replayed: int = 0
    collectives: int = 0
    syncs: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    by_name: Counter[str] = field(default_factory=Counter)

    @property
    def attention(self) -> int:
        """Calls of attention over a packed row, or a block of it, forward and backward."""
        return sum(self.by_name[name] for name in ATTENTION)

    def summary(self) -> dict[str, Any]:
        """As JSON, without names of kernels and memory; `copies` and graphs where there are any."""
        figures = asdict(self)
        del figures["by_name"], figures["peak"]
        del figures["copies"]
        if not self.replays:
            del figures["replays"], figures["replayed"]
        copies = {"copies": dict(sorted(self.copies.items()))} if self.copies else {}
        return figures | {"syncs": dict(sorted(self.syncs.items()))} | copies


class HiddenSync(RuntimeError):
    """The host takes a decision by a value on the device."""


class FakeDevice(TorchDispatchMode):
    """See the module. `integer` is the value of every integer that the host reads.

    Functions in `answers`, by `caller()`, get another one in their lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._results = FakeResults(self.fake)
        self.integer = 1
        self.answers: dict[str, int] = {}
        self.counts = Counts()
        self.captures = False
        self.memory = FakePeakMemory()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled

    @contextmanager
    def phase(self, counts: dict[str, Counts], name: str) -> Iterator[Counts]:
        """Count what the body does under `name`."""
        before, self.counts = self.counts, Counts()
        counts[name] = self.counts
        self.memory.restart()
        yield self.counts
        self.counts.peak = self.memory.peak("cuda")
        self.counts = before

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What the body does is part of no phase."""
        before, self.counts = self.counts, Counts()
        with self.memory.unchanged():
            yield
        self.counts = before

    def launch(self, name: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
        """A kernel that torch does not dispatch, perhaps with its `arguments` by name."""
        self.counts.kernels += 1
        self.counts.by_name[name] += 1

    @contextmanager
    def capture(self) -> Iterator[Counts]:
        """Note the kernels that the body launches, and its collectives: replays run them."""
        before, self.counts, self.captures = self.counts, Counts(), True
        try:
            yield self.counts
            assert not self.counts.copies, "a graph copies between host and device"
        finally:
            self.counts, self.captures = before, False

    def replay(self, captured: Counts) -> None:
        """Launch the kernels of a graph, and its collectives."""
        self.counts.replays += 1
        self.counts.replayed += captured.kernels
        self.counts.kernels += captured.kernels
        self.counts.collectives += captured.collectives
        self.counts.by_name += captured.by_name

    def sync(self, kind: str) -> None:
        """The host waits for the device."""
        if self.captures:
            raise HiddenSync(f"{caller()}: {kind} in the capture of a CUDA graph")
        self.counts.syncs[f"{caller()}: {kind}"] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is DEVICE:
            return args[0].device
        if func is _IS_PINNED:
            return is_pinned(args[0])
        kwargs = kwargs or {}
        if not _PLAIN.issuperset(types):
            return NotImplemented
        if torch.is_inference_mode_enabled() and _is_composite(func):
            # Elsewhere autograd takes it apart before this mode sees it.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        fakes = FakeTensor in types
        if fakes and _is_view(func):
            viewed = fake_view(self.fake, func, args, kwargs)
            if viewed is not NotImplemented:
                return viewed
        if kwargs.get("pin_memory"):  # a CPU build has no memory to pin
            ordinary = kwargs | {"pin_memory": False}
            return pinned(self.__torch_dispatch__(func, types, args, ordinary))
        if func is _PIN:
            return pinned(args[0].clone())
        target = kwargs.get("device")
        if not fakes and not (target is not None and torch.device(target).type == "cuda"):
            return self._on_host(func, args, kwargs)
        name = func._overloadpacket.__name__
        if name == "_local_scalar_dense":
            self.sync("read")
            return self.plausible(args[0].dtype)
        if name in ("_to_copy", "copy_"):
            return self._copy(func, name, args, kwargs)
        if refused := refusal(func, name, args, kwargs):
            raise RuntimeError(
                f"{caller()}: {refused} ({name}) does not have a deterministic implementation"
            )
        if name in _PRODUCTS:
            dtypes = {x.dtype for x in args if isinstance(x, torch.Tensor)}
            assert len(dtypes) == 1, f"{caller()}: {name} of {dtypes}"
        out = self._results.run(func, args, kwargs)
        self._count(func, name, (args, kwargs), out)
        return out

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if func in (torch.ops.c10d.recv_.default, torch.ops.c10d.broadcast_.default):
            received = func is torch.ops.c10d.recv_.default or args[2] != _group_rank(args[1])
            for tensor in args[0] if received else ():
                tensor.fill_(self.integer)  # the fake group leaves it as it was allocated
        return out

    def _copy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A conversion, or a copy between host and device."""
        if name == "copy_":
            to, source = args[0].device.type, args[1]
            waits = not (len(args) > 2 and args[2])
        else:
            source = args[0]
            to = torch.device(kwargs.get("device") or source.device).type
            waits = not kwargs.get("non_blocking")
        crosses = to != source.device.type and "meta" not in (to, source.device.type)
        if not crosses:
            out = self._results.run(func, args, kwargs)
            self._count(func, name, (args, kwargs), out)
            return out
        out = self._copied(func, name, args, kwargs, source, to)
        if waits:
            self.sync("read" if to == "cpu" else "upload")
            return out
        if to == "cpu" and name == "_to_copy":
            pinned(out)  # as torch makes it
        if is_pinned(out if to == "cpu" else source):
            self.counts.copies[f"{caller()}: {'out' if to == 'cpu' else 'in'}"] += 1
        else:
            self.sync("pageable")
        return out

    def _copied(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        source: torch.Tensor,
        to: str,
    ) -> Any:
        """The result of a copy between host and device."""
        if to == "cpu" and name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0].fill_(self.plausible(args[0].dtype))
        if to == "cpu" and name == "_to_copy" and source.numel() <= READABLE:
            dtype = kwargs.get("dtype") or source.dtype
            return torch.full(tuple(source.shape), self.plausible(dtype), dtype=dtype)
        return self._results.run(func, args, kwargs)

    def _count(self, func: Any, name: str, inputs: Any, out: Any) -> None:
        tensors = [x for x in tree_leaves((inputs, out)) if isinstance(x, torch.Tensor)]
        if not any(x.device.type == "cuda" for x in tensors):
            return
        if func.namespace in ("c10d", "_c10d_functional"):  # the second: DTensor's
            self.counts.collectives += name != "wait_tensor"
        elif name not in _ALLOCATIONS and name not in _VIEWS and not _is_view(func):
            self.launch(name)
            if name in ("index", "index_put_", "_index_put_impl_"):
                for index in args_of_index(inputs):
                    if index.device.type == "cpu" and index.ndim:
                        self.sync("upload")

    def plausible(self, dtype: torch.dtype) -> Any:
        """A value of a tensor on the device."""
        if dtype.is_floating_point:
            return 0.5
        return True if dtype is torch.bool else self.integer


def args_of_index(inputs: Any) -> list[torch.Tensor]:
    """The index tensors of `index` and `index_put_`."""
    args = inputs[0]
    return [x for x in args[1] if isinstance(x, torch.Tensor)]


def _group_rank(group: Any) -> int:
    return int(torch.distributed.ProcessGroup.unbox(group).rank())


@cache
def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


@cache
def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _package_frame() -> FrameType | None:
    """The innermost function of the package on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(ROOMS):
        frame = frame.f_back
    return frame


def caller() -> str:
    """The innermost function of the package on the stack, as `file.py function`."""
    frame = _package_frame()
    if frame is None:
        return "outside the package"
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)} {frame.f_code.co_name}"


def install(device: FakeDevice) -> None:
    """Give fake tensors the methods by which a host reads values and addresses."""

    def tolist(self: FakeTensor) -> Any:
        if self.device.type == "cuda":
            device.sync("read")
        value: Any = device.plausible(self.dtype)
        if not self.dtype.is_floating_point:
            value = device.answers.get(caller(), value)
        for size in reversed(self.shape):
            value = [value] * size
        return value

    def truth(self: FakeTensor) -> bool:
        frame = _package_frame()
        line = frame and linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if not line or "bool(" not in line:
            raise HiddenSync(f"{caller()} takes a decision by a value on the device")
        device.sync("read")
        return True

    def data_ptr(self: FakeTensor) -> int:
        return self.untyped_storage()._cdata + self.storage_offset() * self.element_size()

    def numpy(self: FakeTensor) -> Any:
        raise HiddenSync(f"{caller()} wants numpy's view of {tuple(self.shape)} on {self.device}")

    no_compiler()
    # `torch.tensor(..., device="cuda")` makes a CPU tensor, whose copy to the device is dispatched.
    torch._C._set_only_lift_cpu_tensors(True)
    plain: Any = torch._C.TensorBase.data

    def set_data(self: FakeTensor, value: torch.Tensor) -> None:
        with device.fake:
            value = device.fake.from_tensor(value) if not isinstance(value, FakeTensor) else value
        plain.__set__(self, value)
        self.fake_device = value.fake_device  # torch leaves it as it was

    FakeTensor.data = property(plain.__get__, set_data)
    FakeTensor.tolist = tolist
    FakeTensor.__bool__ = truth
    FakeTensor.data_ptr = data_ptr
    FakeTensor.numpy = numpy
