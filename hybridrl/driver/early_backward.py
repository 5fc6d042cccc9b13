"""Whether the instances of a run can train alone, and which setting would let them."""

from collections.abc import Sequence
from math import gcd

from hybridrl.config import Config
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.layout.grouping import TrainAxes


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
    if not config.rollout.features.sleeps_alone:
        engine = config.rollout.engine.value
        return f"rollout.engine={engine} is not built for instances that leave; wanted native"
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
    allowed = f"trainer.layout.replicas={replicas} trainer.layout.fsdp={size // tp}"
    if axes.tp != tp:
        allowed += f" trainer.layout.tp={tp}"
    elif axes.pp == 1 and axes.replicas == replicas:  # of the right size, with other ranks
        allowed = "rollout.layout.grouping=vanilla"
    if axes.pp > 1:
        allowed += f" rollout.layout.pp={axes.pp} rollout.layout.grouping=strided"
    return f"an instance's ranks are no whole training replica; wanted {allowed}"
