"""Updates of a roofline's actor and critic in pipelines: one after the other, and in one plan.

Their seconds are those of `plan auto` (`fused_plans.updates_s`), on the samples of one step.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd

from hybridrl.costs.devices import Accelerator, Roofline, layer_roofline
from hybridrl.costs.instance import Costs
from hybridrl.costs.mapping import ACTOR, PlannedRole, SampleLength, TrainLayout, cluster_of
from hybridrl.costs.model import CostModel, SampleLengths
from hybridrl.planner.fused_plans import Layouts, can_share_a_plan, updates_s

_PER_NODE = 8


def layouts_of(named: Roofline, micro_batch_tokens: int) -> dict[str, TrainLayout]:
    """The layouts of a text with `pp`, on all of its ranks; by role.

    Raises ValueError where they do not divide the ranks.
    """
    layouts = {}
    for role, pp in named.pp.items():
        shards, rest = divmod(named.total, pp * named.tp)
        if rest:
            raise ValueError(f"pp x tp = {pp} x {named.tp} of {named.total} ranks")
        layouts[role] = TrainLayout(
            pp=pp, fsdp=shards, tp=named.tp, micro_batch_tokens=micro_batch_tokens
        )
    return layouts


def roles_of(named: Roofline) -> list[PlannedRole]:
    """The trained roles of a text, the actor first."""
    return [
        PlannedRole(name=name, shape=shape, trained=True, value_head=name != ACTOR)
        for name, shape in named.trained.items()
    ]


def with_pipelines(
    costs: Costs,
    accelerator: Accelerator,
    roles: Sequence[PlannedRole],
    layouts: Layouts,
    samples: SampleLengths,
    *,
    mini_batches: int = 1,
    epochs: int = 1,
) -> Costs:
    """`costs` with `train_token_s` and `fused_train_token_s` of these layouts, one or more with pp.

    All layouts are of the same ranks. The latter are 0 where the roles cannot share a plan. Raises
    ValueError for layouts that split neither layers nor heads evenly.
    """
    for role in roles:
        shape, layout = role.shape, layouts[role.name]
        if shape.heads % layout.tp or layout.chunks > shape.layers:
            sizes = f"{shape.heads} heads and {shape.layers} layers"
            raise ValueError(f"{sizes} of {role.name} on tp {layout.tp} and {layout.chunks} chunks")
    own = tuple(layouts[role.name] for role in roles)
    apart, fused = _updates_s(accelerator, tuple(roles), own, tuple(samples), mini_batches, epochs)
    tokens = sum(sample.tokens for sample in samples)
    return replace(costs, train_token_s=apart / tokens, fused_train_token_s=fused / tokens)


@lru_cache(4)  # one for all emulated ranks of a process
def _updates_s(
    accelerator: Accelerator,
    roles: tuple[PlannedRole, ...],
    layouts: tuple[TrainLayout, ...],
    samples: tuple[SampleLength, ...],
    mini_batches: int,
    epochs: int,
) -> tuple[float, float]:
    """Seconds of all updates of a step one after the other, and in one plan (0: they cannot)."""
    ranks = range(layouts[0].ranks)
    per_node = gcd(len(ranks), _PER_NODE)
    cluster = cluster_of(accelerator, len(ranks) // per_node, per_node)
    costs = CostModel(layer_roofline(accelerator), cluster)
    train = {role.name: layout for role, layout in zip(roles, layouts, strict=True)}

    def seconds(*together: PlannedRole) -> float:
        return updates_s(
            costs, together, train, ranks, samples, mini_batches=mini_batches, epochs=epochs
        )

    apart = sum(seconds(role) for role in roles)
    return apart, seconds(*roles) if can_share_a_plan(roles, train) else 0.0
