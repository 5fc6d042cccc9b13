"""Logs what a rank of a gloo run would do with NCCL on a GPU, for `nccl_order.check`.

Every collective and message passes torch's dispatcher, also those that FSDP, DTensor and torch's
pipelines issue, so a dispatch mode sees them all. In a CPU run all tensors are on the CPU. Which
ones would be there on a GPU, too, is inferred. It is what `Tensor.cpu` returns, what is created
without a device, and what is computed from these alone. All else counts as the device's.
"""

import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from nccl_order import P2P, Event, Log, Message, Op, Sync, Wait
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridrl.layout import process_groups, weight_switch

ROOT = str(Path(__file__).parents[1])

# torch's operators: the name of the collective, and the argument whose bytes all ranks share.
C10D = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_": ("all_to_all", None),
    "alltoall_base_": ("all_to_all", None),
    "barrier": ("barrier", None),
    "monitored_barrier_": ("barrier", None),
}
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
}
FACTORIES = {
    getattr(torch, name)
    for name in (
        "empty", "zeros", "ones", "full", "tensor", "as_tensor", "arange", "linspace", "eye",
        "rand", "randn", "randint", "randperm", "from_numpy", "frombuffer",
    )
}  # fmt: skip
READS = {
    getattr(torch.Tensor, name)
    for name in (
        "item", "tolist", "cpu", "numpy", "nonzero", "equal", "__bool__", "__float__", "__int__",
        "__index__", "masked_select",
    )
}  # fmt: skip
OBJECTS = (
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
    "send_object_list", "recv_object_list",
)  # fmt: skip
HOST = "_would_be_on_the_host"


class Recorder:
    """While it is entered, `log` grows with what this process sends, waits for and reads.

    Groups that `device_only` names have no gloo on GPUs; hybridrl's own have both
    (`system.rendezvous.join_group`).
    """

    def __init__(self, device_only: Sequence[str] = ()) -> None:
        self.log: list[Event] = []
        self._device_only = device_only
        self._batch: list[tuple[Message, Any, bool, Any]] | None = None
        self._objects = 0
        self._works: dict[int, tuple[Any, int]] = {}
        self._outputs: dict[int, int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Recorder":
        for module in (dist, distributed_c10d):
            for name in OBJECTS:
                self._patch(module, name, self._pickling)
            self._patch(module, "batch_isend_irecv", self._batching)
        self._patch(dist.Work, "wait", self._waiting)
        self._stack.enter_context(_Functions(self))
        self._stack.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self._works.clear()

    def _patch(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        self._stack.enter_context(mock.patch.object(owner, name, wrapper(getattr(owner, name))))

    # torch's Python functions

    def _pickling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Objects are sent as tensors of the host."""

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            self._objects += 1
            try:
                return function(*args, **options)
            finally:
                self._objects -= 1

        return call

    def _batching(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The messages of a batch are one operation; gloo sends them one by one."""

        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            self._batch = []
            try:
                answer = function(*args, **options)
            finally:
                batch, self._batch = self._batch, None
            for host in (False, True):
                messages = [entry for entry in batch if entry[2] is host]
                if not messages:
                    continue
                if not host:
                    self._append_p2p(messages, batched=True)
                    continue
                for entry in messages:
                    self._append_p2p([entry], batched=False)
            return answer

        return call

    def _waiting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wait(work: Any, *args: Any, **options: Any) -> Any:
            answer = function(work, *args, **options)
            if id(work) in self._works:
                self._append_wait(self._works[id(work)][1])
            return answer

        return wait

    # torch's operators

    def operator(self, name: str, args: Sequence[Any], out: Any) -> None:
        """Log an operator of `c10d`, which has just run."""
        groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg)]
        group = dist.ProcessGroup.unbox(groups[0])
        work = out if isinstance(out, torch.ScriptObject) else out[-1] if out else None
        work = None if work is None else dist.Work.unbox(work)
        if name in ("send", "recv_"):
            message = Message(name == "send", dist.get_global_rank(group, args[2]), _bytes(args[0]))
            entry = (message, group, self._on_host(args[0]), work)
            if self._batch is None:
                self._append_p2p([entry], batched=False)
            else:
                self._batch.append(entry)
            return
        kind, measured = C10D[name]
        size = 0 if measured is None else _bytes(args[measured])
        roots = {"broadcast_": 2, "gather_": 3, "scatter_": 3, "reduce_": 3}
        root = args[roots[name]] if name in roots else None
        # A barrier is an all-reduce on the device, for which the host waits.
        host = name != "barrier" and self._on_host(args)
        self._append(self._op(group, kind, size, root, host=host), work)

    def functional(self, name: str, args: Sequence[Any], out: Any) -> None:
        """Log a functional collective, which has just run; `wait_tensor` waits for it."""
        if name == "wait_tensor":
            number = self._outputs.pop(_storage(args[0]), None)
            if number is not None:
                self._append_wait(number)
            return
        (group_name,) = [arg for arg in args if isinstance(arg, str)][-1:]
        group = distributed_c10d._resolve_process_group(group_name)
        kind = FUNCTIONAL[name]
        size = _bytes(out if kind == "reduce_scatter" else args[0])
        root = args[1] if kind == "broadcast" else None
        size = 0 if kind == "all_to_all" else size
        self._append(self._op(group, kind, size, root, host=self._on_host(args[0])), None)
        for tensor in _tensors(out):
            self._outputs[_storage(tensor)] = len(self.log) - 1

    def read(self) -> None:
        """Log that the host reads a tensor of the device."""
        if not self._objects and self.log and not isinstance(self.log[-1], Sync):
            self.log.append(Sync(_site()))

    # The log

    def _op(
        self, group: Any, kind: str, size: int = 0, root: int | None = None, **options: Any
    ) -> Op:
        members = tuple(dist.get_process_group_ranks(group))
        name = group.group_name
        only = name in self._device_only
        return Op(name, members, kind, size, root, device_only=only, site=_site(), **options)

    def _append_p2p(self, entries: Sequence[tuple[Message, Any, bool, Any]], batched: bool) -> None:
        messages = tuple(message for message, *_ in entries)
        _, group, host, _ = entries[0]
        op = self._op(group, P2P, messages=messages, batched=batched, host=host)
        self._append(op, *(work for *_, work in entries))

    def _append(self, op: Op, *works: Any) -> None:
        if len(op.members) == 1:
            return
        self.log.append(op)
        for work in works:
            if work is not None:  # kept, so that no other object gets its id
                self._works[id(work)] = (work, len(self.log) - 1)

    def _append_wait(self, number: int) -> None:
        self.log.append(Wait(number))
        op = self.log[number]
        if isinstance(op, Op) and op.kind == "barrier":
            self.log.append(Sync(op.site))

    def _on_host(self, tensors: Any) -> bool:
        return bool(self._objects) or all(hasattr(t, HOST) for t in _tensors(tensors))


@contextmanager
def fake_rank(rank: int, size: int) -> Iterator[None]:
    """This process is a rank of a world in which nothing is sent, and other ranks do not come."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with mock.patch.object(process_groups, "_meet"):
            yield
    finally:
        dist.destroy_process_group()


def fake_logs(size: int, function: Callable[..., Any], *args: Any) -> list[Log]:
    """The logs of `function(*args)` on `size` ranks that run one after another in this process.

    Nothing is sent: what a rank receives has any value.
    """
    logs: list[Log] = []
    for rank in range(size):
        with fake_rank(rank, size), Recorder() as recorder:
            function(*args)
        logs.append(recorder.log)
    return logs


@contextmanager
def logging_rounds(log: list[Event]) -> Iterator[None]:
    """Log the rounds of weight switches alone: no other operator is looked at, and nothing copied.

    Operations are those of a `Recorder`, in a tenth of its time. It logs waits, too, which those of
    torch's fake groups escape.
    """

    def issue(group: Any, kind: str, **options: Any) -> Any:
        group = group or dist.group.WORLD
        members = tuple(dist.get_process_group_ranks(group))
        if len(members) > 1:
            log.append(Op(group.group_name, members, kind, site=_site(), **options))
        number = len(log) - 1
        return SimpleNamespace(wait=lambda: log.append(Wait(number)) if len(members) > 1 else None)

    def exchange(operations: Sequence[Any]) -> list[Any]:
        messages = tuple(Message(o.op is dist.isend, o.peer, _bytes(o.tensor)) for o in operations)
        return [issue(operations[0].group, P2P, messages=messages, batched=True)]

    def gather(_: Any, contribution: Any, group: Any, async_op: bool) -> Any:
        assert async_op
        return issue(group, "all_gather", num_bytes=_bytes(contribution))

    with (
        mock.patch.object(dist, "batch_isend_irecv", exchange),
        mock.patch.object(weight_switch, "_all_gather", gather),
        mock.patch.object(weight_switch, "copy_all"),
    ):
        yield


class _Operators(TorchDispatchMode):
    """Hands the operators of torch.distributed to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # what it consists of comes by here
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if func.namespace == "c10d":
            self._recorder.operator(name, args, out)
        elif func.namespace == "_c10d_functional" and not name.startswith("_wrap_tensor"):
            self._recorder.functional(name, args, out)
        return out


class _Functions(TorchFunctionMode):
    """Marks tensors that would be on the host, and logs reads of the others."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in FACTORIES:
            if kwargs.get("device") is None:
                _mark(out)
            return out
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        plain = [t for t in inputs if t.ndim or len(inputs) == 1]
        host = bool(plain) and all(hasattr(t, HOST) for t in plain)
        if func is torch.Tensor.to and type(out) is torch.Tensor:
            return self._moved(args, kwargs, out, host)
        if func in READS and inputs and not hasattr(inputs[0], HOST):
            self._recorder.read()
        if func is torch.Tensor.cpu and type(out) is torch.Tensor:
            return _mark(_alias(out))
        if host:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and not any(tensor is t for t in inputs):
                    _mark(tensor)
        return out

    def _moved(self, args: Any, kwargs: Any, out: torch.Tensor, host: bool) -> torch.Tensor:
        """What `Tensor.to` gives; pageable memory is copied while the host waits."""
        targets = [*args[1:], *kwargs.values()]
        device = [t for t in targets if isinstance(t, torch.device | str)]
        if not device:
            return _mark(out) if host and out is not args[0] else out
        if host:
            self._recorder.read()
        return _alias(out)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Another object, so that marks of the two differ."""
    with torch._C.DisableTorchFunction():
        return tensor.view_as(tensor) if type(tensor) is torch.Tensor else tensor


def _mark(tensor: Any) -> Any:
    if type(tensor) is torch.Tensor:
        setattr(tensor, HOST, True)
    return tensor


def _is_group(boxed: Any) -> bool:
    try:
        dist.ProcessGroup.unbox(boxed)
    except RuntimeError:
        return False
    return True


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tree: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tree))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _site() -> str:
    """The nearest line of this repository, tests' support left out."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(ROOT) and ".venv" not in file and file != __file__:
            return f"{file[len(ROOT) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
