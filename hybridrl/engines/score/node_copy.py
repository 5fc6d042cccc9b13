"""One copy of frozen weights in a node's memory, for all of its ranks with the same shards.

    rank 0  loads its shards, creates the memory, fills it         (the first with these)
    rank 2  waits, maps the memory; on a GPU it is pinned          (another one with them)

Ranks on GPUs bring the weights to the device from the memory, and leave it unchanged. Ranks on CPUs
compute with the memory itself. Their maps are private: a rank that writes gets pages of its own.
"""

import logging
import mmap
from collections.abc import Callable, Hashable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hybridrl.engines.score.shared_memory import MemoryAddress, SharedMemory, node_key

logger = logging.getLogger(__name__)

_ALIGNMENT = 64
"""Bytes: each tensor begins at a multiple, as torch's own allocations do."""


class NodeCopy:
    """Tensors in memory that this rank shares with others of its node.

    `pinned` is the memory where CUDA has pinned it, else None.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pinned: mmap.mmap | None = None) -> None:
        self.tensors, self.pinned = tensors, pinned

    def release(self) -> None:
        """Unpin the memory, before this rank forgets the tensors."""
        if self.pinned is not None:
            torch.cuda.synchronize()  # copies from it may be under way
            torch.cuda.cudart().cudaHostUnregister(_address(self.pinned))
            self.pinned = None


def shared_copy(
    parameters: Sequence[nn.Parameter], shards: Hashable, load: Callable[[], None] | None = None
) -> NodeCopy | None:
    """Fill `parameters` by `load` on one rank of a node for the same `shards`; others share them.

    Without `load` all ranks have the values already. Collective over all ranks; `shards` is equal
    for those with the same. Returns the copy in host memory. It is None for a rank that has called
    `load` itself and shares nothing. Then no other rank of its node has its shards, or a log line
    says why. Ranks with the same shards raise the same error of `load`.
    """
    if not dist.is_initialized():  # a process alone
        if load is not None:
            load()
        return None
    keys = _gathered((node_key(), shards))
    rank = dist.get_rank()
    sharers = [other for other, key in enumerate(keys) if key == keys[rank]]
    if sharers[0] == rank:
        return _lead(parameters, load, shares=len(sharers) > 1)
    return _follow(parameters, load, sharers[0])


def _lead(
    parameters: Sequence[nn.Parameter], load: Callable[[], None] | None, shares: bool
) -> NodeCopy | None:
    """Load, and give the values away where another rank `shares` them."""
    memory, address = None, None
    try:
        try:
            memory = _created(parameters) if shares else None
            if memory is not None and load is not None and _on_cpu(parameters):
                # Into the memory itself: else two copies would be there for a moment.
                _point(parameters, _views(memory.map(), parameters))
                load()
            else:
                if load is not None:
                    load()
                if memory is not None:
                    views = _views(memory.map(), parameters)
                    for view, parameter in zip(views, parameters, strict=True):
                        view.copy_(parameter.data)
            address = None if memory is None else memory.address
        finally:  # the others wait for it; after an error they load, and have the same one
            _gathered(address)
        try:
            return None if memory is None else _take(memory, parameters)
        except OSError as error:
            logger.warning("this rank has frozen weights of its own in host memory: %s", error)
            return None
    finally:
        _gathered(None)  # the others have opened it
        if memory is not None:
            memory.close()


def _follow(
    parameters: Sequence[nn.Parameter], load: Callable[[], None] | None, leader: int
) -> NodeCopy | None:
    """Take the values of the rank `leader`, or else load."""
    address: MemoryAddress | None = _gathered(None)[leader]
    copy = None
    try:
        if address is not None:
            memory = SharedMemory.open(address)
            try:
                copy = _take(memory, parameters)
            finally:
                memory.close()
    except OSError as error:
        logger.warning("this rank has frozen weights of its own in host memory: %s", error)
    finally:
        _gathered(None)
    if copy is None:
        if load is not None:
            load()
    elif load is not None and not _on_cpu(parameters):
        for parameter, tensor in zip(parameters, copy.tensors, strict=True):
            parameter.data.copy_(tensor, non_blocking=True)
    return copy


def _created(parameters: Sequence[nn.Parameter]) -> SharedMemory | None:
    """Memory for the values of `parameters`."""
    try:
        return SharedMemory.create(sum(_padded(parameter.nbytes) for parameter in parameters))
    except OSError as error:
        logger.warning("each rank of this node has frozen weights of its own: %s", error)
        return None


def _gathered(value: Any) -> list[Any]:
    """The values of all ranks, once all have come here."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _take(memory: SharedMemory, parameters: Sequence[nn.Parameter]) -> NodeCopy:
    """The tensors in `memory`: on a CPU the values of `parameters`, for a GPU pinned."""
    if _on_cpu(parameters):
        views = _views(memory.map(private=True), parameters)
        _point(parameters, views)
        return NodeCopy(views)
    shared = memory.map()
    code = int(torch.cuda.cudart().cudaHostRegister(_address(shared), memory.size, 0))
    if code:
        raise OSError(f"CUDA cannot pin memory that ranks share: its error {code}")
    return NodeCopy(_views(shared, parameters), shared)


def _on_cpu(parameters: Sequence[nn.Parameter]) -> bool:
    return parameters[0].device.type == "cpu"


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _views(mapped: mmap.mmap, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """A tensor of each parameter's shape and format, one after the other in the memory."""
    views, start = [], 0
    for parameter in parameters:
        count = prod(parameter.shape)
        view = torch.frombuffer(mapped, dtype=parameter.dtype, count=count, offset=start)
        views.append(view.view(parameter.shape))
        start += _padded(parameter.nbytes)
    return views


def _point(parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor]) -> None:
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view


def _address(mapped: mmap.mmap) -> int:
    return torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
