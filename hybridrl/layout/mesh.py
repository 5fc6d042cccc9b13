"""Meshes: how ranks are numbered along named axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid. `axes` names its axes, slowest first, with their sizes.

    `ranks` lists the ranks in row-major order, by default 0, 1, ...; no rank occurs twice.
    Example: `Mesh((("pp", 2), ("tp", 4)))` has rank 5 at pp 1, tp 1.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        assert sorted(set(self.ranks)) == sorted(self.ranks), "a rank has two mesh coordinates"
        assert len(self.ranks) == self.size, (self.axes, len(self.ranks))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return prod(size for _, size in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, slowest first."""
        return tuple(name for name, _ in self.axes)

    def extent(self, axis: str) -> int:
        """Length of `axis`; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def grid(self) -> np.ndarray:
        """The ranks as an array with one dimension an axis."""
        return np.array(self.ranks).reshape([size for _, size in self.axes])

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis; KeyError for a rank that is not in the mesh."""
        try:
            index = self.ranks.index(rank)
        except ValueError:
            raise KeyError(rank) from None
        sizes = [size for _, size in self.axes]
        return dict(zip(self.names, map(int, np.unravel_index(index, sizes)), strict=True))

    def along(self, rank: int, *axes: str) -> list[int]:
        """The ranks that differ from `rank` in their coordinates on `axes` alone, ascending.

        Example: in `Mesh((("pp", 2), ("tp", 4)))` those of rank 5 along tp are 4, 5, 6, 7.
        """
        own = self.coordinates(rank)
        index = tuple(slice(None) if name in axes else own[name] for name in self.names)
        return sorted(map(int, self.grid()[index].ravel()))

    def line(self, rank: int, axis: str) -> list[int]:
        """The ranks of `along(rank, axis)` in the order of their coordinates."""
        return next(ranks for ranks in self.lines(axis) if rank in ranks)

    def lines(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ in `axis` alone, each in the order of its coordinates."""
        number = self.names.index(axis)
        return np.moveaxis(self.grid(), number, -1).reshape(-1, self.extent(axis)).tolist()

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates."""
        return int(self.grid()[tuple(coordinates[name] for name in self.names)])


def gen_mesh(positions: Sequence[tuple[int, int, int]], pp: int, tp: int) -> Mesh:
    """The generation mesh of ranks with the coordinates `positions` (instance, pp, tp), by rank."""
    ranks = sorted(range(len(positions)), key=positions.__getitem__)
    return Mesh((("instance", len(positions) // (pp * tp)), ("pp", pp), ("tp", tp)), tuple(ranks))
