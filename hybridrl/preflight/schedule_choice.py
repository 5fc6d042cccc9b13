"""What `schedule=auto` is in a run, and whether its instances can train alone."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from math import gcd
from typing import TYPE_CHECKING

from hybridrl.config import Config
from hybridrl.config.reward import JudgeHome, RewardKind
from hybridrl.config.schedule import (
    AsyncScheduleConfig,
    AutoScheduleConfig,
    EarlyBackward,
    FusedScheduleConfig,
    SerialScheduleConfig,
)
from hybridrl.flow import Graph
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Scope
from hybridrl.flow.graph import ComputeStage
from hybridrl.flow.ledger import generation_first, sections
from hybridrl.layout.grouping import TrainAxes
from hybridrl.preflight.placement import ConfiguredPlaces
from hybridrl.schedule.build import check_graph
from hybridrl.schedule.readiness import early_stages, early_updates

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RUN_PROGRAMS = (RewardKind.code, RewardKind.function)
"""Judges on a sample's rank that may take long enough to be worth an earlier start."""


class TailMechanism(Enum):
    """What `fused` can do against the tail of a step."""

    dispatch = "dispatch by length"
    passes = "forward passes"
    migration = "migration"
    early = "early backward"
    wide = "wide tail"
    guesses = "guesses"


def decide_schedule(config: Config, graph: Graph, shape: "PretrainedConfig") -> str:
    """Put the schedule whose mechanisms act in this run in the place of `schedule=auto`.

    The batch is that of `serial` in every case. Returns a line that says what acts, and why; it is
    empty where the config names a schedule.
    """
    if not isinstance(config.schedule, AutoScheduleConfig):
        return ""
    if config.cluster.home != "actor":
        return _with_ranks_apart(config, graph)
    obstacles = obstacles_of_tail(config, graph, shape)
    acting = _acting(config, graph, obstacles)
    if not acting:
        config.schedule = SerialScheduleConfig()
        config.check_schedule()  # what is only refused without a tail
        return "schedule=auto is serial: nothing can begin before the batch is complete"
    obstacle = obstacles[TailMechanism.early]
    early = EarlyBackward.never if obstacle else EarlyBackward.auto
    config.schedule = FusedScheduleConfig(early_backward=early)
    trains = f"no early backward: {obstacle}" if obstacle else "early backward where it is sooner"
    return f"schedule=auto is fused: {'; '.join(acting)}; {trains}"


def _with_ranks_apart(config: Config, graph: Graph) -> str:
    """The schedule where other ranks generate than train, with the batch of `serial`."""
    periodic = AsyncScheduleConfig(max_staleness=0)
    try:
        check_graph(periodic, graph)
    except ValueError as error:
        config.schedule = SerialScheduleConfig()
        return f"schedule=auto is serial: periodic is for other recipes, wanted {error}"
    config.schedule = periodic
    return "schedule=auto is periodic: ranks that generate do not train"


def obstacles_of_tail(
    config: Config, graph: Graph, shape: "PretrainedConfig"
) -> dict[TailMechanism, str | None]:
    """Why each mechanism would not act in a run that is accepted, were it on; None: it acts.

    docs/schedules.md has them as a table, and what is refused before.
    """
    num, rollout = _num_instances(config), config.rollout
    if not graph.generates:
        return dict.fromkeys(TailMechanism, "the recipe generates nothing")
    obstacles: dict[TailMechanism, str | None] = dict.fromkeys(TailMechanism)
    # guesses need no second instance, and no sample that is longer than others
    obstacle = None
    if num < 2:
        obstacle = "there is one generation instance"
    elif rollout.ignore_eos or rollout.min_new_tokens == rollout.max_new_tokens:
        obstacle = "all responses are equally long"
    if obstacle is not None:
        return obstacles | dict.fromkeys(set(TailMechanism) - {TailMechanism.guesses}, obstacle)
    if not _passes(config, graph):
        obstacles[TailMechanism.passes] = "no stage runs on an instance while others decode"
    obstacles[TailMechanism.early] = _early_obstacle(config, graph, shape)
    if not _widths(config, shape, num):
        obstacles[TailMechanism.wide] = "the model lets no instances decode as one"
    has_work = None in (obstacles[TailMechanism.passes], obstacles[TailMechanism.early])
    if not has_work:
        obstacles[TailMechanism.migration] = "freed instances would have nothing to do"
    return obstacles


def _acting(
    config: Config, graph: Graph, obstacles: Mapping[TailMechanism, str | None]
) -> list[str]:
    """What of `fused` acts in a run, in words."""
    if not graph.generates:
        return []
    acting, num = [], _num_instances(config)
    if obstacles[TailMechanism.migration] is None:
        acting.append(f"the last samples move between {num} instances")
    elif obstacles[TailMechanism.dispatch] is None:
        acting.append(f"prompts are dealt to {num} instances by their expected lengths")
    if config.rollout.wide_tp != 0 and obstacles[TailMechanism.wide] is None:
        acting.append("instances decode the last samples as one")
    computes = [stage for stage in graph.stages.values() if isinstance(stage, ComputeStage)]
    roles = dict.fromkeys(str(stage.role) for stage in computes if stage.role)
    if apart := [role for role in roles if _works_apart(config, graph, role)]:
        acting.append(f"{' and '.join(apart)} during generation")
    return acting


def _widths(config: Config, shape: "PretrainedConfig", num_instances: int) -> tuple[int, ...]:
    """Numbers of instances that could decode the last samples as one."""
    from hybridrl.models.parallel import wide_widths

    rollout = config.rollout
    if rollout.wide_tp == 0:
        rollout = replace(rollout, tail_tp="auto")
    return wide_widths(shape, rollout, num_instances)


def _passes(config: Config, graph: Graph) -> list[str]:
    """The forward passes that an instance without samples can run while others decode."""
    places = ConfiguredPlaces(config)
    order = generation_first(list(graph.stages.values()))
    early = [stage for section in sections(order) for stage in early_stages(graph, section, places)]
    computes = [stage for stage in early if isinstance(stage, ComputeStage)]
    return [stage.name for stage in computes if places.scope(stage) is Scope.INSTANCE]


def _early_obstacle(config: Config, graph: Graph, shape: "PretrainedConfig") -> str | None:
    """Why no update of the actor begins early, with ranks in any order that the run may choose."""
    from hybridrl.layout.switching import candidate_orders

    layout, gen = config.trainer.layout, config.rollout.layout
    ascending, axes = config.rollout.features.ascending, TrainAxes.of(layout)
    orders = candidate_orders(axes, gen.pp, gen.tp, gen.grouping, ascending=ascending)
    reasons = []
    for positions in orders:
        instances = defaultdict(list)
        for rank, (number, *_) in enumerate(positions):
            instances[number].append(rank)
        settings = early_settings(config, [*instances.values()], shape)
        updates = early_updates(graph, ConfiguredPlaces(config), settings).values()
        if not any(update.stage for update in updates):
            reasons += [update.reason for update in updates if update.reason]
    return reasons[-1] if reasons else None


def _works_apart(config: Config, graph: Graph, role: str) -> bool:
    """Whether a role computes elsewhere than on the ranks' devices, while these generate."""
    if role not in graph.judges or config.is_neural(role):
        return config.pool_of(role) != config.cluster.home
    if config.home_of(role) is JudgeHome.driver:
        return True
    return config.judge_of(role).kind in _RUN_PROGRAMS


def _num_instances(config: Config) -> int:
    return config.ranks_of(config.cluster.home) // config.rollout.layout.ranks


def early_settings(
    config: Config, instances: Sequence[Sequence[int]], shape: "PretrainedConfig"
) -> EarlySettings:
    """What a run's settings say of early backward; `instances` are the ranks of each."""
    return EarlySettings(
        obstacle=_obstacle(config, shape) or _of_instances(config, instances),
        epochs=config.trainer.epochs,
        mini_batches=config.trainer.mini_batches,
    )


def _obstacle(config: Config, shape: "PretrainedConfig") -> str | None:
    from hybridrl.models.parallel import num_experts

    layout, lora = config.trainer.layout, config.actor.lora
    if config.strict:
        return "deterministic=strict sums gradients in the order of schedule=serial"
    if layout.cp > 1:
        return f"long rows are shared at the barrier; wanted trainer.layout.cp=1 ({layout.cp})"
    if lora.rank and lora.dropout:
        return f"dropout is drawn for a whole update; wanted actor.lora.dropout=0 ({lora.dropout})"
    if num_experts(shape):
        return "the load of experts is counted over a whole update; wanted a model without experts"
    return None


def _of_instances(config: Config, instances: Sequence[Sequence[int]]) -> str | None:
    """As `layout_obstacle`, where instances train; elsewhere all ranks that train do it."""
    return None if config.cluster.home != "actor" else layout_obstacle(config, instances)


def layout_obstacle(config: Config, instances: Sequence[Sequence[int]]) -> str | None:
    """Why the ranks of an instance are not whole training replicas; None where they are."""
    axes = TrainAxes.of(config.trainer.layout)
    if len(instances) < 2:
        return "there is one generation instance; wanted more cluster.ranks than it has"
    replica_of = [rank // (axes.fsdp * axes.tp) % axes.replicas for rank in range(axes.ranks)]
    homes = [{replica_of[rank] for rank in ranks} for ranks in instances]
    if sum(map(len, homes)) == axes.replicas:  # none is in two instances
        return None
    # The ranks of an instance on a stage, where it has as many stages as the trainer.
    size = len(instances[0]) if axes.pp == 1 else config.rollout.layout.tp
    replicas = axes.ranks // (axes.pp * size)
    if replicas < 2:
        return f"an instance is no training replica; wanted more cluster.ranks ({axes.ranks})"
    tp = gcd(size, axes.tp)
    if axes.pp > 1 and config.rollout.features.ascending and tp < size:
        tp = 1  # strided over both fsdp and tp, the ranks of a tp group would not ascend
    allowed = f"trainer.layout.replicas={replicas} trainer.layout.fsdp={size // tp}"
    if axes.tp != tp:
        allowed += f" trainer.layout.tp={tp}"
    elif axes.pp == 1 and axes.replicas == replicas:  # of the right size, with other ranks
        allowed = "rollout.layout.grouping=vanilla"
    if axes.pp > 1:
        allowed += f" rollout.layout.pp={axes.pp} rollout.layout.grouping=strided"
    return f"an instance's ranks are no whole training replica; wanted {allowed}"
