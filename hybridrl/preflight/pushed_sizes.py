"""Sizes of pushed weights on the ranks of both pools, where instances have ranks of their own."""

from transformers import PretrainedConfig

from hybridrl.config import AsyncScheduleConfig, Config, Push
from hybridrl.costs.push_memory import ReceivedSizes, SentSizes, versions_held
from hybridrl.models.load import TORCH_DTYPES
from hybridrl.workers.pushed_weights import pushed_plan


def sent_sizes(config: Config, shape: PretrainedConfig) -> SentSizes:
    """The training rank that sends most."""
    itemsize = TORCH_DTYPES[config.rollout.dtype].itemsize
    traffic = pushed_plan(config, shape).plan.traffic
    schedule, staleness = config.schedule, 0
    if isinstance(schedule, AsyncScheduleConfig):
        # In flight, instances take the newest alone, unless a record names older ones.
        newest = schedule.in_flight and schedule.follow is None
        staleness = 0 if newest else schedule.max_staleness
        evaluates = any(settings.every for settings in config.eval.sets.values())
        if newest and schedule.max_staleness > 1 and evaluates:
            staleness = 2  # an evaluation has its version for as long as two steps of training
    version = int(traffic.sent.max()) * itemsize
    return SentSizes(
        version=version,
        largest=max(traffic.links.values()) * itemsize,
        versions=versions_held(staleness),
        deltas=version if config.rollout.push is Push.sparse else 0,
    )


def received_sizes(config: Config, shape: PretrainedConfig, weights: int) -> ReceivedSizes:
    """The place of an instance that receives most; its engine has `weights` bytes."""
    itemsize = TORCH_DTYPES[config.rollout.dtype].itemsize
    arrays = int(pushed_plan(config, shape).plan.traffic.received.max()) * itemsize
    if not config.actor.lora.rank:
        kept = arrays if config.rollout.push is Push.sparse else 0
        return ReceivedSizes(arrays=arrays, kept=kept)
    return ReceivedSizes(arrays=arrays, base=weights, adapters=arrays)
