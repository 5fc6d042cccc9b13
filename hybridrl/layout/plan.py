"""Plans: the boxes that each rank sends to each other rank, from one layout to another. Pure data.

Invariants, asserted by the tests against single elements:
1. every element that a rank holds in the destination is covered exactly once;
2. an element that the rank holds already is never received;
3. among several holders of a box the one with the receiver's coordinates on the axes of copies
   sends: replicas serve themselves, and senders are balanced.

Planning is by class: parameters of one shape and one rule in each layout. Within a class, ranks are
symbolic. The boxes of all coordinates on the split axes are intersected once, whatever the number
of copies, layers or ranks. Only the arrays of senders and receivers name ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hybridrl.layout.box import Box
from hybridrl.layout.layout import Coordinates, Layout, Rule
from hybridrl.layout.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Move:
    """`src` sends `dst` a box of the parameter `name`; from a rank to itself it is a copy."""

    name: str
    box: Box
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """A box that `receivers[i]` gets from `senders[i]`, for every name of a class."""

    box: Box
    senders: np.ndarray
    receivers: np.ndarray


@dataclass(frozen=True)
class ParameterClass:
    """Parameters that move alike: same shape, same rule before, same rule after."""

    names: tuple[str, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True)
class Plan:
    """The transfers from `src` to `dst`."""

    src: Layout
    dst: Layout
    classes: tuple[ParameterClass, ...]

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of both layouts: 0 to the highest."""
        return 1 + max(*self.src.mesh.ranks, *self.dst.mesh.ranks)

    def moves(self, rank: int | None = None) -> Iterator[Move]:
        """Moves that `rank` takes part in (None: all), parameter by parameter.

        The order is the layout's, and the same on every rank.
        """
        by_name = {name: cls for cls in self.classes for name in cls.names}
        for name in self.dst.rules:
            for transfer in by_name[name].transfers:
                for src, dst in zip(
                    transfer.senders.tolist(), transfer.receivers.tolist(), strict=True
                ):
                    if rank is None or rank in (src, dst):
                        yield Move(name, transfer.box, src, dst)

    @cached_property
    def traffic(self) -> "Traffic":
        """Elements sent and received, by rank and by link."""
        pairs, sizes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for cls in self.classes:
            for transfer in cls.transfers:
                pairs.append(transfer.senders * self.num_ranks + transfer.receivers)
                sizes.append(np.full(len(pairs[-1]), transfer.box.size * len(cls.names)))
        # A table of all pairs would grow with the square of the ranks; few pairs have a link.
        known, index = np.unique(np.concatenate(pairs), return_inverse=True)
        moved = np.zeros(len(known), np.int64)
        np.add.at(moved, index, np.concatenate(sizes))
        ends = np.array(np.divmod(known, self.num_ranks))
        stays = ends[0] == ends[1]
        received, sent, kept = (np.zeros(self.num_ranks, np.int64) for _ in range(3))
        kept[ends[0, stays]] = moved[stays]
        ends, moved = ends[:, ~stays], moved[~stays]
        np.add.at(sent, ends[0], moved)
        np.add.at(received, ends[1], moved)
        links = zip(zip(*ends.tolist(), strict=True), moved.tolist(), strict=True)
        return Traffic(received, sent, kept, dict(links))

    @cached_property
    def least(self) -> np.ndarray:
        """Lower bound on the elements that each rank receives: those wanted less those held.

        Per parameter, so that a surplus of one does not pay for another. Reached if the rank's
        shards nest.
        """
        total = np.zeros(self.num_ranks, np.int64)
        for cls in self.classes:
            name = cls.names[0]
            shall = self.dst.elements(name, self.num_ranks)
            has = self.src.elements(name, self.num_ranks)
            total += np.maximum(shall - has, 0) * len(cls.names)
        return total


@dataclass(frozen=True)
class Traffic:
    """Elements by rank: `received` and `sent` over links, `kept` where they were; and by link."""

    received: np.ndarray
    sent: np.ndarray
    kept: np.ndarray
    links: dict[tuple[int, int], int]


def plan(src: Layout, dst: Layout) -> Plan:
    """The moves that make `dst` out of `src`.

    The layouts may differ in mesh and ranks. Raises ValueError if they differ in parameters or
    shapes, or if the source's boxes, equal ones counted once, do not have the parameter's size.
    """
    _check(src, dst)
    groups: dict[tuple[tuple[int, ...], Rule, Rule], list[str]] = defaultdict(list)
    for name, rule in dst.rules.items():
        groups[dst.shapes[name], src.rules[name], rule].append(name)
    return Plan(
        src,
        dst,
        tuple(
            ParameterClass(tuple(names), tuple(_transfers(src, dst, names[0])))
            for names in groups.values()
        ),
    )


def _check(src: Layout, dst: Layout) -> None:
    for name in dst.rules.keys() | src.rules.keys():
        if name not in src.rules or name not in dst.rules:
            side = "source" if name not in src.rules else "destination"
            raise ValueError(f"{name}: the {side} layout has no parameter of that name")
        if tuple(src.shapes[name]) != tuple(dst.shapes[name]):
            raise ValueError(f"{name}: {src.shapes[name]} in the source, {dst.shapes[name]} after")


def _transfers(src: Layout, dst: Layout, name: str) -> Iterator[Transfer]:
    """The transfers of one parameter: destination boxes intersected with source boxes."""
    holders: dict[tuple[Box, ...], list[Coordinates]] = defaultdict(list)
    for cell, boxes in src.cells(name).items():
        if boxes:
            holders[boxes].append(cell)
    size = Box.whole(src.shapes[name]).size
    num_elements = sum(box.size for boxes in holders for box in boxes)
    if num_elements != size:
        raise ValueError(
            f"{name}: the source holds {num_elements} of {size} elements, counted once each"
        )
    rule, mesh = src.rules[name], src.mesh_of(name)
    grid, axes = mesh.grid(), [split.axis for split in rule.splits]
    for cell, boxes in dst.cells(name).items():
        receivers = dst.ranks(name, cell)
        coordinates = _at_holding_stage(_coordinates(mesh, receivers), rule.stages)
        covered = 0
        for held, cells in holders.items():
            overlaps = [o for a in boxes for b in held if (o := a.intersect(b)) is not None]
            if overlaps:
                nearest = coordinates | _chosen(cells, axes, coordinates, mesh)
                places = tuple(nearest[axis] for axis in mesh.names)
                senders = np.broadcast_to(grid[places], receivers.shape)
                for box in overlaps:
                    covered += box.size
                    yield Transfer(box, senders, receivers)
        wanted = sum(box.size for box in boxes)
        if covered != wanted:
            raise ValueError(f"{name}: {covered} elements for {wanted} at {cell}")


def _chosen(
    cells: list[Coordinates], axes: list[str], receiver: dict[str, np.ndarray], mesh: Mesh
) -> dict[str, np.ndarray]:
    """The coordinates on the split `axes` of the holder that is nearest to each receiver.

    `cells` are the coordinates that hold the same boxes. `receiver` are the receivers' coordinates
    in the parameter's source mesh, at a stage that holds it. On all other axes sender and receiver
    agree.
    """
    options = np.array(cells)
    if len(cells) > 1:
        # The receiver's own coordinate if it is a holder, else spread over the holders.
        wanted = np.stack([receiver[axis] for axis in axes], 1)
        same = (wanted[:, None] == options[None]).all(-1)
        spread = (wanted * np.cumprod([1, *map(mesh.extent, axes[:-1])])).sum(1) % len(cells)
        options = options[np.where(same.any(1), same.argmax(1), spread)]
    return {axis: options[:, i] for i, axis in enumerate(axes)}


def _at_holding_stage(
    coordinates: dict[str, np.ndarray], stages: Sequence[int]
) -> dict[str, np.ndarray]:
    """Move coordinates to the nearest pipeline stage that holds a parameter.

    A coordinate whose own stage holds the parameter stays; any other takes one of the holders.
    """
    if "pp" not in coordinates:
        return coordinates
    pp, holding = coordinates["pp"], np.array(stages)
    nearest = np.where(np.isin(pp, holding), pp, holding[pp % len(holding)])
    return coordinates | {"pp": nearest}


def _coordinates(mesh: Mesh, ranks: np.ndarray) -> dict[str, np.ndarray]:
    """Coordinates of `ranks` by axis; a rank outside of the mesh is wrapped into it."""
    index_of_rank = np.zeros(1 + max(ranks.max(), *mesh.ranks), np.int64) - 1
    index_of_rank[list(mesh.ranks)] = np.arange(mesh.size)
    index = index_of_rank[ranks]
    index = np.where(index < 0, ranks % mesh.size, index)
    sizes = [size for _, size in mesh.axes]
    return dict(zip(mesh.names, np.unravel_index(index, sizes), strict=True))


def subplan(plan: Plan, names: Iterable[str]) -> Plan:
    """The plan restricted to the parameters `names`."""
    wanted = set(names)
    classes = (
        replace(cls, names=tuple(name for name in cls.names if name in wanted))
        for cls in plan.classes
    )
    return Plan(
        plan.src.only(name for name in plan.src.rules if name in wanted),
        plan.dst.only(name for name in plan.dst.rules if name in wanted),
        tuple(cls for cls in classes if cls.names),
    )
