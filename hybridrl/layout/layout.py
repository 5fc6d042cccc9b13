"""Layouts: which rank holds which boxes of which parameter. Pure data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import numpy as np

from hybridrl.layout.box import Box, cut
from hybridrl.layout.mesh import Mesh

Coordinates = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Mesh axis `axis` cuts dimension `dim` into chunks, as many as the axis has places.

    With `units` (heads, say) chunks are whole units; an axis with more places than units has
    several places that hold the same one. With `blocks` the dimension is made of so many equal
    blocks (gate and up in one tensor) and each is cut, so a place holds a box of every block.
    """

    axis: str
    dim: int
    units: int = 0
    blocks: int = 1

    def apply(self, boxes: Sequence[Box], place: int, places: int) -> tuple[Box, ...]:
        """What `place` of `places` holds out of `boxes`."""
        if self.units and places > self.units:
            assert places % self.units == 0, f"{places} places cannot share {self.units} units"
            place, places = place * self.units // places, self.units
        if self.blocks > 1:
            boxes = [
                part for i in range(self.blocks) for part in cut(boxes, self.dim, i, self.blocks)
            ]
            return tuple(piece for box in boxes for piece in cut([box], self.dim, place, places))
        return cut(boxes, self.dim, place, places)


@dataclass(frozen=True, slots=True)
class Rule:
    """Where a parameter lies: on the pipeline `stages` named, there cut by `splits` in turn.

    Axes of no split hold copies. A tied embedding lies on the first and on the last stage. Where
    `padded` is set, ranks hold parts of a tensor of that shape, whose end is not the parameter's.
    """

    stages: tuple[int, ...] = (0,)
    splits: tuple[Split, ...] = ()
    padded: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Layout:
    """Parameters of `shapes` on the ranks of `mesh`, each by its rule. The axis `pp` is of stages.

    Example: with `Mesh((("fsdp", 2), ("tp", 2)))`, a [8, 4] matrix under
    `Rule(splits=(Split("tp", 0), Split("fsdp", 0)))` has rows 4 and 5 on rank 1 (fsdp 0, tp 1).
    """

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    rules: Mapping[str, Rule]

    def boxes(self, name: str, rank: int) -> tuple[Box, ...]:
        """What `rank` holds of a parameter, in the order in which its tensor has them."""
        whole = Box.whole(self.shapes[name])
        return tuple(part for box in self.local(name, rank) if (part := box.intersect(whole)))

    def local(self, name: str, rank: int) -> tuple[Box, ...]:
        """The boxes that the rank's tensor consists of, padding included."""
        coordinates, rule = self.mesh.coordinates(rank), self.rules[name]
        if coordinates.get("pp", 0) not in rule.stages:
            return ()
        return self._held(name, tuple(coordinates.get(split.axis, 0) for split in rule.splits))

    def cells(self, name: str) -> dict[Coordinates, tuple[Box, ...]]:
        """The boxes at each place along the axes of the parameter's splits, without padding."""
        extents = [range(self.mesh.extent(split.axis)) for split in self.rules[name].splits]
        whole = Box.whole(self.shapes[name])
        return {
            cell: tuple(part for box in self._held(name, cell) if (part := box.intersect(whole)))
            for cell in product(*extents)
        }

    def ranks(self, name: str, cell: Coordinates) -> np.ndarray:
        """All ranks at a place along the split axes, on every stage and copy, ascending."""
        rule = self.rules[name]
        fixed = dict(zip((split.axis for split in rule.splits), cell, strict=True))
        index = tuple(
            list(rule.stages) if axis == "pp" else [fixed[axis]] if axis in fixed else range(size)
            for axis, size in self.mesh.axes
        )
        return np.sort(self.mesh.grid()[np.ix_(*index)].ravel())

    def elements(self, name: str, num_ranks: int) -> np.ndarray:
        """Elements of a parameter that each of the ranks 0 to `num_ranks` - 1 holds."""
        found = np.zeros(num_ranks, np.int64)
        for cell, boxes in self.cells(name).items():
            found[self.ranks(name, cell)] = sum(box.size for box in boxes)
        return found

    def _held(self, name: str, places: Coordinates) -> tuple[Box, ...]:
        rule = self.rules[name]
        boxes: tuple[Box, ...] = (Box.whole(rule.padded or self.shapes[name]),)
        for split, place in zip(rule.splits, places, strict=True):
            boxes = split.apply(boxes, place, self.mesh.extent(split.axis))
        return boxes


def stages_of_layers(
    num_layers: int, pp: int, per_rank: int = 1, zigzag: bool = False
) -> list[int]:
    """The pipeline rank of every layer, `per_rank` chunks of consecutive layers a rank.

    Chunk i lies on rank i % pp (interleaved 1F1B), or with `zigzag` on rank 0 to pp - 1 and back
    (zero-bubble V). Chunks differ by at most one layer; earlier ones are larger. Raises ValueError
    for fewer layers than chunks.
    """
    out: list[int] = []
    for chunk, (start, stop) in enumerate(chunk_bounds(num_layers, pp * per_rank)):
        out += [rank_of_chunk(chunk, pp, zigzag)] * (stop - start)
    return out


def chunk_bounds(num_layers: int, chunks: int) -> list[tuple[int, int]]:
    """First layer of each chunk and the one behind its last."""
    if num_layers < chunks:
        raise ValueError(f"{num_layers} layers cannot be split into {chunks} pipeline chunks")
    size, larger = divmod(num_layers, chunks)
    ends = list(accumulate(size + (chunk < larger) for chunk in range(chunks)))
    return list(pairwise([0, *ends]))


def rank_of_chunk(chunk: int, pp: int, zigzag: bool = False) -> int:
    """The pipeline rank that holds a chunk, see `stages_of_layers`."""
    turn, place = divmod(chunk, pp)
    return pp - 1 - place if zigzag and turn % 2 else place
