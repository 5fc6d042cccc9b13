"""Which links the collectives and messages of a layout cross, on the ranks of a role's pool."""

from collections.abc import Sequence
from functools import lru_cache

from hybridrl.costs.links import LinkSpeed
from hybridrl.costs.mapping import ClusterShape, TrainLayout
from hybridrl.layout.mesh import Mesh

AXES = ("pp", "replicas", "fsdp", "tp")

AxisSizes = tuple[int, ...]
"""Sizes of the `AXES`."""


class LayoutLinks:
    """Links by axis of a training layout; those of all groups along it count, which run at once."""

    def __init__(self, cluster: ClusterShape) -> None:
        self.cluster = cluster
        # A search asks for the same ones again and again.
        self._slowest = lru_cache(4096)(self._slowest_along)
        self._matrix = lru_cache(4096)(self._hops)
        self._among = lru_cache(4096)(cluster.link)

    def among(self, ranks: range) -> LinkSpeed:
        """The slowest link of a collective of all these ranks."""
        return self._among(self.cluster.aligned(ranks))

    def along(self, layout: TrainLayout, ranks: range, axis: str) -> LinkSpeed:
        """The slowest link of a collective along an axis."""
        return self._slowest(_sizes(layout), self.cluster.aligned(ranks), axis)

    def hops(self, layout: TrainLayout, ranks: range) -> tuple[tuple[LinkSpeed, ...], ...]:
        """The slowest link from each pipeline stage to each other one, of all their ranks."""
        return self._matrix(_sizes(layout), self.cluster.aligned(ranks))

    def between(self, sources: Sequence[int], targets: Sequence[int]) -> LinkSpeed:
        """The slowest link of messages from each source to its target."""
        return self.cluster.slowest([list(pair) for pair in zip(sources, targets, strict=True)])

    def _slowest_along(self, sizes: AxisSizes, ranks: range, axis: str) -> LinkSpeed:
        return self.cluster.slowest(_lines(sizes, ranks, axis))

    def _hops(self, sizes: AxisSizes, ranks: range) -> tuple[tuple[LinkSpeed, ...], ...]:
        stages = [*zip(*_lines(sizes, ranks, "pp"), strict=True)]
        return tuple(tuple(self.between(a, b) for b in stages) for a in stages)


def _sizes(layout: TrainLayout) -> AxisSizes:
    return layout.pp, layout.replicas, layout.fsdp, layout.tp


def _lines(sizes: AxisSizes, ranks: range, axis: str) -> list[list[int]]:
    """The ranks that differ along one axis alone, each group in order."""
    number = 1
    for size in sizes:
        number *= size
    return Mesh(tuple(zip(AXES, sizes, strict=True)), tuple(ranks[:number])).lines(axis)
