"""The costs and lengths of an emulated device, by the texts of `hybridrl plan schedule`."""

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from hybridrl.config import (
    Config,
    ConfigError,
    PackedScheduleConfig,
    RolloutLayoutConfig,
    TrainLayoutConfig,
)
from hybridrl.costs.devices import Roofline, read_roofline
from hybridrl.costs.instance import Costs, Drafting
from hybridrl.costs.mapping import ACTOR, TrainLayout
from hybridrl.flow.graph import (
    ComputeStage,
    GenerateStage,
    Graph,
    MapStage,
    Stage,
    StageMethod,
    UpdateStage,
)
from hybridrl.planner.conversations import ConversationModel, read_conversations
from hybridrl.planner.mapped_work import step_samples
from hybridrl.planner.roofline_updates import roles_of, with_pipelines
from hybridrl.planner.schedule import read_costs
from hybridrl.planner.workload import Shape, Workload, known_guesses, read_workload

Read = TypeVar("Read")


def emulated_costs(config: Config, graph: Graph | None = None) -> Costs:
    """`cluster.costs` in real seconds, with `rollout.speculate`; raises `ConfigError`.

    A roofline is of an instance's ranks, and of all of them, unless its text says otherwise. With
    the recipe's graph its updates are those of pipelines, where the run has them.
    """
    costs = _costs(config)
    if graph is not None:
        costs = _with_pipelines(config, graph, costs)
    return replace(costs, drafting=_drafting(config, costs))


def _with_pipelines(config: Config, graph: Graph, costs: Costs) -> Costs:
    """Where a roofline has a model for each trained role, and these share the actor's ranks."""
    text, trainer = config.cluster.costs or "", config.trainer
    if not text.startswith("gpu:"):
        return costs
    named = Roofline.of(text, config.rollout.layout.ranks, config.ranks_of(ACTOR))
    if named.pp:
        allowed = "no pp: trainer.layout and roles.critic.layout have the run's pipelines"
        raise ConfigError("cluster.costs", text, allowed)
    stages = {
        stage.role: stage for stage in graph.stages.values() if isinstance(stage, UpdateStage)
    }
    together = all(config.pool_of(role) == ACTOR for role in named.trained)
    if {*stages} != {*named.trained} or len(stages) < 2 or not together:
        return costs
    roles = [
        replace(role, epochs=stages[role.name].epochs, mini_batches=stages[role.name].mini_batches)
        for role in roles_of(named)
    ]
    layouts = {
        role: TrainLayout.of(
            trainer.layout if role == ACTOR else config.value_model_of(role).layout, trainer
        )
        for role in named.trained
    }
    if all(layout.pp == 1 for layout in layouts.values()):
        return costs
    group_size = group_size_of(graph)
    workload = emulated_workload(config, group_size).cut_at(config.rollout.max_new_tokens)
    try:
        return with_pipelines(
            costs,
            named.accelerator,
            roles,
            layouts,
            step_samples(workload, group_size),
            mini_batches=trainer.mini_batches,
            epochs=trainer.epochs,
        )
    except ValueError as error:
        allowed = f"models that the layouts of actor and critic split ({error})"
        raise ConfigError("cluster.costs", text, allowed) from None


def _drafting(config: Config, costs: Costs) -> Drafting | None:
    """How rows guess ahead: the share of right guesses is that of the lengths, else of the costs.

    Raises `ConfigError` where neither says it.
    """
    rollout = config.rollout
    if rollout.draft_length == 0:
        return None
    accept = emulated_workload(config, 1).accept
    if accept is None and costs.drafting is not None:
        accept = costs.drafting.accept
    if accept is None:
        allowed = f"off, or {known_guesses('cluster.lengths', 'cluster.costs')}"
        raise ConfigError("rollout.speculate", rollout.speculate, allowed)
    return Drafting(tokens=rollout.draft_length, accept=accept, pass_tokens=rollout.pass_tokens)


def _costs(config: Config) -> Costs:
    text = config.cluster.costs or ""
    if not text.startswith("gpu:"):
        facts: dict[str, Any] = _of_key("cluster.costs", lambda: read_costs(Path(text)))
        costs: Costs = facts["costs"]
        return costs
    ranks = config.ranks_of("actor")
    gpus = config.rollout.layout.ranks
    widths = emulated_widths(config)
    costs, instances, *_ = _of_key(
        "cluster.costs", lambda: read_roofline(text, gpus, ranks, widths)
    )
    if instances != ranks // gpus:
        allowed = f"a roofline of {ranks // gpus} instances of {gpus}, as the run's ranks are"
        raise ConfigError("cluster.costs", text, allowed)
    return costs


def _check_axes(config: Config) -> None:
    """Raise `ConfigError` for axes that the models of a roofline cannot be split by."""
    text, rollout = config.cluster.costs or "", config.rollout
    if not text.startswith("gpu:"):
        return
    ranks = rollout.layout.ranks, config.ranks_of(ACTOR)
    models = _of_key("cluster.costs", lambda: Roofline.of(text, *ranks)).trained
    layouts: list[tuple[str, str, RolloutLayoutConfig | TrainLayoutConfig]] = [
        (ACTOR, "rollout", rollout.layout),
        (ACTOR, "trainer", config.trainer.layout),
    ]
    layouts += [(role, role, config.value_model_of(role).layout) for role in {*models} - {ACTOR}]
    for role, name, layout in layouts:
        model = models[role]
        heads = f"a divisor of the {model.heads} attention heads of cluster.costs={text}"
        if model.heads % layout.tp:
            raise ConfigError(f"{name}.layout.tp", layout.tp, heads)
        if layout.pp > model.layers:
            allowed = f"at most the {model.layers} layers of cluster.costs={text}"
            raise ConfigError(f"{name}.layout.pp", layout.pp, allowed)
        if name == "rollout" and model.heads % (rollout.wide_tp or 1):
            raise ConfigError("rollout.tail_tp", rollout.wide_tp, f"off, auto, or {heads}")


def emulated_widths(config: Config) -> tuple[int, ...]:
    """Numbers of instances that may decode the tail as one.

    No model bounds them, but a wide instance is in one process.
    """
    rollout, per_process = config.rollout, config.cluster.ranks_per_process or 0
    widths = rollout.widths(config.ranks_of("actor") // rollout.layout.ranks)
    return tuple(width for width in widths if per_process % (width * rollout.layout.ranks) == 0)


def emulated_workload(config: Config, group_size: int) -> Workload:
    """`cluster.lengths` in the run's shape; raises `ConfigError`."""
    cluster, trainer = config.cluster, config.trainer
    return _workload(
        cluster.lengths or "",
        trainer.prompts_per_step,
        group_size,
        trainer.steps,
        cluster.prompt_tokens,
        config.run.seed,
    )


@lru_cache(maxsize=4)  # one for all ranks of a process
def _workload(
    text: str, prompts: int, group_size: int, steps: int, prompt_tokens: int | None, seed: int
) -> Workload:
    shape = Shape(
        prompts_per_step=prompts,
        group_size=group_size,
        num_steps=steps,
        prompt_tokens=prompt_tokens,
        seed=seed,
    )
    return _of_key("cluster.lengths", lambda: read_workload(text, shape))


def emulated_conversations(config: Config) -> ConversationModel | None:
    """`cluster.turns`, with waits in real seconds; None without turns. Raises `ConfigError`."""
    text, scale = config.cluster.turns, config.cluster.time_scale
    if text is None:
        return None
    model = _of_key("cluster.turns", lambda: read_conversations(text))
    return replace(model, wait_s=model.wait_s * scale)


def check_emulation(config: Config, graph: Graph) -> None:
    """Raise `ConfigError` for costs, lengths or turns that cannot be read, or a stage without cost.

    Paths become absolute, since ranks read them too.
    """
    cluster = config.cluster
    if cluster.costs and Path(cluster.costs).exists():
        cluster.costs = str(Path(cluster.costs).resolve())
    if cluster.lengths and Path(cluster.lengths).exists():
        cluster.lengths = str(Path(cluster.lengths).resolve())
    _check_axes(config)
    costs = emulated_costs(config, graph)
    _check_limit(config, emulated_workload(config, group_size_of(graph)))
    emulated_conversations(config)
    for stage in graph.stages.values():
        if is_pass(stage, config) and cost_name(costs, stage) is None:
            known = ", ".join(costs.token_s) or "none"
            allowed = f"costs of stage {stage.name}, or of its role {stage.role} (there: {known})"
            raise ConfigError("cluster.costs", cluster.costs, allowed)


def _check_limit(config: Config, workload: Workload) -> None:
    """Raise `ConfigError` for a limit of packed that no prompt keeps to, or every one."""
    schedule = config.schedule
    if not isinstance(schedule, PackedScheduleConfig) or schedule.limit_tokens is None:
        return
    whole = workload.cut_at(config.rollout.max_new_tokens)
    longest = [max(group.lengths) for group in whole.groups]  # of each prompt
    least, most = min(longest), max(longest)
    if not least <= schedule.limit_tokens < most:
        of = "the longest responses of prompts of cluster.lengths"
        allowed = f"null, or {least} or more and below {most}, {of}"
        if least == most:
            allowed = f"null: the longest response of every prompt of cluster.lengths has {most}"
        raise ConfigError("schedule.limit_tokens", schedule.limit_tokens, allowed)


def is_pass(stage: Stage, config: Config) -> bool:
    """Whether a stage is a forward pass of a model; verifiers and `map` are none."""
    if not isinstance(stage, ComputeStage) or isinstance(stage, MapStage):
        return False
    return stage.method is not StageMethod.SCORE or config.is_neural(stage.role or "")


def cost_name(costs: Costs, stage: Stage) -> str | None:
    """The name under which a forward-only stage has costs: its own or its role's.

    None where neither has, but for the actor: its own pass costs as prefill does.
    """
    names = (stage.name, stage.role or "")
    known = next((name for name in names if name in costs.token_s), None)
    return known or ("actor" if stage.role == "actor" else None)


def group_size_of(graph: Graph) -> int:
    """Samples of a prompt; the most of any stage that generates."""
    makers = [s.num_samples or 1 for s in graph.stages.values() if isinstance(s, GenerateStage)]
    return max(makers, default=1)


def pass_seconds(costs: Costs, stage: Stage, tokens: float) -> float:
    """Seconds of one call of a forward-only stage on an instance."""
    name = cost_name(costs, stage)
    if name is None:
        return 0.0
    if name not in costs.token_s:
        return costs.prefill_token_s * tokens
    return costs.compute(name, tokens)


def scaled(costs: Costs, factor: float) -> Costs:
    """All seconds times `factor`."""
    values: dict[str, Any] = {
        name: {x: seconds * factor for x, seconds in value.items()}
        if isinstance(value, dict)
        else value * factor
        for name, value in asdict(replace(costs, drafting=None)).items()
        if name != "drafting"
    }
    return Costs(**values, drafting=costs.drafting)


def _of_key(key: str, read: Callable[[], Read]) -> Read:
    """What `read` gives; its errors name `key` in place of an option."""
    try:
        return read()
    except ConfigError as error:
        raise ConfigError(key, error.value, error.allowed) from None
