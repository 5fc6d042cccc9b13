"""The schedule that a config asks for."""

from collections.abc import Iterator

from hybridrl.config import Config, ParkedKV, Ranker, ScheduleKind
from hybridrl.data import Item
from hybridrl.flow import Graph
from hybridrl.flow.executor import Executor, Sampling
from hybridrl.flow.lengths import (
    LearnedRanker,
    LengthModel,
    LengthRanker,
    PromptKey,
    RunningRanker,
)
from hybridrl.flow.schedules.base import Prompt, Schedule, StepSettings
from hybridrl.flow.schedules.fused import FusedSchedule
from hybridrl.flow.schedules.generation_round import RoundLimits
from hybridrl.flow.schedules.partial import PartialSchedule
from hybridrl.flow.schedules.serial import SerialSchedule

_RANKERS: dict[Ranker, type[LengthRanker]] = {
    Ranker.running: RunningRanker,
    Ranker.learned: LearnedRanker,
}


def make_schedule(
    config: Config,
    name: ScheduleKind,
    graph: Graph,
    executor: Executor,
    prompts: Iterator[Prompt],
    sampling: Sampling,
    prompts_per_step: int,
) -> Schedule:
    """The schedule `name` over `graph`, with the settings of `config.rollout`."""
    rollout = config.rollout
    settings = StepSettings(
        sampling=sampling, decode_steps=rollout.decode_steps, prompts_per_step=prompts_per_step
    )
    step = (graph, executor, prompts, settings)
    if name is ScheduleKind.serial:
        return SerialSchedule(*step)
    limits = RoundLimits(
        max_held=samples_held(config),
        chunk_tokens=config.trainer.max_tokens_per_micro_batch,
        migration=rollout.migration,
        stale_kv=rollout.parked_kv is ParkedKV.keep,
    )
    length_model = LengthModel(key_of=key_of, ranker=_RANKERS[rollout.length_ranker]())
    if name is ScheduleKind.partial:
        return PartialSchedule(
            *step,
            limits=limits,
            length_model=length_model,
            over_provision=rollout.over_provision,
            max_staleness=rollout.max_staleness,
        )
    return FusedSchedule(
        *step,
        limits=limits,
        length_model=length_model,
        migration_threshold=rollout.migration_threshold,
    )


def key_of(item: Item) -> PromptKey:
    """What a length ranker may know of a prompt."""
    return PromptKey((item.source, item.prompt), item.source, item.prompt_ids)


def samples_held(config: Config) -> int:
    """Samples that decode together on an instance, whatever their lengths: KV cache and batch.

    At least one: that one fits is checked for the prompts that there are, not for the longest.
    """
    rollout = config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    blocks = -(-longest // rollout.block_size)
    cached = max(1, -(-rollout.kv_cache_tokens // rollout.block_size) // blocks)
    return min(rollout.max_running, cached) if rollout.kv_cache_tokens else rollout.max_running
