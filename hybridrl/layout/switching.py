"""The switch of one actor between training and generation: both layouts and the plan."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hybridrl.config.errors import ConfigError
from hybridrl.config.layout import Grouping
from hybridrl.layout.box import Box
from hybridrl.layout.grouping import Position, TrainAxes, gen_positions
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
) -> Switch:
    """Plan the switch; `auto` tries every order and keeps the one that moves the fewest bytes.

    See `gen_layout` for `gen_ep` and `vocab_multiple`. With `ascending` the ranks of every pp and
    tp group must ascend, for engines whose groups follow global ranks. Raises ConfigError for
    another `grouping`.
    """
    num_layers = 1 + max(parameter.layer for parameter in parameters)
    stages = stage_of_layer or stages_of_layers(num_layers, axes.pp)
    src = train_layout(parameters, axes, stages, gen_tp, gen_ep)
    experts = tuple(parameter.name for parameter in parameters if parameter.experts)

    def planned(order: Grouping) -> Switch:
        positions = gen_positions(axes, gen_pp, gen_tp, order)
        mesh = gen_mesh(positions, gen_pp, gen_tp)
        dst = gen_layout(parameters, mesh, num_layers, vocab_multiple, gen_ep)
        return Switch(plan(src, dst), order, tuple(positions), experts)

    auto = grouping is Grouping.auto
    orders = [Grouping.strided, Grouping.vanilla] if auto else [grouping]
    if ascending:
        check_ascending(axes, gen_pp, gen_tp, grouping)
        orders = [order for order in orders if _ascends(axes, gen_pp, gen_tp, order)]
    logger.debug("planning the weight switch of %d ranks, %d orders", src.mesh.size, len(orders))
    best = min(map(planned, orders), key=lambda switch: int(switch.plan.traffic.received.sum()))
    logger.debug("the weight switch is planned, order of ranks %s", best.grouping.value)
    return best


def _overlap(held: Sequence[Box], wanted: Sequence[Box]) -> int:
    """Elements that two shards of a parameter share."""
    pairs = (a.intersect(b) for a in held for b in wanted)
    return sum(box.size for box in pairs if box is not None)


def check_ascending(axes: TrainAxes, pp: int, tp: int, grouping: Grouping) -> None:
    """Raise ConfigError for an order in which the ranks of a pp or tp group do not ascend."""
    if grouping is not Grouping.auto and not _ascends(axes, pp, tp, grouping):
        allowed = "auto or vanilla: the rollout engine needs groups of ascending ranks"
        raise ConfigError("rollout.layout.grouping", grouping.value, allowed)


def _ascends(axes: TrainAxes, pp: int, tp: int, order: Grouping) -> bool:
    """Whether the ranks of every pp and every tp group stand in ascending order."""
    grid = gen_mesh(gen_positions(axes, pp, tp, order), pp, tp).grid()
    return all((np.diff(grid, axis=axis) > 0).all() for axis in (1, 2))
