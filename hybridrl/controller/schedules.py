"""The schedule that a config asks for."""

from collections.abc import Iterator

from hybridrl.config import Config
from hybridrl.config import Schedule as Name
from hybridrl.flow import Graph
from hybridrl.flow.executor import Executor, Sampling
from hybridrl.flow.schedules.base import Prompt, Schedule
from hybridrl.flow.schedules.fused import FusedSchedule
from hybridrl.flow.schedules.serial import SerialSchedule


def make_schedule(
    config: Config,
    graph: Graph,
    executor: Executor,
    prompts: Iterator[Prompt],
    sampling: Sampling,
    prompts_per_step: int,
) -> Schedule:
    """`config.schedule` over `graph`, with the settings of `config.rollout`."""
    rollout = config.rollout
    if config.schedule is Name.serial:
        return SerialSchedule(
            graph,
            executor,
            prompts,
            sampling=sampling,
            decode_steps=rollout.decode_steps,
            prompts_per_step=prompts_per_step,
        )
    return FusedSchedule(
        graph,
        executor,
        prompts,
        sampling=sampling,
        decode_steps=rollout.decode_steps,
        prompts_per_step=prompts_per_step,
        migration_threshold=rollout.migration_threshold,
        max_held=samples_held(config),
    )


def samples_held(config: Config) -> int:
    """Samples that decode together on an instance, whatever their lengths: KV cache and batch."""
    rollout = config.rollout
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    blocks = -(-longest // rollout.block_size)
    cached = -(-rollout.kv_cache_tokens // rollout.block_size) // blocks
    return min(rollout.max_running, cached) if rollout.kv_cache_tokens else rollout.max_running
