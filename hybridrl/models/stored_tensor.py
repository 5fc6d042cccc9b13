"""Tensors in files, and what transformers' conversions make of them, without memory for elements.

A hub checkpoint has one tensor an expert; transformers holds the experts of a layer in one. Its
conversions stack, join, transpose and cut whole tensors. Called with `StoredTensor`s, they give
another one, which reads a box of its elements straight from the files.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridrl.layout.box import Box

CopyBox = Callable[[torch.Tensor, Box], None]
"""Writes the elements of a box to a tensor, or view, of the box's shape."""


class NotBySlices(AttributeError):
    """An operation whose boxes are no boxes of its inputs: whole tensors have to be read."""


class StoredTensor:
    """A tensor of `shape` whose boxes `copy_to` reads; where it `reads_whole`, all for each box.

    It has the methods of `torch.Tensor` that conversions call, and torch's functions take it. What
    is not among them raises NotBySlices.
    """

    def __init__(self, shape: torch.Size, copy_to: CopyBox, reads_whole: bool = False) -> None:
        self.shape, self.copy_to, self.reads_whole = shape, copy_to, reads_whole

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """Extent of a dimension."""
        return self.shape[dim]

    def contiguous(self) -> "StoredTensor":
        """Itself: no element has a place in memory."""
        return self

    def chunk(self, chunks: int, dim: int = 0) -> "tuple[StoredTensor, ...]":
        """As torch's."""
        return _chunk(self, chunks, dim)

    def squeeze(self, dim: int | None = None) -> "StoredTensor":
        """As torch's."""
        return _squeeze(self, dim)

    def __getattr__(self, name: str) -> Any:
        raise NotBySlices(name)

    def __getitem__(self, index: object) -> Any:
        raise NotBySlices("an index")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in _FUNCTIONS:
            raise NotBySlices(getattr(function, "__name__", str(function)))
        return _FUNCTIONS[function](*args, **(kwargs or {}))


def in_file(stored: Any, shape: torch.Size) -> StoredTensor:
    """A tensor of a safetensors file, of which `stored` is the `get_slice`."""

    def copy_to(out: torch.Tensor, box: Box) -> None:
        out.copy_(stored[box.slices() or ...])

    return StoredTensor(shape, copy_to)


def stored_zeros(shape: torch.Size) -> StoredTensor:
    """Zeros, for what no file has."""

    def copy_to(out: torch.Tensor, box: Box) -> None:
        out.zero_()

    return StoredTensor(shape, copy_to)


def read_whole(read: Callable[[], torch.Tensor], shape: torch.Size) -> StoredTensor:
    """What a conversion makes of tensors that `read` reads whole, again for each box."""

    def copy_to(out: torch.Tensor, box: Box) -> None:
        out.copy_(read()[box.slices()])

    return StoredTensor(shape, copy_to, reads_whole=True)


# torch's functions


def _cat(pieces: Sequence[StoredTensor], dim: int = 0) -> StoredTensor:
    shape, dim = list(pieces[0].shape), dim % pieces[0].ndim
    others = {tuple(piece.shape[:dim]) + tuple(piece.shape[dim + 1 :]) for piece in pieces}
    if len(others) > 1:
        raise ValueError(f"shapes differ: {', '.join(str(list(piece.shape)) for piece in pieces)}")
    shape[dim] = sum(piece.shape[dim] for piece in pieces)

    def copy_to(out: torch.Tensor, box: Box) -> None:
        passed = 0
        for piece in pieces:
            extent = piece.shape[dim]
            low, high = max(box.start[dim], passed), min(box.stop[dim], passed + extent)
            if low < high:
                here = out.narrow(dim, low - box.start[dim], high - low)
                piece.copy_to(here, box.narrow(dim, low - passed, high - passed))
            passed += extent

    return StoredTensor(torch.Size(shape), copy_to)


def _stack(pieces: Sequence[StoredTensor], dim: int = 0) -> StoredTensor:
    shapes = {tuple(piece.shape) for piece in pieces}
    if len(shapes) > 1:
        raise ValueError(f"shapes differ: {', '.join(str(list(shape)) for shape in shapes)}")
    shape, dim = list(pieces[0].shape), dim % (pieces[0].ndim + 1)

    def copy_to(out: torch.Tensor, box: Box) -> None:
        first = box.start[dim]
        inner = Box(box.start[:dim] + box.start[dim + 1 :], box.stop[:dim] + box.stop[dim + 1 :])
        for index in range(first, box.stop[dim]):
            pieces[index].copy_to(out.select(dim, index - first), inner)

    return StoredTensor(torch.Size([*shape[:dim], len(pieces), *shape[dim:]]), copy_to)


def _transpose(tensor: StoredTensor, dim0: int, dim1: int) -> StoredTensor:
    dim0, dim1 = dim0 % tensor.ndim, dim1 % tensor.ndim

    def swapped(values: Sequence[int]) -> tuple[int, ...]:
        out = list(values)
        out[dim0], out[dim1] = out[dim1], out[dim0]
        return tuple(out)

    def copy_to(out: torch.Tensor, box: Box) -> None:
        inner = Box(swapped(box.start), swapped(box.stop))
        tensor.copy_to(out.transpose(dim0, dim1), inner)

    return StoredTensor(torch.Size(swapped(tensor.shape)), copy_to)


def _chunk(tensor: StoredTensor, chunks: int, dim: int = 0) -> tuple[StoredTensor, ...]:
    dim %= tensor.ndim
    size = -(-tensor.shape[dim] // chunks)
    starts = range(0, tensor.shape[dim], size)
    return tuple(_narrow(tensor, dim, start, size) for start in starts)


def _narrow(tensor: StoredTensor, dim: int, start: int, size: int) -> StoredTensor:
    """At most `size` of a dimension from `start` on."""
    shape = list(tensor.shape)
    shape[dim] = min(size, shape[dim] - start)

    def copy_to(out: torch.Tensor, box: Box) -> None:
        low, high = box.start[dim] + start, box.stop[dim] + start
        tensor.copy_to(out, box.narrow(dim, low, high))

    return StoredTensor(torch.Size(shape), copy_to)


def _squeeze(tensor: StoredTensor, dim: int | None = None) -> StoredTensor:
    wanted = range(tensor.ndim) if dim is None else [dim % tensor.ndim]
    dims = [i for i in wanted if tensor.shape[i] == 1]
    kept = [size for i, size in enumerate(tensor.shape) if i not in dims]

    def copy_to(out: torch.Tensor, box: Box) -> None:
        start, stop = list(box.start), list(box.stop)
        for at in dims:  # which ascend
            out = out.unsqueeze(at)
            start.insert(at, 0)
            stop.insert(at, 1)
        tensor.copy_to(out, Box(tuple(start), tuple(stop)))

    return StoredTensor(torch.Size(kept), copy_to)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.transpose: _transpose,
    torch.chunk: _chunk,
    torch.squeeze: _squeeze,
}
