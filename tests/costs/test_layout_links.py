"""Every group of a layout counts, and every hop between stages, also without a table of links."""

from hybridrl.costs.devices import ACCELERATORS
from hybridrl.costs.mapping import LayoutLinks, TrainLayout, cluster_of


def test_a_hop_across_nodes_is_that_of_the_network() -> None:
    """Two nodes of 8, pp 4: stages 0 and 1 are on one node, 2 and 3 on the other."""
    cluster = cluster_of(ACCELERATORS["a100"], 2, 8)
    hops = LayoutLinks(cluster).hops(TrainLayout(pp=4, fsdp=4), range(16))
    assert hops[0][1] == hops[2][3] == cluster.within
    assert hops[1][2] == hops[2][1] == cluster.link([7, 8])
    assert hops[1][2].bytes_per_s < cluster.within.bytes_per_s


def test_the_group_on_most_nodes_is_the_slowest() -> None:
    """Three nodes of 4, fsdp 3: ranks 0 to 2 are on one node, 3 to 5 on two."""
    cluster = cluster_of(ACCELERATORS["a100"], 3, 4)
    link = LayoutLinks(cluster).along(TrainLayout(pp=4, fsdp=3), range(12), "fsdp")
    assert link == cluster.link([3, 4, 5]) != cluster.link([0, 1, 2])
