"""A schedule from its settings: `serial`, or a policy over the loop."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.config import (
    AsyncScheduleConfig,
    Batches,
    FusedScheduleConfig,
    Migration,
    PackedScheduleConfig,
    PartialScheduleConfig,
    ScheduleConfig,
    SerialScheduleConfig,
)
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Executor
from hybridrl.flow.graph import Graph, TakeStage
from hybridrl.flow.lengths import LengthModel, PromptKey
from hybridrl.flow.versions import RunRecord
from hybridrl.schedule.as_complete import AsComplete
from hybridrl.schedule.asynchronous import Async
from hybridrl.schedule.base import Prompt, Schedule, StepSettings
from hybridrl.schedule.followed_rounds import FollowedRounds
from hybridrl.schedule.following import Followed
from hybridrl.schedule.fused import Fused
from hybridrl.schedule.guest import GuestStep
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule, SchedulePolicy
from hybridrl.schedule.packed import Packed
from hybridrl.schedule.partial import Partial, check_stale
from hybridrl.schedule.serial import SerialSchedule

_POLICIES: dict[type[ScheduleConfig], type[SchedulePolicy]] = {
    SerialScheduleConfig: SchedulePolicy,  # it runs every recipe
    FusedScheduleConfig: Fused,
    PartialScheduleConfig: Partial,
    PackedScheduleConfig: Packed,
    AsyncScheduleConfig: Async,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleParts:
    """What a schedule needs besides its own settings.

    An instance decodes at most `max_held` samples at a time, and one call of a forward pass has
    `chunk_tokens`. `key_of` gives the key by which a length ranker knows a prompt. Samples travel
    without their keys and values where the engine does not hand them out (`exports_kv`).
    `num_steps` is the number of steps that the run is to have, where that is known, and
    `num_training` that of the ranks that train. `early` says
    whether instances can train alone. With `must_widen` the tail goes to wide instances in any
    case, else where it ends sooner there. The `record` of a run is followed (`Followed`).
    """

    graph: Graph
    executor: Executor
    prompts: Iterator[Prompt]
    settings: StepSettings
    max_held: int
    chunk_tokens: int
    key_of: Callable[[Any], PromptKey]
    exports_kv: bool = True
    num_steps: int | None = None
    num_training: int = 1
    early: EarlySettings = field(default_factory=EarlySettings)
    must_widen: bool = False
    record: RunRecord | None = None


def check_graph(config: ScheduleConfig, graph: Graph) -> None:
    """Raise `ValueError`, with what is allowed, for a recipe that the schedule cannot run."""
    _POLICIES[type(config)].check_graph(graph)
    if isinstance(config, AsyncScheduleConfig) and config.may_be_stale:
        in_order = config.batches is Batches.in_order
        if in_order and any(isinstance(stage, TakeStage) for stage in graph.stages.values()):
            raise ValueError(
                "serial, periodic, or schedule.batches=as_complete: a take may ask for another "
                "round of prompts"
            )
        check_stale(graph, "serial or periodic")


def build(parts: ScheduleParts, config: ScheduleConfig) -> Schedule:
    """The schedule of these settings."""
    step = parts.graph, parts.executor, parts.prompts, parts.settings
    limits = RoundLimits(max_held=parts.max_held, chunk_tokens=parts.chunk_tokens)
    if config.keeps_kv:  # wherever samples go, by passes that wait too
        how = Migration.kv if parts.exports_kv else Migration.recompute
        limits = replace(limits, stale_kv=True, migration=how)
    policy: SchedulePolicy
    match config:
        case FusedScheduleConfig():
            how = config.migration if parts.exports_kv else Migration.recompute
            limits = replace(limits, migration=how)
            policy = Fused(
                migration_threshold=config.migration_threshold,
                early=parts.early if config.trains_early else None,
                must_widen=parts.must_widen,
            )
        case PartialScheduleConfig():
            # A step ends once its first groups are complete: what is ahead would stop unbegun.
            limits = replace(limits, ahead=False)
            policy = Partial(
                over_provision=config.over_provision,
                max_staleness=config.max_staleness,
            )
        case PackedScheduleConfig():
            policy = Packed(
                max_wait_steps=config.max_wait_steps,
                limit_tokens=config.limit_tokens,
                num_steps=parts.num_steps,
            )
        case AsyncScheduleConfig():
            if not config.keeps_kv:
                how = Migration.auto if parts.exports_kv else Migration.recompute
                limits = replace(limits, migration=how)
            follows, kind = None, Async
            if parts.record is not None:
                follows = Followed(parts.record)
                kind = Async if parts.executor.separate else FollowedRounds
            elif config.batches is Batches.as_complete:
                kind = AsComplete
            policy = kind(
                max_staleness=config.max_staleness,
                in_flight=config.in_flight and follows is None,
                follows=follows,
                early=parts.early,
                num_training=parts.num_training,
                num_steps=parts.num_steps,
            )
        case _:
            return SerialSchedule(*step)
    lengths = LengthModel(key_of=parts.key_of)
    return LoopSchedule(*step, policy, limits=limits, length_model=lengths)


def build_guest(parts: ScheduleParts, version: int) -> GuestStep:
    """A step by one version of the weights, for a guest of another schedule."""
    return GuestStep(
        parts.graph,
        parts.executor,
        parts.prompts,
        parts.settings,
        version,
        limits=RoundLimits(max_held=parts.max_held, chunk_tokens=parts.chunk_tokens),
        length_model=LengthModel(key_of=parts.key_of),
    )
