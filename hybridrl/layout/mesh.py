"""Meshes: how ranks are numbered along named axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks in a grid. `axes` names its axes, slowest first, with their sizes.

    `ranks` gives the rank at each place, in row-major order; by default place i is rank i. One
    rank stands at one place. Example: `Mesh((("pp", 2), ("tp", 4)))` has rank 5 at pp 1, tp 1.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        assert sorted(set(self.ranks)) == sorted(self.ranks), "a rank stands at two places"
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
        """Number of places along `axis`; 1 for an axis that the mesh does not have."""
        return dict(self.axes).get(axis, 1)

    def grid(self) -> np.ndarray:
        """The ranks as an array with one dimension an axis."""
        return np.array(self.ranks).reshape([size for _, size in self.axes])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands; KeyError for a rank that is not in the mesh."""
        try:
            place = self.ranks.index(rank)
        except ValueError:
            raise KeyError(rank) from None
        sizes = [size for _, size in self.axes]
        return dict(zip(self.names, map(int, np.unravel_index(place, sizes)), strict=True))

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at these coordinates."""
        return int(self.grid()[tuple(coordinates[name] for name in self.names)])


def gen_mesh(positions: Sequence[tuple[int, int, int]], pp: int, tp: int) -> Mesh:
    """The generation mesh of ranks that stand at (instance, pp, tp) `positions`, by rank."""
    ranks = sorted(range(len(positions)), key=positions.__getitem__)
    return Mesh((("instance", len(positions) // (pp * tp)), ("pp", pp), ("tp", tp)), tuple(ranks))
