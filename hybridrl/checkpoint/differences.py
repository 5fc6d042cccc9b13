"""How far tensors of two replays are apart: of their batches, and of the weights after a step."""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_MODEL = "model/"
"""Begins the names of parameters, before those of the optimizer's state."""


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """Two tensors of one name: the first element that differs, and the largest difference.

    `most` is infinite for token ids, and where the sizes differ. `shapes` are there in place of an
    element where the two cannot be compared: None for a tensor that is missing.
    """

    name: str
    position: tuple[int, ...] = ()
    values: tuple[float, float] = (math.nan, math.nan)
    differing: int = 0
    size: int = 0
    most: float = math.inf
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None] | None = None

    def __str__(self) -> str:
        if self.shapes is not None:
            first, second = ("missing" if x is None else str(list(x)) for x in self.shapes)
            return f"{self.name}: {first} in the first run, {second} in the second"
        place = ", ".join(map(str, self.position))
        amount = "" if math.isinf(self.most) else f", at most by {self.most:.3g}"
        one, other = self.values
        return (
            f"{self.name}: {self.differing} of {self.size} elements differ{amount};"
            f" the first, [{place}], is {one:.9g} and {other:.9g}"
        )


def difference(name: str, one: torch.Tensor, other: torch.Tensor) -> TensorDifference | None:
    """The difference of two tensors; None for equal bits.

    Sequences of other lengths are compared over what both have; for other shapes see `shapes`.
    """
    sizes_differ = one.shape != other.shape
    if sizes_differ and not one.dim() == other.dim() == 1:
        return TensorDifference(name, shapes=(tuple(one.shape), tuple(other.shape)))
    if sizes_differ:
        rows = min(len(one), len(other))
        one, other = one[:rows], other[:rows]
    unequal = (one != other) & ~(one.isnan() & other.isnan())
    places = unequal.nonzero()
    if not len(places) and not sizes_differ:
        return None
    exact = sizes_differ or not one.is_floating_point()
    most = math.inf if exact else float((one.double() - other.double()).abs().nan_to_num().max())
    position = tuple(places[0].tolist()) if len(places) else (len(one),)
    values = (float(one[position]), float(other[position])) if len(places) else (math.nan, math.nan)
    return TensorDifference(name, position, values, len(places), one.numel(), most)


def batch_difference(one: Path, other: Path, key: str) -> TensorDifference | None:
    """The difference of the tensor `ID/FIELD` in two folders of `write_batch`; None if equal."""
    tensors = [_batch_tensor(folder, key) for folder in (one, other)]
    if tensors[0] is None or tensors[1] is None:
        return None
    return difference(key, tensors[0], tensors[1])


def _batch_tensor(folder: Path, key: str) -> torch.Tensor | None:
    for file in sorted(folder.glob("tensors_*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if key in tensors.keys():  # noqa: SIM118 (it is no mapping)
                tensor: torch.Tensor = tensors.get_tensor(key)
                return tensor
    return None


def weight_difference(one: Path, other: Path) -> list[TensorDifference]:
    """The differences of all parameters in two folders of a role's trained weights.

    Tensors are read one at a time. A parameter that one folder lacks differs: an adapter, say, or a
    layer of another model.
    """
    first, second = _parameters(one), _parameters(other)
    differences = list[TensorDifference]()
    for name in first | second:
        shapes = tuple(tuple(x[name].size) if name in x else None for x in (first, second))
        if shapes[0] != shapes[1]:
            differences.append(TensorDifference(name, shapes=(shapes[0], shapes[1])))
            continue
        tensors = (_weights(folder, name, first[name]) for folder in (one, other))
        if (apart := difference(name, *tensors)) is not None:
            differences.append(apart)
    return differences


def _parameters(folder: Path) -> dict[str, TensorStorageMetadata]:
    """The parameters in a folder, by name."""
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name.removeprefix(_MODEL): metadata
        for name, metadata in stored.items()
        if name.startswith(_MODEL) and isinstance(metadata, TensorStorageMetadata)
    }


def _weights(folder: Path, name: str, stored: TensorStorageMetadata) -> torch.Tensor:
    state = {_MODEL + name: torch.empty(stored.size, dtype=stored.properties.dtype)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as wanted
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=True)
    return state[_MODEL + name]
