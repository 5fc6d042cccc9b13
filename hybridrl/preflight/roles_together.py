"""Roles whose updates follow each other on the same ranks."""

from collections.abc import Sequence

from hybridrl.config import Config
from hybridrl.flow import Graph
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.ledger import generation_first, with_updates_together
from hybridrl.preflight.placement import pool_of


def fuses(config: Config, stages: Sequence[UpdateStage], stage: UpdateStage) -> bool:
    """Whether `stage` is trained together with `stages`, updates of its pool before it.

    A role's second update waits for its first one. Pairs stay with the ranks that they are on.
    """
    roles = {other.role for other in stages}
    rows_of_one = all(other.samples_per_row == 1 for other in (*stages, stage))
    return config.trainer.fuses and rows_of_one and stage.role not in roles


def roles_together(config: Config, graph: Graph, pool: str) -> list[tuple[str, ...]]:
    """The roles of each run of adjacent updates on a pool, of two and more."""
    together: list[tuple[str, ...]] = []
    for stages in with_updates_together(generation_first(list(graph.stages.values()))):
        if not isinstance(stages, list):
            continue
        roles: dict[str, None] = {}
        for stage in stages:
            if pool_of(stage, config) == pool and stage.samples_per_row == 1 and stage.role:
                roles[stage.role] = None
        if len(roles) > 1:
            together.append(tuple(roles))
    return together
