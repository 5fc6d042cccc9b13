"""What `schedule=auto` is in a run, and whether its instances can train alone."""

from collections.abc import Sequence
from math import gcd

from hybridrl.config import Config
from hybridrl.config.reward import JudgeHome, RewardKind
from hybridrl.config.schedule import (
    AutoScheduleConfig,
    EarlyBackward,
    FusedScheduleConfig,
    SerialScheduleConfig,
)
from hybridrl.flow import Graph
from hybridrl.flow.early_updates import EarlySettings, early_obstacle
from hybridrl.flow.graph import ComputeStage
from hybridrl.layout.grouping import TrainAxes

_RUN_PROGRAMS = (RewardKind.code, RewardKind.function)
"""Judges on a sample's rank that may take long enough to be worth an earlier start."""


def decide_schedule(config: Config, graph: Graph, model_path: str) -> str:
    """Put the schedule whose mechanisms act in this run in the place of `schedule=auto`.

    The batch is that of `serial` in every case. Returns a line that says what acts, and why; it is
    empty where the config names a schedule.
    """
    if not isinstance(config.schedule, AutoScheduleConfig):
        return ""
    acting = _acting(config, graph)
    if not acting:
        config.schedule = SerialScheduleConfig()
        config.check_schedule()  # what is only refused without a tail
        return "schedule=auto is serial: nothing can begin before the batch is complete"
    num, trainer = _num_instances(config), config.trainer
    of_run = EarlySettings(
        obstacle=_obstacle(config, model_path),
        epochs=trainer.epochs,
        mini_batches=trainer.mini_batches,
    )
    obstacle = early_obstacle(graph, of_run)
    if num < 2:
        obstacle = "one generation instance"
    elif obstacle is None and config.trainer.layout.replicas != num:
        obstacle = f"an instance is no training replica (trainer.layout.replicas={num} makes it)"
    early = EarlyBackward.never if obstacle else EarlyBackward.auto
    config.schedule = FusedScheduleConfig(early_backward=early)
    told = "; ".join(acting)
    trains = f"no early backward: {obstacle}" if obstacle else "early backward where it is sooner"
    return f"schedule=auto is fused: {told}; {trains}"


def _acting(config: Config, graph: Graph) -> list[str]:
    """What of `fused` acts in a run, in words."""
    if not graph.generates:
        return []
    rollout, num = config.rollout, _num_instances(config)
    acting = []
    fixed = rollout.ignore_eos or rollout.min_new_tokens == rollout.max_new_tokens
    if num > 1 and not fixed:
        acting.append(f"the last samples move between {num} instances")
    computes = [stage for stage in graph.stages.values() if isinstance(stage, ComputeStage)]
    roles = dict.fromkeys(str(stage.role) for stage in computes if stage.role)
    if apart := [role for role in roles if _works_apart(config, graph, role)]:
        acting.append(f"{' and '.join(apart)} during generation")
    return acting


def _works_apart(config: Config, graph: Graph, role: str) -> bool:
    """Whether a role computes elsewhere than on the ranks' devices, while these generate."""
    if role not in graph.judges or config.is_neural(role):
        return config.pool_of(role) != "actor"
    if config.home_of(role) is JudgeHome.driver:
        return True
    return config.judge_of(role).kind in _RUN_PROGRAMS


def _num_instances(config: Config) -> int:
    return config.ranks_of("actor") // config.rollout.layout.ranks


def early_settings(
    config: Config, instances: Sequence[Sequence[int]], model_path: str
) -> EarlySettings:
    """What a run's settings say of early backward; `instances` are the ranks of each."""
    return EarlySettings(
        obstacle=_obstacle(config, model_path) or layout_obstacle(config, instances),
        epochs=config.trainer.epochs,
        mini_batches=config.trainer.mini_batches,
    )


def _obstacle(config: Config, model_path: str) -> str | None:
    from hybridrl.models.load import load_config
    from hybridrl.models.parallel import num_experts

    layout, lora = config.trainer.layout, config.actor.lora
    if config.strict:
        return "deterministic=strict sums gradients in the order of schedule=serial"
    if layout.cp > 1:
        return f"long rows are shared at the barrier; wanted trainer.layout.cp=1 ({layout.cp})"
    if lora.rank and lora.dropout:
        return f"dropout is drawn for a whole update; wanted actor.lora.dropout=0 ({lora.dropout})"
    if num_experts(load_config(model_path)):
        return "the load of experts is counted over a whole update; wanted a model without experts"
    return None


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
