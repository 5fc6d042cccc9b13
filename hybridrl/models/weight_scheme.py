"""How `config.json` says that compressed-tensors has stored weights; without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORD = 32
"""Bits of the words that numbers are packed in."""
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_BITS = {False: (8,), True: (1, 2, 4, 8)}
"""Bits that are read: of numbers by themselves, and of packed ones, which fill a word."""


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How all quantized weights of a checkpoint are stored; `group` and `block` are their sizes."""

    packed: bool
    bits: int
    strategy: str
    group: int
    block: tuple[int, ...]
    symmetric: bool

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of a weight that have one scale."""
        sizes = {
            "tensor": (rows, columns),
            "channel": (1, columns),
            "group": (1, self.group),
            "block": self.block,
        }
        of_rows, of_columns = sizes[self.strategy]
        return of_rows, of_columns


def scheme_of(quantization: Mapping[str, Any] | None) -> WeightScheme | None:
    """The scheme of a checkpoint's weights; None where it is none of those that are read.

    `quantization` is what `config.json` says of it.
    """
    if not quantization or quantization.get("quant_method") != "compressed-tensors":
        return None
    groups = (quantization.get("config_groups") or {}).values()
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    written = quantization.get("quantization_status", "compressed") == "compressed"
    if not written or sparsity != "dense" or quantization.get("transform_config"):
        return None
    schemes = {_scheme(group, quantization.get("format")) for group in groups}
    return schemes.pop() if len(schemes) == 1 else None


def _scheme(group: Mapping[str, Any], format: str | None) -> WeightScheme | None:
    weights: dict[str, Any] = group.get("weights") or {}
    format = group.get("format") or format
    strategy, bits = weights.get("strategy", ""), weights.get("num_bits", 0)
    packed = format == "pack-quantized"
    known = format in _FORMATS and strategy in _STRATEGIES and bits in _BITS[packed]
    if not known or weights.get("actorder") in ("group", True):  # columns in another order
        return None
    size, block = weights.get("group_size") or 0, tuple(weights.get("block_structure") or ())
    if (strategy == "group" and size < 1) or (strategy == "block" and len(block) != 2):
        return None
    return WeightScheme(packed, bits, strategy, size, block, weights.get("symmetric", True))
