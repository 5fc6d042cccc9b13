"""The schedule that a config asks for, and whether its instances can train alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd
from typing import Any

from hybridrl.config import Config, ScheduleConfig
from hybridrl.config.environment import TIMED
from hybridrl.config.sampling import SamplingConfig
from hybridrl.costs.instance import Costs
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.flow import Graph
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Sampling
from hybridrl.flow.graph import ComputeStage
from hybridrl.layout.grouping import TrainAxes
from hybridrl.preflight.turn_orders import recorded_orders
from hybridrl.schedule.base import (
    Prompt,
    Schedule,
    ScheduleParts,
    StepSettings,
    schedule_class,
)


def sampling_of(
    config: Config, settings: SamplingConfig, max_new_tokens: int, temperature: float
) -> Sampling:
    """The `settings` of training's rollouts or of an evaluation set; with turns, if there are."""
    sampling = Sampling.of(settings, max_new_tokens, temperature)
    if config.environment.is_on:
        most = min(config.environment.max_turn_tokens, max_new_tokens)
        sampling = replace(sampling, max_turn_tokens=most)
    elif config.cluster.turns is not None:  # which says where they end
        sampling = replace(sampling, max_turn_tokens=max_new_tokens)
    return sampling


def make_schedule(
    config: Config,
    schedule: ScheduleConfig,
    graph: Graph,
    executor: RayExecutor,
    prompts: Iterator[Prompt],
    sampling: Sampling,
    prompts_per_step: int,
    num_steps: int | None = None,
    early: EarlySettings | None = None,
    counted: Costs | None = None,
) -> Schedule:
    """The `schedule` over `graph`, which need not be that of `config`; `num_steps` in all.

    `early` says whether instances can train alone. `counted` are seconds by operations.
    """
    rollout = config.rollout
    parts = ScheduleParts(
        graph=graph,
        executor=executor,
        prompts=prompts,
        settings=StepSettings(
            sampling=sampling,
            decode_steps=rollout.decode_steps,
            prompts_per_step=prompts_per_step,
            draft_tokens=rollout.draft_length,
            pass_tokens=rollout.pass_tokens,
            counted=counted,
        ),
        max_held=config.samples_held,
        chunk_tokens=config.trainer.max_tokens_per_micro_batch,
        key_of=executor.key_of,
        exports_kv=rollout.features.exports_kv,
        num_steps=num_steps,
        early=early or EarlySettings(),
        must_widen=bool(rollout.wide_tp),
        timed=config.environment.partial == TIMED,
        turn_orders=recorded_orders(config) if schedule.entry.parks_episodes else None,
    )
    return schedule_class(schedule).build(parts, schedule)


def replay_setting(config: Config, executor: RayExecutor, graph: Graph) -> dict[str, Any]:
    """What the planner needs, besides measured costs, to replay a run of `graph`."""
    computes = [stage for stage in graph.stages.values() if isinstance(stage, ComputeStage)]
    return {
        "scopes": {stage.name: executor.scope(stage).value for stage in computes},
        "num_instances": len(executor.instances),
        "max_held": config.samples_held,
        "decode_steps": config.rollout.decode_steps,
        "chunk_tokens": config.trainer.max_tokens_per_micro_batch,
    }


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
