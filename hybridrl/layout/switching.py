"""The switch of one actor between training and generation: both layouts and the plan."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.config.layout import Grouping
from hybridrl.layout.grouping import Position, TrainAxes, gen_positions
from hybridrl.layout.layout import stages_of_layers
from hybridrl.layout.mesh import gen_mesh
from hybridrl.layout.parameters import Parameter, gen_layout, train_layout
from hybridrl.layout.plan import Plan, plan


@dataclass(frozen=True, slots=True)
class Switch:
    """How weights get from training to generation, and by which order of ranks."""

    plan: Plan
    grouping: Grouping
    positions: tuple[Position, ...]

    @property
    def theory(self) -> int:
        """Elements received by all ranks where shards nest: M/(p_g t_g) - M/(p f t) by each.

        HybridFlow's formula (section 5.4) with FSDP's split f among those of training. Exact for
        parameters that all axes split evenly; a norm, which tp ranks have whole, differs a little.
        """
        mesh, dst = self.plan.src.mesh, self.plan.dst.mesh
        shards = mesh.extent("pp") * mesh.extent("fsdp") * mesh.extent("tp")
        size = sum(math.prod(shape) for shape in self.plan.dst.shapes.values())
        each = size / (dst.extent("pp") * dst.extent("tp")) - size / shards
        return round(max(0.0, each) * mesh.size)


def plan_switch(
    parameters: Sequence[Parameter],
    axes: TrainAxes,
    gen_pp: int,
    gen_tp: int,
    grouping: Grouping = Grouping.auto,
    stage_of_layer: Sequence[int] | None = None,
) -> Switch:
    """Plan the switch; `auto` tries every order and keeps the one that moves the fewest bytes."""
    num_layers = 1 + max(parameter.layer for parameter in parameters)
    stages = stage_of_layer or stages_of_layers(num_layers, axes.pp)
    src = train_layout(parameters, axes, stages, gen_tp)

    def planned(order: Grouping) -> Switch:
        positions = gen_positions(axes, gen_pp, gen_tp, order)
        dst = gen_layout(parameters, gen_mesh(positions, gen_pp, gen_tp), num_layers)
        return Switch(plan(src, dst), order, tuple(positions))

    orders = (Grouping.strided, Grouping.vanilla) if grouping is Grouping.auto else (grouping,)
    return min(map(planned, orders), key=lambda switch: int(switch.plan.traffic.received.sum()))
