"""Quantized weights in files, read as what they stand for: boxes are dequantized as they are read.

FP8 in blocks (DeepSeek-V3, arXiv 2412.19437, section 3.3; Qwen's FP8 checkpoints) has for a weight
[rows, columns] in float8 a tensor `..._scale_inv` [rows / block, columns / block], by which each
element of a block is multiplied. The last block of a row or column may be smaller.

MXFP4 (OCP Microscaling Formats 1.0, section 5.3; gpt-oss) has for experts [experts, columns, rows]
a tensor `..._blocks` [experts, rows, columns / 32, 16] of two numbers a byte, and the exponents of
their blocks of 32 in `..._scales` [experts, rows, columns / 32].

`compressed_tensors.py` has the formats of that package.
"""

from typing import Any

import torch
from transformers import PretrainedConfig

from hybridrl.models import compressed_tensors
from hybridrl.models.config_json import scale_block
from hybridrl.models.scaled_slice import ScaledSlice
from hybridrl.models.weight_files import first_few
from hybridrl.models.weight_scheme import scheme_of

SCALE = "_scale_inv"
"""What a scale's name has behind that of its weight."""


BLOCKS, EXPONENTS = "_blocks", "_scales"
"""What the names of an MXFP4 weight's tensors have behind it."""
_SHARED = 32  # elements of an MXFP4 block
_BIAS = 127  # of its exponent
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FP4 = torch.cat([_VALUES, -_VALUES])
"""The numbers of four bits, a sign, two of exponent and one of mantissa."""


def stored_quantization(path: str) -> dict[str, Any] | None:
    """How `config.json` at `path`, a directory or a hub name, says that weights are quantized."""
    settings, _ = PretrainedConfig.get_config_dict(path)
    return settings.get("quantization_config")


class MXFP4Slice:
    """A slice of experts that a file has in MXFP4, transposed as transformers holds them."""

    def __init__(self, blocks: Any, exponents: Any) -> None:
        """Raises OSError where `exponents` are not one for each block."""
        self._blocks, self._exponents = blocks, exponents
        if [*exponents.get_shape(), _SHARED // 2] != blocks.get_shape():
            got, wanted = exponents.get_shape(), blocks.get_shape()[:-1]
            raise OSError(f"scales have the shape {got}, wanted {wanted}")

    def get_shape(self) -> list[int]:
        """The shape [experts, columns, rows] of the weight."""
        experts, rows, blocks, _ = self._blocks.get_shape()
        return [experts, blocks * _SHARED, rows]

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The elements of a box, or with `...` all, in float32."""
        shape = self.get_shape()
        index = (slice(None),) * len(shape) if index is ... else index
        experts, columns, rows = index
        start, stop, _ = columns.indices(shape[1])
        of_blocks = slice(start // _SHARED, -(-stop // _SHARED))
        packed: torch.Tensor = self._blocks[experts, rows, of_blocks]
        exponents = self._exponents[experts, rows, of_blocks].int() - _BIAS
        values = torch.stack([_FP4[(packed & 15).long()], _FP4[(packed >> 4).long()]], -1)
        values = values.flatten(-2).ldexp(exponents[..., None]).flatten(-2)
        return values.narrow(-1, start % _SHARED, stop - start).transpose(-1, -2)


def dequantized(stored: dict[str, Any], path: str) -> dict[str, Any]:
    """The slices of the files at `path`, where they are quantized those of dequantized weights.

    Raises OSError for a quantized weight without scales, or scales without their weight.
    """
    if any(name.endswith(f"weight{compressed_tensors.SCALE}") for name in stored):
        scheme = scheme_of(stored_quantization(path))
        if scheme is not None:
            return compressed_tensors.dequantized(stored, scheme)
    stored = _without_mxfp4(stored)
    in_float8 = [
        name
        for name, tensor in stored.items()
        if not isinstance(tensor, MXFP4Slice) and tensor.get_dtype().startswith("F8")
    ]
    if not in_float8 and not any(name.endswith(SCALE) for name in stored):
        return stored
    block = scale_block(stored_quantization(path))
    if block is None:
        raise OSError(f"{first_few(in_float8)} in float8, of which config.json does not know")
    scales = {name.removesuffix(SCALE) for name in stored if name.endswith(SCALE)}
    if lost := sorted(scales - stored.keys()):
        raise OSError(f"{lost[0]}{SCALE} has no weight")
    slices = {}
    for name, tensor in stored.items():
        if name in scales:
            slices[name] = ScaledSlice(tensor, stored[name + SCALE], block, dtype=torch.float32)
        elif name in in_float8 and not name.endswith(SCALE):
            raise OSError(f"{name} is in float8 and has no {SCALE}")
        elif not name.endswith(SCALE):
            slices[name] = tensor
    return slices


def _without_mxfp4(stored: dict[str, Any]) -> dict[str, Any]:
    """The slices, of which those in MXFP4 become `MXFP4Slice`s."""
    slices = dict(stored)
    for name in stored:
        weight = name.removesuffix(BLOCKS)
        if name != weight and stored[name].get_dtype() == "U8":
            if weight + EXPONENTS not in stored:
                raise OSError(f"{name} has no {weight}{EXPONENTS}")
            slices[weight] = MXFP4Slice(slices.pop(name), slices.pop(weight + EXPONENTS))
    return slices
