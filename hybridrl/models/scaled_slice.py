"""Slices of files whose elements are multiplied by the scales of their blocks."""

from typing import Any

import torch


class ScaledSlice:
    """A slice of a safetensors file whose elements are multiplied by the scales of their blocks.

    Zero points, which are subtracted before, have the shape of the scales. Products are made in
    `dtype`, that of the scales by default. It has the methods of the file's slices that readers
    call.
    """

    def __init__(
        self,
        weight: Any,
        scales: Any,
        block: tuple[int, int],
        zeros: Any | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Raises OSError where `scales` are not one for each block."""
        self._weight, self._scales, self._zeros, self._block = weight, scales, zeros, block
        self._dtype = dtype
        *leading, rows, columns = weight.get_shape()
        wanted = [*leading, -(-rows // block[0]), -(-columns // block[1])]
        if scales.get_shape() != wanted:
            raise OSError(f"scales have the shape {scales.get_shape()}, wanted {wanted}")

    def get_shape(self) -> list[int]:
        """The shape of the weight."""
        shape: list[int] = self._weight.get_shape()
        return shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The elements of a box, or with `...` all."""
        shape = self.get_shape()
        ranges = [(0, size) for size in shape]
        if index is not ...:
            ranges = [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]
        scales = self._by_element(self._scales, ranges)
        scales = scales.to(self._dtype or scales.dtype)
        values: torch.Tensor = self._weight[index].to(scales.dtype)
        if self._zeros is not None:
            values = values - self._by_element(self._zeros, ranges).to(scales.dtype)
        return values * scales

    def _by_element(self, blocks: Any, ranges: list[tuple[int, int]]) -> torch.Tensor:
        """What `blocks` have for each element of the box `ranges`."""
        index = [slice(*own) for own in ranges[:-2]]
        for (start, stop), size in zip(ranges[-2:], self._block, strict=True):
            index.append(slice(start // size, -(-stop // size)))
        numbers: torch.Tensor = blocks[tuple(index)]
        for dim, (start, stop), size in zip((-2, -1), ranges[-2:], self._block, strict=True):
            if size < self.get_shape()[dim]:
                numbers = numbers.repeat_interleave(size, dim)
                numbers = numbers.narrow(dim, start % size, stop - start)
        return numbers
