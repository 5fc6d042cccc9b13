"""The fused schedule: per-sample stages overlap generation, and its long tail migrates.

RLHFuse, inter-stage fusion (arXiv 2409.13221, section 4).
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple, Self

from hybridrl.config import FusedScheduleConfig, Migration, ScheduleConfig
from hybridrl.costs.instance import Costs
from hybridrl.costs.tail import StepModel, training_arrivals
from hybridrl.flow.early_updates import EarlySettings, EarlyUpdate, early_update
from hybridrl.flow.executor import Executor, Scope
from hybridrl.flow.graph import Graph, SourceStage, Stage, UpdateStage
from hybridrl.flow.ledger import sections
from hybridrl.flow.lengths import RANKERS, LengthModel
from hybridrl.flow.migration import (
    NO_MIGRATION,
    MigrationPlan,
    TailPlan,
    best_plan,
    tail_plans,
)
from hybridrl.flow.plan_errors import PlanErrors
from hybridrl.schedule.base import Batch, Prompt, ScheduleParts, StepSettings
from hybridrl.schedule.generation_task import RoundLimits
from hybridrl.schedule.readiness import ReadyTracker, early_stages
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.streaming import StreamingSchedule
from hybridrl.schedule.tail import NoTail
from hybridrl.schedule.tail.early import StreamedUpdate
from hybridrl.schedule.tail.moving import MovingTail

logger = logging.getLogger(__name__)


class _TakenPlan(NamedTuple):
    """A plan whose round has begun, at `began`; its seconds are known when the update has ended."""

    plan: TailPlan
    began: float
    tracker: ReadyTracker
    early: UpdateStage | None


class FusedSchedule(StreamingSchedule):
    """Trains on the same batch as `SerialSchedule`, sooner.

    A round makes all samples of its prompts (`StreamingSchedule`). When at most
    `migration_threshold` of them are unfinished, they migrate to the fewest instances that hold
    them, and the others are free for waiting work. Threshold 0 leaves every sample on its instance.
    None takes the best plan by a model of the step, which reads the lengths of earlier steps and
    the measured costs (`tail_plans`). It allows for what steps with each plan took beyond the model
    so far (`PlanErrors`). Where the executor can form wide instances, that model
    chooses their width too, or none. With `must_widen` there is no tail on narrow ones.

    With `early` an instance that has nothing else to do trains on groups that are whole. Recipe and
    settings have to allow it (`early_update`), and the plan to say so. A line of the log says for
    each update whether they do.
    """

    def __init__(
        self,
        graph: Graph,
        executor: Executor,
        prompts: Iterator[Prompt],
        settings: StepSettings,
        *,
        limits: RoundLimits,
        length_model: LengthModel,
        migration_threshold: int | None = None,
        early: EarlySettings | None = None,
        must_widen: bool = False,
    ) -> None:
        step = (graph, executor, prompts, settings)
        super().__init__(*step, limits=limits, length_model=length_model)
        self.migration_threshold, self._early = migration_threshold, early
        wide = sorted({len(members) for members in executor.wide.values()})
        self._must_widen = must_widen and bool(wide)
        self._widths = tuple(wide) if self._must_widen else (1, *wide)
        # By the first stage of a section.
        self._early_updates: dict[str, EarlyUpdate] = {}
        self._plan_errors = PlanErrors()
        self._taken: _TakenPlan | None = None
        for section in sections(self._order) if early is not None else ():
            update = self._early_updates[section[0].name] = self._early_update(section)
            if update.stage is not None:
                logger.info("early backward: %s begins while samples decode", update.stage.name)
            elif any(isinstance(stage, UpdateStage) for stage in section):
                logger.warning("schedule.early_backward has no effect: %s", update.reason)

    @classmethod
    def build(cls, parts: ScheduleParts, config: ScheduleConfig) -> Self:
        """The schedule with its settings, a `FusedScheduleConfig`."""
        assert isinstance(config, FusedScheduleConfig)
        return cls(
            *parts.step,
            limits=RoundLimits(
                max_held=parts.max_held,
                chunk_tokens=parts.chunk_tokens,
                migration=config.migration if parts.exports_kv else Migration.recompute,
            ),
            length_model=LengthModel(key_of=parts.key_of, ranker=RANKERS[config.length_ranker]()),
            migration_threshold=config.migration_threshold,
            early=parts.early if config.trains_early else None,
            must_widen=parts.must_widen,
        )

    def state_dict(self) -> dict[str, Any]:
        """With what plans took beyond the model."""
        return super().state_dict() | {"plan_errors": self._plan_errors.state_dict()}

    def load_state_dict(
        self, state: Mapping[str, Any], *, prompt_at: Callable[[int], Any], num_ranks: int
    ) -> None:
        """See `Schedule.load_state_dict`; another schedule has tried no plan."""
        super().load_state_dict(state, prompt_at=prompt_at, num_ranks=num_ranks)
        self._plan_errors.load_state_dict(state.get("plan_errors", {}))

    def _begin_step(self, step: int) -> None:
        super()._begin_step(step)
        self._taken = None
        self._groups.clear()
        if any(update.stage for update in self._early_updates.values()):
            self._metrics["samples/trained_early"] = 0.0

    def _early_update(self, section: Sequence[Stage]) -> EarlyUpdate:
        """The update of a section that may begin early."""
        assert self._early is not None
        streamed = early_stages(self.graph, section, self.executor, by_group=True)
        names = {stage.name for stage in streamed}
        return early_update(self.graph, section, names, self.executor, self._early)

    def _early_stages(self, section: Sequence[Stage]) -> list[Stage]:
        update = self._early_updates.get(section[0].name)
        trains_early = update is not None and update.stage is not None
        return early_stages(self.graph, section, self.executor, by_group=trains_early)

    def _update_of(self, maker: Stage) -> UpdateStage | None:
        """The update that this step may begin while `maker` makes samples."""
        section = next(section for section in sections(self._order) if maker in section)
        update = self._early_updates.get(section[0].name)
        if update is None or update.stage is None or self._steps_done < update.stage.after:
            return None
        return update.stage

    def _run_round(self, makers: Sequence[SourceStage], batch: Batch) -> Batch:
        """Make all samples of the pulled prompts."""
        stages = self._stages_of(makers[0])
        tracker = stages.tracker
        tasks = [task for stage in makers for task in self._new_tasks(stage, self._pulled, batch)]
        if not tasks:
            return self._streamed(tracker, [])
        self._enter_for([*makers, *tracker.computes])
        early = self._update_of(makers[0])
        plan = self._tail_plan(tracker, len(tasks), early)
        taken = self._taken = _TakenPlan(plan, self.executor.clock.now(), tracker, early)
        # Conversations leave instances time between their calls, whatever the plan is.
        converses = any(task.converses for task in tasks)
        tail = self._tail_of(plan, early, stages, converses)
        self._begin_round(stages, tail, overlaps=plan.overlaps or converses)
        self._loop.make(tasks)
        self._loop.finish()
        self._record_plan(plan)
        positions = list(dict.fromkeys(task.sample.id.prompt for task in tasks))
        streamed = self._end_round(tasks, positions)
        if taken.early is None:  # its plan says nothing of the update
            self._judge_plan(taken)
        return streamed

    def _tail_of(
        self, plan: TailPlan, early: UpdateStage | None, stages: StreamedStages, converses: bool
    ) -> NoTail:
        """The tail that a plan says; `early` is the update that it may begin."""
        trains = None
        if early is not None and plan.trains_early:
            # A call that outlasts the decoding is waited for by all. So the shortest step counts.
            steps = self.length_model.forecast.steps(self._ledger.num_unfinished)
            longest = min((step[-1] for step in steps), default=0)
            trains = StreamedUpdate(early, stages, self.limits.chunk_tokens, longest)
        if trains is None and not plan.migration.moves:
            return NoTail()
        return MovingTail(
            plan.migration,
            self.limits.max_held,
            self._loop.instances,
            stages,
            self._turns,
            trains,
            converses,
        )

    def _update(self, stages: Sequence[UpdateStage], batch: Batch) -> None:
        super()._update(stages, batch)
        if self._taken is not None:
            self._judge_plan(self._taken)

    def _record_plan(self, plan: TailPlan) -> None:
        """Record which choice the round came to: its tail may end before it is known to be one."""
        if f"{_key(_name_of(plan))}_chosen" not in self._metrics:  # nothing to choose by yet
            return
        tail = self._loop.tail
        happened = _what_happened(
            widened_to=plan.migration.width if tail.num_widened else 1,
            migrated=tail.num_migrated > 0,
            trained_early=tail.num_trained > 0,
            overlapped=self._loop.num_overlapped > 0,
        )
        if happened != _name_of(plan):
            logger.debug("the tail: %s was chosen, %s happened", _name_of(plan), happened)
        self._metrics[f"{_key(happened)}_happened"] = 1.0

    def _judge_plan(self, taken: _TakenPlan) -> None:
        """Learn what its round, or its round and update, took beyond what the plan says."""
        measured_s, costs = self.executor.clock.now() - taken.began, self.meter.costs()
        self._taken = None
        if costs is None or not taken.plan.seconds:
            return
        if taken.early is not None:
            measured_s -= costs.train_switch_s  # of every plan, so that none has it
        last, (threshold, _, width) = self.length_model.forecast.last, taken.plan.migration
        step = taken.tracker, [last], costs, taken.early
        plans = self._plans(*step, 0, (1,))
        if threshold:
            plans += self._plans(*step, threshold, (width,))
        self._plan_errors.saw(plans, taken.plan.name, measured_s)

    def _tail_plan(
        self, tracker: ReadyTracker, num_samples: int, early: UpdateStage | None
    ) -> TailPlan:
        """The plan with the least seconds for the lengths and costs of earlier steps.

        While these are not known, only the user's own threshold moves samples, and an update that
        may begin early is tried. A width that was not measured is tried by the last few samples.
        """
        costs, threshold = self.meter.costs(), self.migration_threshold
        forecast = self.length_model.forecast
        steps = [*zip(forecast.steps(num_samples), forecast.waits(num_samples), strict=True)]
        narrowest = self._widths[0]
        own = NO_MIGRATION
        if threshold:
            own = MigrationPlan(threshold, self.limits.max_held, narrowest)
        if costs is None or not steps:
            return TailPlan("not known yet", 0.0, own, early is not None)
        plans = self._plans(tracker, steps, costs, early, threshold, self._widths)
        plans = self._plan_errors.corrected(plans)
        plan = best_plan(plans)
        if early is not None and not costs.train_token_s:  # it was not measured: it is tried
            plan = plan._replace(trains_early=True, overlaps=True)
        if plan.migration.width == 1 and threshold:
            plan = plan._replace(migration=own)
        if threshold is None and plan.migration.width not in (1, *costs.wide_step_s):
            plan = plan._replace(migration=_trial(plan.migration))
        chosen = _name_of(plan)
        logger.debug("the tail: %s, of %s", chosen, [f"{p.name} {p.seconds:.4g}" for p in plans])
        for one in plans:
            self._metrics[f"{_key(one.name)}_s"] = one.seconds
            for what in ("chosen", "happened"):
                self._metrics.setdefault(f"{_key(one.name)}_{what}", 0.0)
        self._metrics[f"{_key(chosen)}_chosen"] = 1.0
        if threshold is None or self._widths != (1,):
            self._metrics["samples/migration_threshold"] = float(plan.migration.threshold)
        return plan

    def _plans(
        self,
        tracker: ReadyTracker,
        steps: Sequence[tuple[Sequence[int], Sequence[float]]],
        costs: Costs,
        early: UpdateStage | None,
        threshold: int | None,
        widths: Sequence[int],
    ) -> list[TailPlan]:
        """The candidates, for the lengths and waits of these steps; see `tail_plans`."""
        passes = [s.name for s in tracker.computes if self._scope(s) is Scope.INSTANCE]
        prompts = [len(self.length_model.key_of(prompt).prompt_ids) for _, prompt in self._pulled]
        prompt_tokens = sum(prompts) / max(1, len(prompts))
        num_instances = len(self.executor.instances)
        # Tokens of a pass: of an instance that is free by chance, or of its share of all.
        tokens = fmean(sum(lengths) + len(lengths) * prompt_tokens for lengths, _ in steps)
        chunks = max(1, self.limits.chunk_tokens // 8), max(1.0, tokens / num_instances)
        inference, late_inference = (
            sum(costs.compute(name, chunk) for name in passes) / chunk for chunk in chunks
        )
        most = self.settings.decode_steps
        call_steps = self.limits.steps(costs, 1, most)
        scopes = {self._scope(stage) for stage in tracker.computes}
        awaited = not scopes <= {None, Scope.RANK, Scope.INSTANCE}
        model = StepModel(
            lengths=(),
            num_instances=num_instances,
            costs=costs,
            inference_s_per_token=inference,
            prompt_tokens=prompt_tokens,
            call_steps=call_steps,
            call_s=call_steps * float(costs.pass_s(1)),
            switch_s=costs.train_switch_s,
        )
        models = [
            replace(model, lengths=lengths, waits=waits if any(waits) else ())
            for lengths, waits in steps
        ]
        if early is not None:
            models = self._with_training(models, costs.train_token_s * num_instances)
        return tail_plans(
            models,
            self.limits.max_held,
            stay_call_steps=call_steps if awaited else most,
            threshold=threshold,
            widths=widths,
            late_inference_s_per_token=late_inference,
        )

    def _with_training(self, models: Sequence[StepModel], token_s: float) -> list[StepModel]:
        """The models with the training that may be early, where it is known of which prompts.

        A token of it takes `token_s` on one instance.
        """
        known, num = self.length_model.longest_of_prompt, len(self._pulled)
        prompts = [*zip(known.steps(num), known.waits(num), strict=True)][-len(models) :]
        if not prompts:
            return [*models]
        trained = []
        # An older checkpoint has lengths alone.
        for model, prompt in zip(models[-len(prompts) :], prompts, strict=True):
            train_s = token_s * sum(n + model.prompt_tokens for n in model.lengths)
            every = model.ends(model.lengths, model.waits or [0.0] * len(model.lengths))
            arrivals = training_arrivals(every, model.ends(*prompt), train_s)
            trained.append(replace(model, training=arrivals))
        return trained


def _name_of(plan: TailPlan) -> str:
    """The name of what a plan does: it may also train early because that was not measured yet."""
    if not plan.trains_early or plan.name.endswith("train early"):
        return plan.name
    return f"{plan.name}, train early" if plan.migration.moves else "train early"


def _what_happened(
    *, widened_to: int, migrated: bool, trained_early: bool, overlapped: bool
) -> str:
    """The choice that a round came to, under the names of `tail_plans`."""
    moved = f"widen to {widened_to}" if widened_to > 1 else "migrate" if migrated else ""
    if trained_early:
        return f"{moved}, train early" if moved else "train early"
    return moved or ("overlap" if overlapped else "stay")


def _key(name: str) -> str:
    """The metrics of a plan begin with this."""
    return f"plan/{name.replace(', ', '_').replace(' ', '_')}"


def _trial(migration: MigrationPlan) -> MigrationPlan:
    """A plan whose width nobody has measured, for as many samples as the wide instance has members.

    The whole tail would pay for it where wide steps turn out to be slow.
    """
    return migration._replace(threshold=min(migration.threshold, migration.width))
