"""Layouts: which rank holds which boxes of which parameter. Pure data."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product

import numpy as np

from hybridrl.layout.box import Box, cut
from hybridrl.layout.mesh import Mesh

Coordinates = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """Mesh axis `axis` cuts dimension `dim` into as many chunks as the axis is long.

    With `units` (heads, say) chunks are full units; several coordinates of an axis longer than
    the number of units hold the same one. With `blocks` the dimension consists of so many equal
    blocks (gate and up in one tensor). Each is cut, so a coordinate holds a box of every block.
    """

    axis: str
    dim: int
    units: int = 0
    blocks: int = 1

    def apply(self, boxes: Sequence[Box], index: int, extent: int) -> tuple[Box, ...]:
        """The boxes of coordinate `index` on an axis of length `extent`, out of `boxes`."""
        if self.units and extent > self.units:
            assert extent % self.units == 0, f"{extent} shards cannot share {self.units} units"
            index, extent = index * self.units // extent, self.units
        if self.blocks > 1 and extent > 1:
            boxes = [
                block for i in range(self.blocks) for block in cut(boxes, self.dim, i, self.blocks)
            ]
            return tuple(piece for box in boxes for piece in cut([box], self.dim, index, extent))
        return cut(boxes, self.dim, index, extent)


@dataclass(frozen=True, slots=True)
class Rule:
    """The placement of a parameter: its pipeline `stages`, and the `splits` applied in turn.

    Axes of no split hold copies. The first and the last stage hold a tied embedding. If `padded`
    is set, ranks hold shards of a tensor of that shape, which ends in padding. `mesh` has other
    axes over the layout's ranks (None: the layout's axes).
    """

    stages: tuple[int, ...] = (0,)
    splits: tuple[Split, ...] = ()
    padded: tuple[int, ...] | None = None
    mesh: Mesh | None = None


@dataclass(frozen=True)
class Layout:
    """Parameters of `shapes` on the ranks of `mesh`, each by its rule; axis `pp` counts stages.

    Example: with `Mesh((("fsdp", 2), ("tp", 2)))`, a [8, 4] matrix under
    `Rule(splits=(Split("tp", 0), Split("fsdp", 0)))` has rows 4 and 5 on rank 1 (fsdp 0, tp 1).
    """

    mesh: Mesh
    shapes: Mapping[str, tuple[int, ...]]
    rules: Mapping[str, Rule]
    precise: frozenset[str] = frozenset()
    """Parameters that stay in float32, whatever the format in which others compute and move."""

    def only(self, names: Iterable[str]) -> "Layout":
        """The layout of these parameters alone."""
        kept = dict.fromkeys(names)
        return Layout(
            self.mesh,
            {name: self.shapes[name] for name in kept},
            {name: self.rules[name] for name in kept},
            self.precise & kept.keys(),
        )

    @cached_property
    def alike(self) -> tuple[tuple[str, ...], ...]:
        """The parameters, grouped by rule and shape: the ranks of a group hold equal boxes."""
        groups = dict[tuple[Rule, tuple[int, ...]], list[str]]()
        for name, rule in self.rules.items():
            groups.setdefault((rule, self.shapes[name]), []).append(name)
        return tuple(map(tuple, groups.values()))

    def mesh_of(self, name: str) -> Mesh:
        """The axes of a parameter's rule, over the ranks of `mesh`."""
        return self.rules[name].mesh or self.mesh

    def boxes(self, name: str, rank: int) -> tuple[Box, ...]:
        """The boxes of a parameter that `rank` holds, in the order of its local tensor."""
        whole = Box.whole(self.shapes[name])
        return tuple(real for box in self.local(name, rank) if (real := box.intersect(whole)))

    def local(self, name: str, rank: int) -> tuple[Box, ...]:
        """The boxes that the rank's tensor consists of, padding included."""
        coordinates, rule = self.mesh_of(name).coordinates(rank), self.rules[name]
        if coordinates.get("pp", 0) not in rule.stages:
            return ()
        return self._held(name, tuple(coordinates.get(split.axis, 0) for split in rule.splits))

    def cells(self, name: str) -> dict[Coordinates, tuple[Box, ...]]:
        """The boxes at each coordinate on the axes of the parameter's splits, without padding."""
        mesh = self.mesh_of(name)
        extents = [range(mesh.extent(split.axis)) for split in self.rules[name].splits]
        whole = Box.whole(self.shapes[name])
        return {
            cell: tuple(real for box in self._held(name, cell) if (real := box.intersect(whole)))
            for cell in product(*extents)
        }

    def ranks(self, name: str, cell: Coordinates) -> np.ndarray:
        """All ranks at a coordinate on the split axes, on every stage and copy, ascending."""
        rule, mesh = self.rules[name], self.mesh_of(name)
        fixed = dict(zip((split.axis for split in rule.splits), cell, strict=True))
        index = tuple(
            list(rule.stages) if axis == "pp" else [fixed[axis]] if axis in fixed else range(size)
            for axis, size in mesh.axes
        )
        return np.sort(mesh.grid()[np.ix_(*index)].ravel())

    def elements(self, name: str, num_ranks: int) -> np.ndarray:
        """Elements of a parameter that each of the ranks 0 to `num_ranks` - 1 holds."""
        counts = np.zeros(num_ranks, np.int64)
        for cell, boxes in self.cells(name).items():
            counts[self.ranks(name, cell)] = sum(box.size for box in boxes)
        return counts

    def _held(self, name: str, cell: Coordinates) -> tuple[Box, ...]:
        rule, mesh = self.rules[name], self.mesh_of(name)
        boxes: tuple[Box, ...] = (Box.whole(rule.padded or self.shapes[name]),)
        for split, index in zip(rule.splits, cell, strict=True):
            boxes = split.apply(boxes, index, mesh.extent(split.axis))
        return boxes


def stages_of_layers(
    num_layers: int,
    pp: int,
    per_rank: int = 1,
    zigzag: bool = False,
    chunk_layers: Sequence[int] = (),
) -> list[int]:
    """The pipeline rank of every layer, `per_rank` chunks of consecutive layers a rank.

    Rank i % pp holds chunk i (interleaved 1F1B); with `zigzag` chunks run from rank 0 to pp - 1
    and back (zero-bubble V). Chunks are those of `chunk_bounds`, which raises ValueError.
    """
    out: list[int] = []
    for chunk, (start, stop) in enumerate(chunk_bounds(num_layers, pp * per_rank, chunk_layers)):
        out += [rank_of_chunk(chunk, pp, zigzag)] * (stop - start)
    return out


def chunk_bounds(
    num_layers: int, chunks: int, chunk_layers: Sequence[int] = ()
) -> list[tuple[int, int]]:
    """First layer of each chunk and the one after its last.

    Chunks have `chunk_layers`, or differ by at most one layer; earlier ones are larger. Raises
    ValueError for fewer layers than chunks, and for numbers that do not add up to the layers.
    """
    if num_layers < chunks:
        raise ValueError(f"{num_layers} layers cannot be split into {chunks} pipeline chunks")
    size, larger = divmod(num_layers, chunks)
    sizes = chunk_layers or [size + (chunk < larger) for chunk in range(chunks)]
    if len(sizes) != chunks or sum(sizes) != num_layers:
        wanted = f"{chunks} numbers whose sum is {num_layers}"
        raise ValueError(f"layers of chunks {list(sizes)}, wanted {wanted}")
    ends = list(accumulate(sizes))
    return list(pairwise([0, *ends]))


def rank_of_chunk(chunk: int, pp: int, zigzag: bool = False) -> int:
    """The pipeline rank that holds a chunk, see `stages_of_layers`."""
    pass_number, offset = divmod(chunk, pp)
    return pp - 1 - offset if zigzag and pass_number % 2 else offset
