"""Partitions of roles into pools, and of ranks among them."""

from itertools import chain, product

from hybridrl.plan.search_space import allocation_step, allocations, set_partitions


def test_there_are_bell_numbers_of_partitions() -> None:
    """1, 1, 2, 5, 15, 52; PPO's four roles have 15."""
    sizes = [len(list(set_partitions(range(n)))) for n in range(6)]
    assert sizes == [1, 1, 2, 5, 15, 52]
    partitions = list(set_partitions(["actor", "critic", "reference", "reward"]))
    as_sets = {frozenset(frozenset(names) for names in sets) for sets in partitions}
    assert len(as_sets) == 15
    assert all("actor" in sets[0] for sets in partitions)
    assert all(sorted(chain(*sets)) == sorted(partitions[0][0]) for sets in partitions)


def test_allocations_deal_all_ranks() -> None:
    """Against every tuple of multiples."""
    for ranks, pools, step in product((4, 6, 8), (1, 2, 3), (1, 2)):
        dealt = list(allocations(ranks, pools, step))
        every = [
            sizes
            for sizes in product(range(step, ranks + 1, step), repeat=pools)
            if sum(sizes) == ranks
        ]
        assert sorted(dealt) == every


def test_pools_of_large_clusters_are_sixteenths() -> None:
    """One on few ranks."""
    assert [allocation_step(ranks, 2) for ranks in (2, 8, 16, 128, 1024)] == [1, 1, 1, 8, 64]
