"""Generation coordinates of each training rank (HybridFlow, arXiv 2409.19256, section 5.3).

A rank that generates with weights that it trains receives only the missing elements. With training
p-t-d and generation p_g-t_g, HybridFlow's strided rule makes a rank's generation shard contain its
training shard. Here FSDP splits training shards as well, which refines tp: the fine index
q = tp * F + fsdp runs over T * F shards.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

from hybridrl.config.layout import Grouping, TrainLayoutConfig

Position = tuple[int, int, int]
"""(instance, pp, tp) of a rank in generation."""


@dataclass(frozen=True, slots=True)
class TrainAxes:
    """Sizes of the training axes; rank = ((pp * replicas + replica) * fsdp + f) * tp + t.

    Experts have two axes over the ranks of fsdp x tp: q = t * fsdp + f = e * efsdp + f_e. `ep`
    splits the experts, and FSDP shards the experts of a rank over `efsdp`. The fine index q is also
    that of generation's strided order, so shards of experts nest as those of other weights do.
    With `ep_near` the ranks of an ep group are consecutive: f * tp + t = f_e * ep + e.
    """

    pp: int = 1
    replicas: int = 1
    fsdp: int = 1
    tp: int = 1
    ep: int = 1
    ep_near: bool = False

    @classmethod
    def of(cls, layout: TrainLayoutConfig) -> "TrainAxes":
        """The axes of resolved settings."""
        near = layout.ep_grouping is Grouping.vanilla
        return cls(layout.pp, layout.replicas, layout.fsdp, layout.tp, layout.ep, near)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pp * self.replicas * self.fsdp * self.tp

    @property
    def shards(self) -> int:
        """Number of ranks that hold the model once."""
        return self.pp * self.fsdp * self.tp

    @property
    def efsdp(self) -> int:
        """Number of ranks that share the same experts."""
        return self.fsdp * self.tp // self.ep


def gen_positions(
    train: TrainAxes, pp: int, tp: int, grouping: Grouping, nodes: Sequence[Hashable] = ()
) -> list[Position]:
    """The generation coordinates of every rank, with `pp` stages and `tp`-way tensor parallelism.

    Every position of every instance has one rank. `nodes` has the node of each rank; without it all
    are on one. `auto` is not an order: see `layout.switching`.
    """
    assert train.ranks % (pp * tp) == 0, (train, pp, tp)
    vanilla = list(product(range(train.ranks // (pp * tp)), range(pp), range(tp)))
    if grouping is Grouping.vanilla:
        return vanilla
    strided = list(_strided(train, pp, tp))
    if grouping is Grouping.strided:
        return strided
    assert grouping is Grouping.node_strided, grouping
    return _node_strided(strided, vanilla, nodes or [0] * train.ranks)


def nodes_spanned(positions: Sequence[Position], nodes: Sequence[Hashable] = ()) -> tuple[int, int]:
    """How many nodes tp groups, and then whole instances, have besides their first, in sum."""
    if not nodes:
        return 0, 0
    groups, instances = defaultdict(set), defaultdict(set)
    for (instance, stage, _), node in zip(positions, nodes, strict=True):
        groups[instance, stage].add(node)
        instances[instance].add(node)
    return _besides_first(groups.values()), _besides_first(instances.values())


def _besides_first(groups: Iterable[set[Hashable]]) -> int:
    return sum(len(group) - 1 for group in groups)


def _node_strided(
    strided: Sequence[Position], vanilla: Sequence[Position], nodes: Sequence[Hashable]
) -> list[Position]:
    """The places of `vanilla`, node by node, dealt among the ranks of each node.

    A rank takes a place with the stage and the tp rank that `strided` gives it, where its node has
    one left. There its training shard is needed. Others take what is left.
    """
    by_node: dict[Hashable, list[int]] = defaultdict(list)
    for rank, node in enumerate(nodes):
        by_node[node].append(rank)
    left, places = iter(vanilla), [*vanilla]
    for ranks in by_node.values():
        free: dict[tuple[int, int], list[Position]] = defaultdict(list)
        for _ in ranks:
            place = next(left)
            free[place[1:]].append(place)
        others = []
        for rank in ranks:
            if same := free[strided[rank][1:]]:
                places[rank] = same.pop(0)
            else:
                others.append(rank)
        rest = sorted(place for same in free.values() for place in same)
        for rank, place in zip(others, rest, strict=True):
            places[rank] = place
    return places


def _strided(train: TrainAxes, pp: int, tp: int) -> Iterator[Position]:
    """Training stage and fine index decide generation stage and tp as far as they divide.

    Along an axis of P training and G generation shards the first gcd(P, G) ones correspond. The
    remaining training digits form a free number; it gives the remaining generation digits, and
    then the instance.
    """
    fine = train.tp * train.fsdp
    common_pp, common_tp = gcd(train.pp, pp), gcd(fine, tp)
    left_pp, left_tp = pp // common_pp, tp // common_tp
    for p, replica, f, t in product(*map(range, (train.pp, train.replicas, train.fsdp, train.tp))):
        q = t * train.fsdp + f
        stage, more_p = divmod(p, train.pp // common_pp)
        shard, more_q = divmod(q, fine // common_tp)
        free = _number(
            (
                (more_p, train.pp // common_pp),
                (more_q, fine // common_tp),
                (replica, train.replicas),
            )
        )
        free, more_tp = divmod(free, left_tp)
        instance, more_pp = divmod(free, left_pp)
        yield instance, stage * left_pp + more_pp, shard * left_tp + more_tp


def _number(digits: Sequence[tuple[int, int]]) -> int:
    """The mixed-radix number of (digit, base) pairs, the first one slowest."""
    number = 0
    for digit, base in digits:
        number = number * base + digit
    return number
