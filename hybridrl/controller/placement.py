"""The ranks that a stage runs on, and those that take part (HybridFlow, arXiv 2409.19256)."""

from hybridrl.config import VALUE_MODELS, Config, ConfigError, Placement
from hybridrl.flow.executor import Scope
from hybridrl.flow.graph import Graph, MapStage, Stage, StageMethod

HOME = "actor"
"""The pool where samples live; its ranks are the first."""


def pool_of(stage: Stage, config: Config) -> str:
    """The pool that a stage runs in, by its name in `cluster.pools`.

    Under placement=split value models and judges that are models have a separate pool. Everything
    else runs on the ranks that have the samples.
    """
    return "critic" if config.split and _is_critics(stage, config) else HOME


def _is_critics(stage: Stage, config: Config) -> bool:
    role = stage.role
    if role is None:
        return False
    if stage.method is StageMethod.SCORE:
        return config.is_neural(role)
    return role in VALUE_MODELS


def scope_of(stage: Stage, config: Config) -> Scope:
    """The ranks that take part in a per-sample stage.

    Old-policy log-probabilities use the rollout engine's weights, where it shares them in the
    format that training computes in; else they need the training shards.
    """
    if pool_of(stage, config) != HOME:
        return Scope.POOL
    if isinstance(stage, MapStage):
        return Scope.RANK
    if stage.method is StageMethod.SCORE:
        assert stage.role is not None
        if config.is_central(stage.role):
            return Scope.DRIVER
        return Scope.INSTANCE if config.is_neural(stage.role) else Scope.RANK
    rollout = config.rollout
    shared = rollout.features.shares_weights and rollout.dtype is config.model.compute_dtype
    passes = (StageMethod.LOG_PROBS, StageMethod.TOP_LOG_PROBS)
    if stage.method in passes and (stage.role != "actor" or shared):
        return Scope.INSTANCE
    return Scope.WORLD


def graphs_of(graph: Graph, config: Config) -> dict[str, Graph]:
    """The part of `graph` that the ranks of a pool need, by the pool's name; none is left out."""
    on_ranks = graph.on_ranks()
    return {
        pool: Graph(
            {name: s for name, s in on_ranks.stages.items() if pool_of(s, config) == pool},
            on_ranks.copies if pool == HOME else {},
        )
        for pool in config.cluster.pool_ranks
    }


def check_placement(config: Config, graph: Graph) -> None:
    """Raise `ConfigError` for a pool without work, or one whose ranks do not fit its models."""
    if not config.split:
        return
    graphs = graphs_of(graph, config)
    for pool, role, has_work in (
        ("actor", "an actor", "actor" in graphs["actor"].roles),
        ("critic", "a critic, reward.kind=model, ...", bool(graphs["critic"].stages)),
    ):
        if not has_work:
            allowed = f"colocate: the recipe has nothing for cluster.pools.{pool} ({role})"
            raise ConfigError("cluster.placement", Placement.split.value, allowed)
    for role in graphs["critic"].learned:
        config.check_value_model(role)
    layout, ranks = config.rollout.layout, len(config.cluster.pool_ranks["critic"])
    for role in {*graphs["critic"].judges, *config.eval_judges}:
        if config.is_neural(role) and ranks % (layout.pp * layout.tp):
            allowed = (
                f"a multiple of rollout.layout's {layout.pp} x {layout.tp}, the layout of {role}"
            )
            raise ConfigError(config.cluster.pool_key("critic"), ranks, allowed)
