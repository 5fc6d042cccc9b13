"""The schedule that a config asks for."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hybridrl.config import Config, ScheduleConfig
from hybridrl.config.sampling import SamplingConfig
from hybridrl.costs.instance import Costs
from hybridrl.driver.followed_run import recorded_run, recorded_steps
from hybridrl.driver.ray_executor import RayExecutor
from hybridrl.flow import Graph
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Sampling
from hybridrl.flow.graph import ComputeStage
from hybridrl.schedule.base import (
    Prompt,
    Schedule,
    StepSettings,
)
from hybridrl.schedule.build import ScheduleParts, build, build_guest
from hybridrl.schedule.guest import GuestStep


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
    if schedule.follows and num_steps is not None:  # a replay's record may be of fewer
        num_steps = min(num_steps, recorded_steps(config) or num_steps)
    parts = _parts(config, graph, executor, prompts, sampling, prompts_per_step)
    parts = replace(
        parts,
        settings=replace(parts.settings, counted=counted),
        num_steps=num_steps,
        num_training=config.ranks_of("actor"),
        early=early or EarlySettings(),
        must_widen=bool(config.rollout.wide_tp),
        record=recorded_run(config) if schedule.follows else None,
    )
    return build(parts, schedule)


def make_guest(
    config: Config,
    graph: Graph,
    executor: RayExecutor,
    prompts: Iterator[Prompt],
    sampling: Sampling,
    num_prompts: int,
    version: int,
) -> GuestStep:
    """A step over `graph` by one version of the weights, as a guest of the one that trains."""
    parts = _parts(config, graph, executor, prompts, sampling, num_prompts)
    return build_guest(parts, version)


def _parts(
    config: Config,
    graph: Graph,
    executor: RayExecutor,
    prompts: Iterator[Prompt],
    sampling: Sampling,
    prompts_per_step: int,
) -> ScheduleParts:
    """What every schedule needs."""
    rollout = config.rollout
    return ScheduleParts(
        graph=graph,
        executor=executor,
        prompts=prompts,
        settings=StepSettings(
            sampling=sampling,
            decode_steps=rollout.decode_steps,
            prompts_per_step=prompts_per_step,
            draft_tokens=rollout.draft_length,
            pass_tokens=rollout.pass_tokens,
        ),
        max_held=config.samples_held,
        chunk_tokens=config.trainer.max_tokens_per_micro_batch,
        key_of=executor.key_of,
        exports_kv=rollout.features.exports_kv,
    )


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
