"""Activations in host memory between forward and backward, a decoder layer at a time.

As torchtune's `OffloadActivations`: what autograd saves in a layer leaves the device, and returns
for the layer's backward pass. On CUDA each direction has a stream, and host memory is pinned:

    forward    | layer i computes | layer i + 1 computes | ...
    out stream |                  | i leaves             | i + 1 leaves
    backward   | ... layer i + 1 computes | layer i computes
    in stream  |     i comes              | i - 1 comes

So the device has two layers' activations at a time. The compute stream waits for the copies of
layer i - 1 when layer i has ended, and frees them. Nothing waits on the host.

Values return bit for bit, under the strides that they had: gradients are those without it. On a CPU
the copies are plain ones, so the same code runs, and saves nothing.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

LEAST_BYTES = 4096
"""Smaller tensors stay: a copy costs more than they take."""


class _SavedStorage:
    """A storage that autograd saved, once for all of its views: `flat` on the device, or `host`."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat: torch.Tensor | None = flat
        self.host: torch.Tensor | None = None


@dataclass(eq=False, slots=True)
class _Block:
    """What one layer saved of one row. Autograd alone keeps the storages alive, until it is done.

    `before` is the block of the layer before, which backward needs next. `left` and `arrived` are
    events behind the two copies.
    """

    before: "_Block | None"
    storages: list[weakref.ref[_SavedStorage]] = field(default_factory=list)
    left: Any = None
    arrived: Any = None
    is_needed: bool = False
    """Whether its backward pass, or the one before it, has begun."""

    def alive(self) -> list[_SavedStorage]:
        """The storages that autograd still needs."""
        return [storage for ref in self.storages if (storage := ref()) is not None]

    def copy_out(self) -> None:
        """Copy the storages to the host; from a GPU the memory is pinned and nothing waits."""
        for storage in self.alive():
            assert storage.flat is not None
            storage.host = storage.flat.to("cpu", non_blocking=True, copy=True)

    def allocate(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Memory on the device for the storages that are on the host, with what goes there."""
        copies = []
        for storage in self.alive():
            if (host := storage.host) is not None:
                storage.flat, storage.host = torch.empty_like(host, device=device), None
                copies.append((storage.flat, host))
        return copies


@dataclass(frozen=True, slots=True)
class _Packed:
    """A saved tensor: a view of a storage, and DTensor's description of it if it is one."""

    block: _Block
    storage: _SavedStorage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    spec: Any


class ActivationOffload:
    """Offloads the activations of the layers that it is given, on one device.

    Invariant: of all blocks only `_leaving`, and those whose backward pass has begun or comes next,
    have storages on the device.

    Example: `ActivationOffload(device).apply(model.layers)`, then forward and backward as usual.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = (
            (torch.cuda.Stream(device), torch.cuda.Stream(device))
            if device.type == "cuda"
            else None
        )
        self._newest: _Block | None = None
        self._leaving: _Block | None = None

    def apply(self, layers: Iterable[nn.Module]) -> None:
        """Have the forward passes of these consecutive layers offload what they save."""
        for number, layer in enumerate(layers):
            layer.forward = partial(self._forward, layer, layer.forward, number == 0)

    def _forward(
        self, layer: nn.Module, forward: Callable[..., Any], first: bool, *args: Any, **kwargs: Any
    ) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Weights are FSDP's, and what all layers share (the rotary embedding) is there anyway.
        others = [value for name, value in kwargs.items() if name != "hidden_states"]
        shared = [x for x in tree_leaves(others) if isinstance(x, torch.Tensor)]
        staying = {_local(x).untyped_storage()._cdata for x in (*layer.parameters(), *shared)}
        block = self._newest = _Block(None if first else self._newest)
        saved: dict[tuple[int, int, torch.dtype], _SavedStorage] = {}
        pack = partial(self._pack, block, staying, saved)
        with saved_tensors_hooks(pack, self._unpack):
            out = forward(*args, **kwargs)
        self._send(block)
        return out

    @torch.no_grad()
    def _pack(
        self,
        block: _Block,
        staying: set[int],
        saved: dict[tuple[int, int, torch.dtype], _SavedStorage],
        tensor: torch.Tensor,
    ) -> _Packed | torch.Tensor:
        """`saved` holds the layer's storages, so that no address comes twice."""
        local = _local(tensor)
        content = local.untyped_storage()
        elsewhere = local.device.type != self.device.type or content._cdata in staying
        if elsewhere or content.nbytes() < LEAST_BYTES:
            return tensor.detach()
        key = content._cdata, local._version, local.dtype
        if key not in saved:
            length = content.nbytes() // local.itemsize
            saved[key] = _SavedStorage(local.detach().as_strided((length,), (1,), 0))
            block.storages.append(weakref.ref(saved[key]))
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        offset = int(local.storage_offset())
        return _Packed(block, saved[key], local.size(), local.stride(), offset, spec)

    @torch.no_grad()
    def _unpack(self, packed: _Packed | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        block = packed.block
        self._fetch(block)
        self._fetch(block.before)
        if block.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(block.arrived)
        assert packed.storage.flat is not None, "an activation was not brought back"
        local = packed.storage.flat.as_strided(packed.size, packed.stride, packed.offset)
        if packed.spec is None:
            return local
        return DTensor(local, packed.spec, requires_grad=False)

    @torch.no_grad()
    def _send(self, block: _Block) -> None:
        """Copy a block to the host, behind its computation, and let go of the one before it."""
        self._release()
        self._leaving = block
        if self._streams is None:
            block.copy_out()
            return
        out, _ = self._streams
        out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(out):
            block.copy_out()
        block.left = out.record_event()

    def _release(self) -> None:
        """Free the device's copies of the block that leaves, once the host has them."""
        block, self._leaving = self._leaving, None
        if block is None:
            return
        if block.left is not None:
            torch.cuda.current_stream(self.device).wait_event(block.left)
        for storage in block.alive():
            storage.flat = None

    def _fetch(self, block: _Block | None) -> None:
        """Begin to bring a block back, unless that has begun, or it has not left yet."""
        if block is None or block.is_needed:
            return
        block.is_needed = True
        if block is self._leaving:
            self._leaving = None
            return
        copies = block.allocate(self.device)  # on the compute stream, which will free them
        if self._streams is None:
            _copy_in(copies)
            return
        _, into = self._streams
        into.wait_stream(torch.cuda.current_stream(self.device))
        into.wait_event(block.left)
        with torch.cuda.stream(into):
            _copy_in(copies)
        block.arrived = into.record_event()


def _copy_in(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for on_device, host in copies:
        on_device.copy_(host, non_blocking=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's own part, once it has arrived."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local
