"""The fused schedule: per-sample stages overlap generation, and its long tail migrates.

RLHFuse, inter-stage fusion (arXiv 2409.13221, section 4).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridrl.flow.early_updates import EarlySettings, EarlyUpdate
from hybridrl.flow.graph import Stage, UpdateStage
from hybridrl.flow.migration import TailPlan
from hybridrl.schedule.groups import GenerationTask
from hybridrl.schedule.loop_schedule import LoopSchedule, SchedulePolicy
from hybridrl.schedule.readiness import early_updates
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.tail import NoTail
from hybridrl.schedule.tail.early import StreamedUpdate
from hybridrl.schedule.tail.moving import MovingTail
from hybridrl.schedule.tail.plan import TailPlanner, TailRound

logger = logging.getLogger(__name__)


class _TakenPlan(NamedTuple):
    """A plan whose round has begun, at `began`; its seconds are known when the update has ended."""

    plan: TailPlan
    began: float
    of: TailRound


@dataclass(kw_only=True, eq=False)
class Fused(SchedulePolicy):
    """Trains on the same batch as `SerialSchedule`, sooner.

    A round makes all samples of its prompts. When few of them are unfinished, they migrate to the
    fewest instances that hold them, and the others are free for waiting work (`MovingTail`). That
    is at `migration_threshold`, or at what `TailPlanner` chooses.

    With `early` an instance that has nothing else to do trains on groups that are whole. Recipe and
    settings have to allow it (`early_updates`), and the plan to say so. A line of the log says for
    each update whether they do.
    """

    migration_threshold: int | None = None
    early: EarlySettings | None = None
    must_widen: bool = False

    def bind(self, schedule: LoopSchedule) -> None:
        """Belong to a schedule; find the updates that may begin early, by their section's name."""
        super().bind(schedule)
        self._planner = TailPlanner(
            schedule.executor,
            schedule.meter,
            schedule.length_model,
            schedule.limits,
            schedule.settings.decode_steps,
            self.migration_threshold,
            self.must_widen,
        )
        self._taken: _TakenPlan | None = None
        self._early_updates: dict[str, EarlyUpdate] = {}
        if self.early is not None:
            self._early_updates = early_updates(schedule.graph, schedule.executor, self.early)
        for section in schedule.sections if self.early is not None else ():
            update = self._early_updates[section[0].name]
            if update.stage is not None:
                logger.info("early backward: %s begins while samples decode", update.stage.name)
            elif any(isinstance(stage, UpdateStage) for stage in section):
                logger.warning("schedule.early_backward has no effect: %s", update.reason)

    def state_dict(self) -> dict[str, Any]:
        """What plans took beyond the model."""
        return {"plan_errors": self._planner.errors.state_dict()}

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue from a `state_dict`; another schedule has tried no plan."""
        self._planner.errors.load_state_dict(state.get("plan_errors", {}))

    def begin_step(self) -> None:
        """No plan is taken yet."""
        self._taken = None
        if any(update.stage for update in self._early_updates.values()):
            self.schedule.metrics["samples/trained_early"] = 0.0

    def _update_of(self, section: Sequence[Stage]) -> UpdateStage | None:
        """The update of a section that may begin early, in steps that have it."""
        update = self._early_updates.get(section[0].name)
        return None if update is None else update.stage

    def compares_early(self, section: Sequence[Stage]) -> bool:
        """Whether groups are trained before the batch is there."""
        return self._update_of(section) is not None

    def tail(self, stages: StreamedStages, tasks: Sequence[GenerationTask]) -> tuple[NoTail, bool]:
        """The tail that the best plan says, in a round that begins now."""
        schedule = self.schedule
        early = self._update_of(schedule.section_of(tasks[0].stage))
        if early is not None and schedule.steps_done < early.after:
            early = None
        of = TailRound(schedule.pulled, stages.tracker, early)
        plan = self._planner.choose(of, len(tasks), schedule.metrics)
        self._taken = _TakenPlan(plan, schedule.executor.clock.now(), of)
        # Conversations leave instances time between their calls, whatever the plan is.
        converses = any(task.converses for task in tasks)
        overlaps = plan.overlaps or converses
        trains = None
        if early is not None and plan.trains_early:
            # A call that outlasts the decoding is waited for by all. So the shortest step counts.
            num = schedule.groups.ledger.num_unfinished
            steps = schedule.length_model.forecast.steps(num)
            longest = min((step[-1] for step in steps), default=0)
            trains = StreamedUpdate(early, stages, schedule.limits.chunk_tokens, longest)
        if trains is None and not plan.migration.moves:
            return NoTail(), overlaps
        tail = MovingTail(
            plan.migration,
            schedule.limits.max_held,
            schedule.loop.instances,
            stages,
            schedule.groups.turns,
            trains,
            converses,
        )
        return tail, overlaps

    def take(self) -> list[int]:
        """All prompts of the round are trained on; what its tail came to is recorded."""
        loop, taken = self.schedule.loop, self._taken
        assert taken is not None
        overlapped = loop.num_overlapped > 0
        self._planner.record(taken.plan, loop.tail, overlapped, self.schedule.metrics)
        return super().take()

    def round_ended(self) -> None:
        """A plan without an update has ended."""
        if self._taken is not None and self._taken.of.early is None:
            self.update_ended()

    def update_ended(self) -> None:
        """A plan has ended: it is known what it took."""
        if self._taken is not None:
            measured_s = self.schedule.executor.clock.now() - self._taken.began
            self._planner.judge(self._taken.of, self._taken.plan, measured_s)
            self._taken = None
