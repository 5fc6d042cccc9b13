"""Weights as compressed-tensors has them (llm-compressor, vLLM), dequantized as they are read.

A linear layer has in place of `weight` [rows, columns]:

- `weight` in float8 or int8 (`float-quantized`, `int-quantized`, `naive-quantized`), or
  `weight_packed` [rows, columns * bits / 32] of int32, which has the numbers of a row one after the
  other from the lowest bits on, each without a sign, and `weight_shape` (`pack-quantized`);
- `weight_scale`, by which numbers are multiplied: one in all (strategy `tensor`), one a row
  (`channel`), one for so many columns of a row (`group`), or one a block (`block`);
- `weight_zero_point` where the scheme is not symmetric, which is taken off before; packed along the
  rows, where the weight is.

Products are made in the dtype of the scales, as the package does, so that numbers are the same.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.models.scaled_slice import ScaledSlice
from hybridrl.models.weight_scheme import WORD, WeightScheme

PACKED, SHAPE, SCALE, ZERO_POINT = "_packed", "_shape", "_scale", "_zero_point"
"""What names have behind those of weights."""
_OF_VALUES = tuple(
    f".{name}{end}" for name in ("input", "output", "q", "k", "v") for end in (SCALE, ZERO_POINT)
)
"""How the names of scales of activations and caches end, of which training has no use."""
_QUANTIZED = ("F8", "I8")
"""How safetensors begins the names of dtypes whose numbers stand for others."""


def dequantized(stored: Mapping[str, Any], scheme: WeightScheme) -> dict[str, Any]:
    """The slices of a checkpoint's files, in which dequantized weights stand for quantized ones.

    Raises OSError for a weight without scales or a zero point, and for scales without a weight.
    """
    slices = {name: one for name, one in stored.items() if not name.endswith(_OF_VALUES)}
    weights = {}
    for name in stored:
        if name.endswith(f"weight{SCALE}"):
            weight = name.removesuffix(SCALE)
            weights[weight] = _taken(slices, weight, scheme)
    for name, one in slices.items():
        if name.endswith(f"weight{PACKED}") or one.get_dtype().startswith(_QUANTIZED):
            raise OSError(f"{name} has no {name.removesuffix(PACKED)}{SCALE}")
    return slices | weights


def _taken(slices: dict[str, Any], weight: str, scheme: WeightScheme) -> ScaledSlice:
    """Take what stands for `weight`, which has scales, out of the slices."""
    source = weight + PACKED if scheme.packed else weight
    parts = [source, weight + SCALE, *[weight + ZERO_POINT] * (not scheme.symmetric)]
    for name in parts:
        if name not in slices:
            raise OSError(f"{weight}{SCALE} has no {name}")
    values, scales = slices.pop(source), slices.pop(weight + SCALE)
    if scheme.packed:
        values = PackedSlice(values, slices.pop(weight + SHAPE)[...].tolist(), scheme.bits)
    rows, columns = values.get_shape()
    block = scheme.block_of(rows, columns)
    counts = [-(-rows // block[0]), -(-columns // block[1])]
    zeros = slices.pop(weight + ZERO_POINT, None)
    if scheme.symmetric:
        zeros = None  # older versions have stored zeros
    elif scheme.packed and scheme.strategy in ("channel", "group"):
        zeros = PackedSlice(zeros, counts, scheme.bits, dim=0)
    else:
        zeros = Reshaped(zeros, counts)
    return ScaledSlice(values, Reshaped(scales, counts), block, zeros)


class PackedSlice:
    """Numbers of a few bits in a slice of int32 words: read as int8, from -2^(bits - 1) on.

    `shape` [rows, columns] is theirs; they are packed along `dim`, the last words perhaps not full.
    """

    def __init__(self, words: Any, shape: list[int], bits: int, dim: int = 1) -> None:
        """Raises OSError where `words` are not as many as the numbers take."""
        self._words, self._shape, self._bits, self._dim = words, shape, bits, dim
        wanted = list(shape)
        wanted[dim] = -(-shape[dim] * bits // WORD)
        if words.get_shape() != wanted:
            raise OSError(f"packed weights have the shape {words.get_shape()}, wanted {wanted}")

    def get_shape(self) -> list[int]:
        """The shape of the numbers."""
        return self._shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The numbers of a box, or with `...` all."""
        index = [slice(None), slice(None)] if index is ... else list(index)
        each, dim = WORD // self._bits, self._dim
        start, stop, _ = index[dim].indices(self._shape[dim])
        index[dim] = slice(start // each, -(-stop // each))
        words: torch.Tensor = self._words[tuple(index)].movedim(dim, -1)
        shifts = torch.arange(0, WORD, self._bits, dtype=torch.int32)
        numbers = (words[..., None] >> shifts) & ((1 << self._bits) - 1)
        numbers = numbers.flatten(-2).narrow(-1, start % each, max(0, stop - start))
        return (numbers - (1 << (self._bits - 1))).to(torch.int8).movedim(-1, dim)


class Reshaped:
    """A slice of a few numbers in another shape of as many: one a row may lack its dimension."""

    def __init__(self, stored: Any, shape: list[int]) -> None:
        """Raises OSError where the numbers are others than `shape` has."""
        self._stored, self._shape = stored, shape
        own = stored.get_shape()
        if torch.Size(own).numel() != torch.Size(shape).numel():
            raise OSError(f"scales have the shape {own}, wanted {shape}")
        self._is_same = own == shape

    def get_shape(self) -> list[int]:
        """The shape that it has here."""
        return self._shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The numbers of a box."""
        if self._is_same:
            box: torch.Tensor = self._stored[index]
            return box
        whole: torch.Tensor = self._stored[...].view(self._shape)
        return whole[index]
