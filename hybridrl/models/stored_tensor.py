"""Tensors in files, and what transformers' conversions make of them, without memory for elements.

A hub checkpoint has one tensor an expert; transformers holds the experts of a layer in one. Its
conversions stack, join, transpose and cut whole tensors. Called with `StoredTensor`s, they give
another one, which reads a box of its elements straight from the files.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybridrl.layout.box import Box


class NotBySlices(AttributeError):
    """An operation whose boxes are no boxes of its inputs: whole tensors have to be read."""


class StoredTensor(ABC):
    """A tensor of `shape` that is read box by box.

    It has the methods of `torch.Tensor` that conversions call, and torch's functions take it. What
    is not among them raises NotBySlices.
    """

    shape: torch.Size

    @abstractmethod
    def copy_to(self, out: torch.Tensor, box: Box) -> None:
        """Write the elements of `box` to `out`, a tensor or view of the box's shape."""

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


@dataclass(frozen=True, eq=False)
class InFile(StoredTensor):
    """A tensor of a safetensors file: `stored` is its `get_slice`."""

    stored: Any
    shape: torch.Size

    def copy_to(self, out: torch.Tensor, box: Box) -> None:
        """See `StoredTensor`."""
        out.copy_(self.stored[box.slices() or ...])


@dataclass(frozen=True, eq=False)
class Zeros(StoredTensor):
    """Zeros, for what no file has."""

    shape: torch.Size

    def copy_to(self, out: torch.Tensor, box: Box) -> None:
        """See `StoredTensor`."""
        out.zero_()


@dataclass(frozen=True, eq=False)
class ReadWhole(StoredTensor):
    """What a conversion makes of tensors that `read` reads whole, again for each box."""

    read: Callable[[], torch.Tensor]
    shape: torch.Size

    def copy_to(self, out: torch.Tensor, box: Box) -> None:
        """See `StoredTensor`."""
        out.copy_(self.read()[box.slices()])


@dataclass(frozen=True, eq=False)
class _Joined(StoredTensor):
    pieces: Sequence[StoredTensor]
    dim: int
    shape: torch.Size

    def copy_to(self, out: torch.Tensor, box: Box) -> None:
        passed, dim = 0, self.dim
        for piece in self.pieces:
            extent = piece.shape[dim]
            low, high = max(box.start[dim], passed), min(box.stop[dim], passed + extent)
            if low < high:
                here = out.narrow(dim, low - box.start[dim], high - low)
                piece.copy_to(here, box.narrow(dim, low - passed, high - passed))
            passed += extent


@dataclass(frozen=True, eq=False)
class _Stacked(StoredTensor):
    pieces: Sequence[StoredTensor]
    dim: int
    shape: torch.Size

    def copy_to(self, out: torch.Tensor, box: Box) -> None:
        dim, first = self.dim, box.start[self.dim]
        inner = Box(box.start[:dim] + box.start[dim + 1 :], box.stop[:dim] + box.stop[dim + 1 :])
        for index in range(first, box.stop[dim]):
            self.pieces[index].copy_to(out.select(dim, index - first), inner)


@dataclass(frozen=True, eq=False)
class _Transposed(StoredTensor):
    source: StoredTensor
    dims: tuple[int, int]
    shape: torch.Size

    def copy_to(self, out: torch.Tensor, box: Box) -> None:
        inner = Box(_swapped(box.start, self.dims), _swapped(box.stop, self.dims))
        self.source.copy_to(out.transpose(*self.dims), inner)


@dataclass(frozen=True, eq=False)
class _Narrowed(StoredTensor):
    source: StoredTensor
    dim: int
    start: int
    shape: torch.Size

    def copy_to(self, out: torch.Tensor, box: Box) -> None:
        low, high = box.start[self.dim] + self.start, box.stop[self.dim] + self.start
        self.source.copy_to(out, box.narrow(self.dim, low, high))


@dataclass(frozen=True, eq=False)
class _Squeezed(StoredTensor):
    source: StoredTensor
    dims: tuple[int, ...]
    """Dimensions of the source, of extent 1, which it has not; ascending."""
    shape: torch.Size

    def copy_to(self, out: torch.Tensor, box: Box) -> None:
        start, stop = list(box.start), list(box.stop)
        for dim in self.dims:
            out = out.unsqueeze(dim)
            start.insert(dim, 0)
            stop.insert(dim, 1)
        self.source.copy_to(out, Box(tuple(start), tuple(stop)))


def _swapped(values: Sequence[int], dims: tuple[int, int]) -> tuple[int, ...]:
    out = list(values)
    out[dims[0]], out[dims[1]] = out[dims[1]], out[dims[0]]
    return tuple(out)


def _cat(pieces: Sequence[StoredTensor], dim: int = 0) -> StoredTensor:
    shape, dim = list(pieces[0].shape), dim % pieces[0].ndim
    others = {tuple(piece.shape[:dim]) + tuple(piece.shape[dim + 1 :]) for piece in pieces}
    if len(others) > 1:
        raise ValueError(f"shapes differ: {', '.join(str(list(piece.shape)) for piece in pieces)}")
    shape[dim] = sum(piece.shape[dim] for piece in pieces)
    return _Joined(tuple(pieces), dim, torch.Size(shape))


def _stack(pieces: Sequence[StoredTensor], dim: int = 0) -> StoredTensor:
    shapes = {tuple(piece.shape) for piece in pieces}
    if len(shapes) > 1:
        raise ValueError(f"shapes differ: {', '.join(str(list(shape)) for shape in shapes)}")
    shape, dim = list(pieces[0].shape), dim % (pieces[0].ndim + 1)
    return _Stacked(tuple(pieces), dim, torch.Size([*shape[:dim], len(pieces), *shape[dim:]]))


def _transpose(tensor: StoredTensor, dim0: int, dim1: int) -> StoredTensor:
    dims = dim0 % tensor.ndim, dim1 % tensor.ndim
    return _Transposed(tensor, dims, torch.Size(_swapped(tensor.shape, dims)))


def _chunk(tensor: StoredTensor, chunks: int, dim: int = 0) -> tuple[StoredTensor, ...]:
    dim %= tensor.ndim
    extent = tensor.shape[dim]
    size, pieces = -(-extent // chunks), []
    for start in range(0, extent, size):
        shape = list(tensor.shape)
        shape[dim] = min(size, extent - start)
        pieces.append(_Narrowed(tensor, dim, start, torch.Size(shape)))
    return tuple(pieces)


def _squeeze(tensor: StoredTensor, dim: int | None = None) -> StoredTensor:
    wanted = range(tensor.ndim) if dim is None else [dim % tensor.ndim]
    dims = tuple(i for i in wanted if tensor.shape[i] == 1)
    kept = [size for i, size in enumerate(tensor.shape) if i not in dims]
    return _Squeezed(tensor, dims, torch.Size(kept))


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _cat,
    torch.stack: _stack,
    torch.transpose: _transpose,
    torch.chunk: _chunk,
    torch.squeeze: _squeeze,
}
