"""Weights and moments of a rank in few flat storages, which leave the device and return whole.

A GPU's memory serves training and generation in turn. What leaves it goes to a mirror in pinned
host memory, which is made once. Each block is one copy, on a stream beside the one that computes:

    copy stream  | weights and moments leave  |          | weights come | moments come       |
    computation  | switch of the weights      | generate |              | forward, backward  | step

So no copy makes the host wait. The stream that computes waits for a copy where it needs the bytes.
What leaves is waited for when its memory is given up. Weights that come are waited for before the
first pass, moments before the optimizer's step.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hybridrl.engines.train.adamw import local_shard
from hybridrl.engines.train.gathering import fsdp_parameters
from hybridrl.engines.train.optim import moment_names, own_moments
from hybridrl.engines.train.pinned import pinned_bytes

ALIGNMENT = 256
"""Bytes: a tensor begins at a multiple of them, as one in memory of its own."""


def leaves_device(device: torch.device) -> bool:
    """Whether state on `device` has other memory to go to."""
    return device.type != "cpu"


class CopyStream:
    """Copies between a device and its host, one after the other, while the device computes.

    A copy begins when the work that was launched before it is done. On a CPU copies are plain ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy `source` to `to`; gives the event behind the copy, None on a CPU."""
        if self._stream is None:
            to.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """Let all work that is launched from now on begin after the copy."""
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)


@dataclass(slots=True)
class BlockView:
    """The bytes of a block from `start` on, as the tensor that `owner` has as `name`."""

    owner: Any
    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    start: int
    _twin: DTensor | None = None

    def take(self, memory: torch.Tensor) -> None:
        """Let the owner have the bytes of `memory` [bytes]."""
        setattr(self.owner, self.name, _cut(memory, self.dtype, self.shape, self.start))

    def move(self, memory: torch.Tensor) -> None:
        """As `take`, where the memory is another device's than before.

        A DTensor has its device apart from its shard. So it changes places with a twin of the other
        device, as in `Module.to`; the object stays the same.
        """
        if isinstance(self.owner, DTensor):
            view = _cut(memory, self.dtype, self.shape, self.start)
            if self._twin is None:
                self._twin = _like(self.owner, view)
            torch.utils.swap_tensors(self.owner, self._twin)
            self._twin._local_tensor = view  # else it would hold the memory that is given up
        self.take(memory)


class Block:
    """Tensors in one storage, on the device or in a mirror on the host.

    State     | call  | next      | what moves
    ----------|-------|-----------|---------------------------------------------------------
    on device | send  | on device | a copy to the mirror begins, unless the mirror is equal
    on device | leave | on host   | as `send`; the device's memory is given up
    on host   | come  | on device | a copy from the mirror begins

    Invariant: owners of `views` have views of the memory of the present state. So what is
    offloaded can be read and filled in host memory, once `settle` has been called.
    """

    def __init__(
        self, size: int, device: torch.device, copies: CopyStream, on_host: bool = False
    ) -> None:
        """`size` bytes, all 0, for the `device`; they begin there or `on_host`."""
        self.views: list[BlockView] = []
        self.size, self.on_host = size, on_host
        self._device, self._copies = device, copies
        self._mirror = pinned_bytes(size, device) if on_host else None
        self._is_equal = on_host
        self._copied: Any = None
        self._memory = self._mirror
        if self._memory is None:
            self._memory = torch.zeros(size, dtype=torch.uint8, device=device)

    @property
    def memory(self) -> torch.Tensor:
        """The bytes [size] in the present state."""
        assert self._memory is not None
        return self._memory

    def add(self, *views: BlockView) -> None:
        """Let further owners have parts of the block."""
        self.views += views
        for view in views:
            view.take(self.memory)

    def changed(self) -> None:
        """Say that the tensors have been written: the mirror is not equal from now on."""
        self._is_equal = self.on_host

    def send(self) -> None:
        """Begin to copy to the mirror what nobody changes until it leaves."""
        if self._is_equal:
            return
        if self._mirror is None:
            self._mirror = pinned_bytes(self.size, self._device)
        self._copied, self._is_equal = self._copies.copy(self._mirror, self.memory), True

    def leave(self) -> None:
        """Give the device's memory up, to be used again once the copy has ended."""
        if self.on_host:
            return
        self.send()
        self.wait()
        assert self._mirror is not None
        self._move(self._mirror)
        self.on_host = True

    def come(self) -> None:
        """Begin to copy the mirror to the device; `wait` before the tensors are read."""
        if not self.on_host:
            return
        memory = torch.empty(self.size, dtype=torch.uint8, device=self._device)
        self._copied = self._copies.copy(memory, self.memory)
        self._move(memory)
        self.on_host = False

    def wait(self) -> None:
        """Let the device's work from now on begin after the last copy."""
        self._copies.wait(self._copied)

    def settle(self) -> None:
        """Let the tensors be read: by the device's work from now on, or by the host at once."""
        if self.on_host:
            self.finish()
        else:
            self.wait()

    def finish(self) -> None:
        """Wait on the host for the last copy, which reads or writes the mirror."""
        if self._copied is not None:
            self._copied.synchronize()

    def _move(self, memory: torch.Tensor) -> None:
        self._memory = memory
        for view in self.views:
            view.move(memory)


class StateMemory:
    """The blocks of one model on a rank: trained weights, frozen weights, moments.

    With `stays` nothing moves: the memory plan has found room for it beside generation. Without a
    GPU there is nowhere to go (`leaves_device`), and the tensors are in blocks all the same.

    Example: Qwen3 1.7B on one GPU has a block of 6.9 GB of weights and one of 13.8 GB of moments.
    An update writes both, so a step has four copies. With adapters the frozen block goes to the
    host once in the run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.stays = device, False
        self._copies = CopyStream(device)
        self._moves = leaves_device(device)
        self._trained: list[Block] = []
        self._frozen: list[Block] = []
        self._moments: list[Block] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, wherever they are."""
        return sum(block.size for block in self._all())

    # Contents

    @torch.no_grad()
    def allocate_weights(self, roots: Iterable[nn.Module]) -> None:
        """Give the FSDP shards of `roots` memory in blocks; those on the meta device no values."""
        roots = list(roots)
        parameters = fsdp_parameters(roots)
        views: dict[int, torch.Tensor] = {}
        placed: list[tuple[Block, Any, int]] = []
        for blocks, trained in ((self._trained, True), (self._frozen, False)):
            own = [p for p in parameters if p.sharded_param.requires_grad is trained]
            sizes = [p.sharded_param.dtype.itemsize * _padded(p) for p in own]
            starts, size = _layout(sizes)
            if not size:
                continue
            block = Block(size, self.device, self._copies)
            blocks.append(block)
            for p, start in zip(own, starts, strict=True):
                local = p.sharded_param.to_local()
                views[id(p.sharded_param)] = _cut(block.memory, local.dtype, local.shape, start)
                placed.append((block, p, start))
        _materialize(roots, views, self.device)
        for block, p, start in placed:
            local = p.sharded_param.to_local()
            block.add(
                BlockView(p.sharded_param, "_local_tensor", local.dtype, local.shape, start),
                BlockView(p, "_sharded_param_data", local.dtype, (_padded(p),), start),
            )

    @torch.no_grad()
    def allocate_moments(self, optimizer: Optimizer, steps: int) -> None:
        """Give the optimizer the state that it has after `steps` steps, all moments zero.

        They are where the weights are.
        """
        self.drop_moments()
        pairs = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        kinds = [_kinds(optimizer, group, parameter) for group, parameter in pairs]
        each = [[dtype.itemsize * prod(shape) for dtype, shape in kind] for kind in kinds]
        starts, size = _layout([size for sizes in each for size in sizes])
        if not size:
            return
        on_host = any(block.on_host for block in self._trained)
        block, left = Block(size, self.device, self._copies, on_host), iter(starts)
        for group, parameter in pairs:
            state = own_moments(optimizer, parameter, steps)
            if state is None:
                state = {
                    name: _moment(block, parameter, next(left)) for name in moment_names(group)
                }
                if len(state) > 1:  # AdamW counts the steps of each parameter, on the device
                    state["step"] = torch.full((), steps, dtype=torch.float32, device=self.device)
            else:
                for owner, name, tensor in _leaves(state.values()):
                    view = BlockView(owner, name, tensor.dtype, tensor.shape, next(left))
                    block.add(view)
                    getattr(owner, name).copy_(tensor)
            optimizer.state[parameter] = state
        self._moments.append(block)

    def drop_moments(self) -> None:
        """Forget the moments, once no copy reads or writes them."""
        for block in self._moments:
            block.finish()
        self._moments = []

    # Moves

    def changed(self) -> None:
        """Say that trained weights or moments have been written, or will be before they leave."""
        for block in (*self._trained, *self._moments):
            block.changed()

    def send(self) -> None:
        """Begin to copy to the host what changes no more until `leave`."""
        for block in self._all() if self._leaves else ():
            block.send()

    def leave(self) -> None:
        """Give the device's memory up."""
        for block in self._all() if self._leaves else ():
            block.leave()

    def come(self, moments: bool = True) -> None:
        """Bring weights to the device, and the `moments`; `settle` before an optimizer step."""
        weights = (*self._trained, *self._frozen)
        for block in weights:
            block.come()
        for block in self._moments if moments else ():
            block.come()
        for block in weights:
            block.wait()

    def settle_weights(self) -> None:
        """Let weights be read, by the device or, where they are offloaded, by the host."""
        for block in (*self._trained, *self._frozen):
            block.settle()

    def settle(self) -> None:
        """Let weights and moments be read likewise."""
        for block in self._all():
            block.settle()

    @property
    def _leaves(self) -> bool:
        return self._moves and not self.stays

    def _all(self) -> Iterator[Block]:
        yield from (*self._trained, *self._frozen, *self._moments)


def _layout(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The first byte of each tensor of so many bytes in a block, and the block's bytes."""
    starts, size = [], 0
    for each in sizes:
        starts.append(size)
        size += -(-each // ALIGNMENT) * ALIGNMENT
    return starts, size


def _cut(
    memory: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], start: int
) -> torch.Tensor:
    return memory[start : start + dtype.itemsize * prod(shape)].view(dtype).view(tuple(shape))


def _padded(parameter: Any) -> int:
    """Elements of an FSDP parameter's shard with the padding that its gathering wants."""
    return prod(parameter.padded_sharded_param_size)


def _like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with another shard; a parameter if `tensor` is one."""
    like = DTensor(local, tensor._spec, requires_grad=False)
    if not isinstance(tensor, nn.Parameter):
        return like
    return nn.Parameter(like, requires_grad=tensor.requires_grad)  # type: ignore[return-value]


def _materialize(
    roots: Iterable[nn.Module], views: dict[int, torch.Tensor], device: torch.device
) -> None:
    """Let the parameters of `views`, by id, have that memory, with the values that they have."""

    def allocated(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        if (memory := views.get(id(tensor))) is None:
            return torch.empty_like(tensor, device=device)
        assert isinstance(tensor, DTensor)
        return DTensor(memory, tensor._spec, requires_grad=tensor.requires_grad)

    for root in roots:
        for parameter in root.parameters():
            if id(parameter) in views and not parameter.is_meta:  # adapters
                views[id(parameter)].copy_(local_shard(parameter))
        root._apply(allocated)


def _kinds(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> list[tuple[torch.dtype, Sequence[int]]]:
    """Dtype and shape of the tensors of a parameter's moments."""
    state = own_moments(optimizer, parameter, 0)
    if state is not None:
        return [(tensor.dtype, tensor.shape) for _, _, tensor in _leaves(state.values())]
    local = local_shard(parameter)
    return [(local.dtype, local.shape)] * len(moment_names(group))


def _moment(block: Block, parameter: nn.Parameter, start: int) -> DTensor:
    """A moment of a parameter in the layout of the parameter."""
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    memory = _cut(block.memory, local.dtype, local.shape, start)
    moment = DTensor(memory, parameter._spec, requires_grad=False)
    block.add(BlockView(moment, "_local_tensor", local.dtype, local.shape, start))
    return moment


def _leaves(tensors: Iterable[Any]) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """The plain tensors that DTensors, and tensors of several parts, consist of; no scalars."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or not tensor.ndim:
            continue
        assert is_traceable_wrapper_subclass(tensor), "moments are of sharded parameters"
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if is_traceable_wrapper_subclass(inner):
                yield from _leaves([inner])
            elif isinstance(inner, torch.Tensor):  # a DTensor has its mesh there, too
                yield tensor, name, inner
