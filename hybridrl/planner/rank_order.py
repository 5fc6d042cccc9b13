"""Which worker gets which rank, where links differ (Pipette, arXiv 2405.18093).

A layout says which ranks exchange what; an order of the workers says over which links. Two starts,
their own order and a greedy chain over the fastest links, are improved by swaps until none helps.
Whole nodes swap first, then single workers. Then others begin from shuffled orders, while there is
time. The seconds of an order are those of the costs that price mappings.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hybridrl.planner.mapping import ClusterShape

Seconds = Callable[[ClusterShape], float]
"""Of a step, on the cluster in some order."""


@dataclass(frozen=True, slots=True)
class RankOrder:
    """The best order that was found, and its seconds beside those of the workers' own order."""

    order: tuple[int, ...]
    seconds: float
    own_s: float


def best_order(
    cluster: ClusterShape, seconds: Seconds, budget_s: float = 2.0, starts: int = 8, seed: int = 0
) -> RankOrder:
    """The order of workers with the least `seconds`; their own one where none is quicker.

    Within `budget_s` there are up to `starts` starts, the first two of them not at random.
    """
    assert cluster.table is not None, "links that do not differ"
    rng, deadline = random.Random(seed), time.monotonic() + budget_s
    known: dict[tuple[int, ...], float] = {}

    def price(order: tuple[int, ...]) -> float:
        if order not in known:
            known[order] = seconds(cluster.ordered(order))
        return known[order]

    own = tuple(range(cluster.ranks))
    own_s, best = price(own), own
    for number in range(starts):
        order = own if number == 0 else _chain(cluster) if number == 1 else _shuffled(own, rng)
        order = _improved(order, cluster.per_node, price, deadline)
        best = min(best, order, key=price)
        if time.monotonic() >= deadline:
            break
    return RankOrder(best, price(best), own_s)


def _improved(
    order: tuple[int, ...],
    per_node: int,
    price: Callable[[tuple[int, ...]], float],
    deadline: float,
) -> tuple[int, ...]:
    """The order after every swap that makes it quicker, until none does or time is up."""
    improves = True
    while improves:
        improves = False
        for swapped in _swaps(order, per_node):
            if time.monotonic() >= deadline:
                return order
            if price(swapped) < price(order) * (1 - 1e-9):
                order, improves = swapped, True
                break
    return order


def _swaps(order: tuple[int, ...], per_node: int) -> Iterator[tuple[int, ...]]:
    """Of two blocks of a node's size, then of two ranks."""
    for size in dict.fromkeys((per_node, 1)):
        starts = range(0, len(order) - size + 1, size)
        for a in starts:
            for b in starts[a // size + 1 :]:
                first, second = order[a : a + size], order[b : b + size]
                yield order[:a] + second + order[a + size : b] + first + order[b + size :]


def _chain(cluster: ClusterShape) -> tuple[int, ...]:
    """From the first worker on, each next one is that with the fastest link to the last."""
    assert cluster.table is not None
    order, rest = [0], list(range(1, cluster.ranks))
    while rest:
        rates = cluster.table.bytes_per_s[order[-1]]
        following = max(rest, key=lambda worker: (rates[worker], -worker))
        rest.remove(following)
        order.append(following)
    return tuple(order)


def _shuffled(order: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    shuffled = list(order)
    rng.shuffle(shuffled)
    return tuple(shuffled)
