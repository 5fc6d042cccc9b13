"""The ranks that a stage runs on, and those that take part (HybridFlow, arXiv 2409.19256)."""

from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.config import Config, ConfigError, PoolOfConfig, on_policy_names
from hybridrl.flow.executor import Scope
from hybridrl.flow.graph import (
    GenerateStage,
    Graph,
    MapStage,
    SourceStage,
    Stage,
    StageMethod,
)


def pool_of(stage: Stage, config: Config) -> str:
    """The pool that a stage runs in, by its name in `cluster.pools`.

    Roles that are models are where `cluster.placement` and `cluster.pool_of` say. Everything else
    runs on the ranks that generate, where samples are.
    """
    role = stage.role
    judged_here = stage.method is StageMethod.SCORE and role and not config.is_neural(role)
    if role is None or isinstance(stage, SourceStage) or judged_here:
        return config.cluster.home
    return config.pool_of(role)


def scope_of(stage: Stage, config: Config) -> Scope:
    """The ranks that take part in a per-sample stage.

    Old-policy log-probabilities use the rollout engine's weights, where it shares them in the
    format that training computes in; else they need the training shards.
    """
    if pool_of(stage, config) != config.cluster.home:
        return Scope.POOL
    if isinstance(stage, MapStage):
        return Scope.RANK
    if stage.method is StageMethod.SCORE:
        assert stage.role is not None
        return Scope(config.home_of(stage.role).value)
    rollout = config.rollout
    shared = rollout.features.shares_weights and rollout.dtype is config.model.compute_dtype
    passes = (StageMethod.LOG_PROBS, StageMethod.TOP_LOG_PROBS)
    if stage.method in passes and (stage.role != "actor" or shared):
        return Scope.INSTANCE
    return Scope.WORLD


@dataclass(frozen=True, slots=True)
class ConfiguredPlaces:
    """`StagePlaces` before a process starts."""

    config: Config

    def scope(self, stage: Stage) -> Scope:
        """See `scope_of`."""
        return scope_of(stage, self.config)

    def pool(self, stage: Stage) -> str:
        """See `pool_of`."""
        return pool_of(stage, self.config)


def graphs_of(graph: Graph, config: Config) -> dict[str, Graph]:
    """The part of `graph` that the ranks of a pool need, by the pool's name; none is left out."""
    on_ranks = graph.on_ranks()
    return {
        pool: Graph(
            {name: s for name, s in on_ranks.stages.items() if pool_of(s, config) == pool},
            {name: copy for name, copy in on_ranks.copies.items() if config.pool_of(name) == pool},
        )
        for pool in config.cluster.pool_ranks
    }


def check_placement(config: Config, graph: Graph) -> None:
    """Raise `ConfigError` for a role without ranks, a pool without work, or one that does not fit.

    Also for a role that cannot be apart from the actor, and for a schedule that some roles need.
    """
    for stage in graph.on_ranks().stages.values():
        pool = pool_of(stage, config)
        if pool not in config.cluster.pool_ranks:
            allowed = f"1 or more ranks for {stage.role}, or cluster.pool_of.{pool}=POOL with it"
            raise ConfigError(f"cluster.pools.{pool}", 0, allowed)
    graphs = graphs_of(graph, config)
    if len(graphs) == 1:
        return
    _check_has_work(config, graphs)
    for pool, of_pool in graphs.items():
        if pool != config.cluster.home:
            check_apart(config, pool, of_pool)
            _check_sizes(config, pool, of_pool)


def _check_has_work(config: Config, graphs: Mapping[str, Graph]) -> None:
    generates = any(
        isinstance(s, GenerateStage) for g in graphs.values() for s in g.stages.values()
    )
    if "rollout" in graphs and not generates:
        size = len(config.cluster.pool_ranks["rollout"])
        raise ConfigError("cluster.pools.rollout", size, "0: the recipe generates nothing")
    for pool, of_pool in graphs.items():
        has_work = "actor" in of_pool.roles if pool == "actor" else bool(of_pool.stages)
        if not has_work:
            fields = PoolOfConfig.__dataclass_fields__
            roles = [role for role in fields if config.cluster.pool_of_role(role) == pool]
            held = "an actor" if pool == "actor" else " or ".join(f"a {role}" for role in roles)
            allowed = (
                f"another: the recipe has nothing for cluster.pools.{pool} ({held} as a model)"
            )
            raise ConfigError("cluster.placement", config.cluster.placement.value, allowed)


def check_apart(config: Config, pool: str, graph: Graph) -> None:
    """Raise where a stage of another pool than the samples' needs what only that one has."""
    schedule = config.schedule
    for stage in graph.stages.values():
        role = str(stage.role)
        copy = graph.copies.get(role)
        if copy is not None and copy.update != "frozen" and pool != "actor":
            field = f"cluster.pool_of.{config.pool_field(role)}"
            allowed = f"actor: {role} averages the actor's weights after every update"
            raise ConfigError(field, pool, allowed)
        reads_learned = stage.method in (StageMethod.VALUES, StageMethod.LEARNED_SCORE)
        if reads_learned and schedule.may_be_stale and not schedule.entry.separate:
            # A group that is complete waits for its step with values of an older critic.
            allowed = f"{on_policy_names()} with {role} in pool {pool}"
            raise ConfigError("schedule", schedule.kind.value, allowed)


def _check_sizes(config: Config, pool: str, graph: Graph) -> None:
    """Raise where the ranks of a pool do not fit the layouts of its roles."""
    for role in graph.learned:
        if role != "actor":
            config.check_value_model(role)
    layout, ranks = config.rollout.layout, len(config.cluster.pool_ranks[pool])
    judges = {*graph.judges, *config.eval_judges}
    scorers = {role for role in judges if config.is_neural(role) and config.pool_of(role) == pool}
    scorers |= {*graph.roles} - {*graph.learned, *graph.judges}
    for role in sorted(scorers):
        if ranks % layout.ranks:
            allowed = (
                f"a multiple of rollout.layout's {layout.pp} x {layout.tp}, the layout of {role}"
            )
            raise ConfigError(config.cluster.pool_key(pool), ranks, allowed)
