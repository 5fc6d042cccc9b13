"""The switch of one actor between training and generation: both layouts and the plan."""

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.config.errors import ConfigError
from hybridrl.config.layout import Grouping
from hybridrl.layout.box import Box
from hybridrl.layout.grouping import Position, TrainAxes, gen_positions, nodes_spanned
from hybridrl.layout.layout import stages_of_layers
from hybridrl.layout.mesh import gen_mesh
from hybridrl.layout.parameters import Parameter, gen_layout, train_layout
from hybridrl.layout.plan import Plan, plan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Switch:
    """The plan from the training to the generation layout, and the order of ranks in it."""

    plan: Plan
    grouping: Grouping
    positions: tuple[Position, ...]
    experts: tuple[str, ...] = ()
    """The parameters whose dimension 0 counts experts."""

    @property
    def theory(self) -> int:
        """Elements received by all ranks if shards nest: M/(p_g t_g) - M/(p f t) by each.

        HybridFlow's formula (section 5.4) with FSDP's split f among those of training. Exact for
        parameters that all axes split evenly; a norm, replicated over tp, differs a little. Shards
        of experts cannot nest in experts that tp cuts: for them see `_theory_of_experts`.
        """
        mesh, dst = self.plan.src.mesh, self.plan.dst.mesh
        shards = mesh.extent("pp") * mesh.extent("fsdp") * mesh.extent("tp")
        names = self.plan.dst.shapes.keys() - set(self.experts)
        size = sum(math.prod(self.plan.dst.shapes[name]) for name in names)
        each = size / (dst.extent("pp") * dst.extent("tp")) - size / shards
        return round(max(0.0, each) * mesh.size + self._theory_of_experts())

    def _theory_of_experts(self) -> float:
        """Elements of experts that all ranks receive if each keeps as much as any shard overlaps.

        A training shard is compared with every generation shard; the largest overlap counts, on as
        many ranks as both layouts can have of a layer.
        """
        src, dst = self.plan.src, self.plan.dst
        pp, gen_pp = src.mesh.extent("pp"), dst.mesh.extent("pp")
        total = 0.0
        for cls in self.plan.classes:
            name = cls.names[0]
            if name not in self.experts:
                continue
            after = [boxes for boxes in dst.cells(name).values() if boxes]
            before = src.cells(name).values()
            wanted = sum(box.size for boxes in after for box in boxes) / dst.mesh.extent("tp")
            kept = sum(max(_overlap(held, boxes) for boxes in after) for held in before)
            each = wanted / gen_pp - kept / len(before) / max(pp, gen_pp)
            total += max(0.0, each) * src.mesh.size * len(cls.names)
        return total


def plan_switch(
    parameters: Sequence[Parameter],
    axes: TrainAxes,
    gen_pp: int,
    gen_tp: int,
    grouping: Grouping = Grouping.auto,
    stage_of_layer: Sequence[int] | None = None,
    *,
    gen_ep: int = 1,
    vocab_multiple: int = 1,
    ascending: bool = False,
    nodes: Sequence[Hashable] = (),
) -> Switch:
    """Plan the switch; `auto` keeps generation's groups within nodes, then moves the fewest bytes.

    `nodes` has the node of each rank; without it all are on one. A group that spans nodes uses slow
    links at each layer of each decode step, the switch once a step. So `auto` takes orders whose tp
    groups span the fewest nodes, and then their instances. Of these it takes the one that moves the
    fewest bytes between nodes, and then in all. See `gen_layout` for `gen_ep` and `vocab_multiple`.
    With `ascending` the ranks of every pp and tp group must ascend, for engines whose groups follow
    global ranks. Raises ConfigError for another `grouping`.
    """
    num_layers = 1 + max(parameter.layer for parameter in parameters)
    stages = stage_of_layer or stages_of_layers(num_layers, axes.pp)
    src = train_layout(parameters, axes, stages, gen_tp, gen_ep)
    experts = tuple(parameter.name for parameter in parameters if parameter.experts)
    if ascending:
        check_ascending(axes, gen_pp, gen_tp, grouping)

    def planned(order: Grouping, positions: tuple[Position, ...]) -> Switch:
        mesh = gen_mesh(positions, gen_pp, gen_tp)
        dst = gen_layout(parameters, mesh, num_layers, vocab_multiple, gen_ep)
        return Switch(plan(src, dst), order, positions, experts)

    def moved(switch: Switch) -> tuple[int, int]:
        links = switch.plan.traffic.links
        between = [size for (a, b), size in links.items() if nodes and nodes[a] != nodes[b]]
        return sum(between), sum(links.values())

    orders = candidate_orders(axes, gen_pp, gen_tp, grouping, ascending=ascending, nodes=nodes)
    logger.debug("planning the weight switch of %d ranks, %d orders", src.mesh.size, len(orders))
    best = min((planned(order, places) for places, order in orders.items()), key=moved)
    logger.debug("the weight switch is planned, order of ranks %s", best.grouping.value)
    return best


def candidate_orders(
    axes: TrainAxes,
    pp: int,
    tp: int,
    grouping: Grouping = Grouping.auto,
    *,
    ascending: bool = False,
    nodes: Sequence[Hashable] = (),
) -> dict[tuple[Position, ...], Grouping]:
    """The orders to choose from, by their positions: of `auto` those that span the fewest nodes."""
    if grouping is not Grouping.auto:
        return {tuple(gen_positions(axes, pp, tp, grouping, nodes)): grouping}
    wanted = [Grouping.strided, Grouping.vanilla]
    if any(nodes_spanned(gen_positions(axes, pp, tp, Grouping.strided), nodes)):
        wanted.append(Grouping.node_strided)  # elsewhere it gives ranks the same shards
    orders: dict[tuple[Position, ...], Grouping] = {}
    for order in wanted:
        positions = tuple(gen_positions(axes, pp, tp, order, nodes))
        if not ascending or _ascends(positions, pp, tp):
            orders.setdefault(positions, order)
    spanned = {positions: nodes_spanned(positions, nodes) for positions in orders}
    fewest = min(spanned.values())
    return {places: order for places, order in orders.items() if spanned[places] == fewest}


def _overlap(held: Sequence[Box], wanted: Sequence[Box]) -> int:
    """Elements that two shards of a parameter share."""
    pairs = (a.intersect(b) for a in held for b in wanted)
    return sum(box.size for box in pairs if box is not None)


def check_ascending(axes: TrainAxes, pp: int, tp: int, grouping: Grouping) -> None:
    """Raise ConfigError for an order in which the ranks of a pp or tp group may not ascend.

    Those of `node_strided` depend on the nodes of the ranks.
    """
    if grouping is Grouping.auto:
        return
    positions = gen_positions(axes, pp, tp, grouping)
    if grouping is Grouping.node_strided or not _ascends(positions, pp, tp):
        allowed = "auto or vanilla: the rollout engine needs groups of ascending ranks"
        raise ConfigError("rollout.layout.grouping", grouping.value, allowed)


def _ascends(positions: Sequence[Position], pp: int, tp: int) -> bool:
    """Whether the ranks of every pp and every tp group stand in ascending order."""
    grid = gen_mesh(positions, pp, tp).grid()
    return all((np.diff(grid, axis=axis) > 0).all() for axis in (1, 2))
