"""Tables of links that differ: equal to plain links where they do not, and wrong ones."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hybridrl.costs.devices import ACCELERATORS, MODELS
from hybridrl.costs.layers import LayerCosts
from hybridrl.costs.links import LinkSpeed, LinkTable
from hybridrl.costs.mapping import (
    ClusterShape,
    PlannedRole,
    SampleLength,
    TrainLayout,
    cluster_of,
)
from hybridrl.costs.model import CostModel

A100 = ACCELERATORS["a100"]
ACTOR = PlannedRole(name="actor", shape=MODELS["7b"], trained=True)
SAMPLES = [SampleLength(64, n) for n in (200, 300, 700, 1500) for _ in range(4)]


def cluster(rates: Sequence[Sequence[float]], per_node: int) -> ClusterShape:
    """With links of so many GB/s."""
    table = LinkTable(
        tuple(tuple(rate * 1e9 for rate in row) for row in rates),
        tuple(tuple(1e-5 for _ in row) for row in rates),
    )
    return replace(cluster_of(A100, len(rates) // per_node, per_node), table=table)


def seconds_of(layout: TrainLayout):  # type: ignore[no-untyped-def]
    """An update in a layout, by the cluster."""

    def seconds(ordered: ClusterShape) -> float:
        costs = CostModel(LayerCosts.of(A100), ordered)
        return costs.update_s(ACTOR, layout, range(ordered.ranks), SAMPLES)

    return seconds


LAYOUTS = [
    TrainLayout(pp=4, micro_batch_tokens=2048),
    TrainLayout(pp=2, tp=2, micro_batch_tokens=2048),
    TrainLayout(pp=2, fsdp=2, micro_batch_tokens=2048),
    TrainLayout(fsdp=2, replicas=2, micro_batch_tokens=2048),
]


def test_equal_links_are_as_without_a_table() -> None:
    """A table of what nodes have anyway gives the same seconds."""
    plain = cluster_of(A100, 2, 2)
    links = [[plain.within if i // 2 == j // 2 else plain.between for j in range(4)]
             for i in range(4)]  # fmt: skip
    table = LinkTable(
        tuple(tuple(link.bytes_per_s for link in row) for row in links),
        tuple(tuple(link.message_s for link in row) for row in links),
    )
    for layout in LAYOUTS:
        same = seconds_of(layout)(replace(plain, table=table))
        assert same == pytest.approx(seconds_of(layout)(plain)), layout


def test_a_link_is_that_of_the_workers() -> None:
    whole = cluster([[1, 2, 3], [2, 1, 4], [3, 4, 1]], per_node=1).ordered((2, 0, 1))
    assert whole.link([0, 1]) == LinkSpeed(3e9, 1e-5)
    assert whole.link([1, 2]) == LinkSpeed(2e9, 1e-5)
    assert whole.link([0, 1, 2]).bytes_per_s == 2e9  # the slowest of the ring


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "wanted bytes_per_s"),
        ({"bytes_per_s": [[1, 2], [3]]}, "bytes_per_s: wanted 2 rows of 2 numbers each"),
        ({"bytes_per_s": [[1, "x"], [1, 1]]}, "bytes_per_s: wanted numbers"),
        ({"bytes_per_s": [[0, 0], [1, 0]]}, "from 0 to 1: 0 and 0, wanted bytes_per_s above 0"),
        ({"bytes_per_s": [[0, math.nan], [1, 0]]}, "from 0 to 1: nan and 0, wanted bytes_per_s"),
        ({"bytes_per_s": [[1, 1], [1, 1]], "message_s": [[0]]}, "message_s: wanted 2 rows"),
    ],
)
def test_a_wrong_table_is_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LinkTable.from_json(values)
