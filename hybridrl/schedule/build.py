"""A schedule from its settings: `serial`, or a policy over the loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.config import (
    AsyncScheduleConfig,
    FusedScheduleConfig,
    Migration,
    PackedScheduleConfig,
    ParkedKV,
    PartialScheduleConfig,
    ScheduleConfig,
    SerialScheduleConfig,
)
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Executor
from hybridrl.flow.graph import Graph
from hybridrl.flow.lengths import RANKERS, LengthModel, PromptKey
from hybridrl.flow.turns import RoundOrder
from hybridrl.schedule.asynchronous import Async
from hybridrl.schedule.base import Prompt, Schedule, StepSettings
from hybridrl.schedule.fused import Fused
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule, SchedulePolicy
from hybridrl.schedule.packed import Packed
from hybridrl.schedule.partial import Partial, check_partial
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
    case, else where it ends sooner there. With `timed`, and with the recorded `turn_orders` of such
    a run by step, a schedule that stops conversations does so as `Partial` says.
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
    timed: bool = False
    turn_orders: Mapping[int, Sequence[RoundOrder]] | None = None


def check_graph(config: ScheduleConfig, graph: Graph) -> None:
    """Raise `ValueError`, with what is allowed, for a recipe that the schedule cannot run."""
    _POLICIES[type(config)].check_graph(graph)
    if config.may_be_stale:
        check_partial(graph)


def build(parts: ScheduleParts, config: ScheduleConfig) -> Schedule:
    """The schedule of these settings."""
    step = parts.graph, parts.executor, parts.prompts, parts.settings
    limits = RoundLimits(max_held=parts.max_held, chunk_tokens=parts.chunk_tokens)
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
            limits = replace(limits, stale_kv=config.parked_kv is ParkedKV.keep, ahead=False)
            policy = Partial(
                over_provision=config.over_provision,
                max_staleness=config.max_staleness,
                timed=parts.timed,
                turn_orders=parts.turn_orders,
            )
        case PackedScheduleConfig():
            policy = Packed(
                max_wait_steps=config.max_wait_steps,
                limit_tokens=config.limit_tokens,
                num_steps=parts.num_steps,
            )
        case AsyncScheduleConfig():
            policy = Async(
                max_staleness=config.max_staleness,
                early=parts.early,
                num_training=parts.num_training,
                num_steps=parts.num_steps,
            )
        case _:
            return SerialSchedule(*step)
    lengths = LengthModel(key_of=parts.key_of, ranker=RANKERS[config.length_ranker]())
    return LoopSchedule(*step, policy, limits=limits, length_model=lengths)
