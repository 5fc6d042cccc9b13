"""The fused schedule: per-sample stages overlap generation, and its long tail migrates.

RLHFuse, inter-stage fusion (arXiv 2409.13221, section 4).
"""

from collections.abc import Iterator, Sequence
from typing import Self

from hybridrl.config import FusedScheduleConfig, Migration, ScheduleConfig
from hybridrl.flow.executor import Executor, Scope
from hybridrl.flow.graph import Graph, SourceStage
from hybridrl.flow.lengths import RANKERS, LengthModel
from hybridrl.flow.migration import NO_MIGRATION, MigrationPlan, best_migration_plan
from hybridrl.flow.schedules.base import Batch, Prompt, ScheduleParts, StepSettings
from hybridrl.flow.schedules.generation_round import RoundLimits
from hybridrl.flow.schedules.readiness import ReadyTracker
from hybridrl.flow.schedules.streaming import StreamingSchedule


class FusedSchedule(StreamingSchedule):
    """Trains on the same batch as `SerialSchedule`, sooner.

    A round makes all samples of its prompts (`StreamingSchedule`). When at most
    `migration_threshold` of them are unfinished, they migrate to the fewest instances that hold
    them, and the others are free for waiting work. Threshold 0 leaves every sample on its instance.
    None takes the best threshold by a model of the step, which reads the lengths of earlier steps
    and the measured costs.
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
    ) -> None:
        step = (graph, executor, prompts, settings)
        super().__init__(*step, limits=limits, length_model=length_model)
        self.migration_threshold = migration_threshold

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
        )

    def _begin_step(self, step: int) -> None:
        super()._begin_step(step)
        self._trackers, self._step_tasks = {}, []

    def _run_round(self, makers: Sequence[SourceStage], batch: Batch) -> Batch:
        """Make all samples of the pulled prompts."""
        tracker = self._tracker_of(makers[0])
        tasks = [
            task
            for stage in makers
            for task in self._new_tasks(stage, tracker, self._pulled, batch)
        ]
        if not tasks:
            return self._streamed(tracker, [])
        self._enter_for([*makers, *tracker.computes])
        generation_round = self._new_round(tracker, self._migration_plan(tracker, len(tasks)))
        generation_round.adopt(self._step_tasks)
        self._submit(generation_round, tasks)
        generation_round.run()
        generation_round.check_restored()
        positions = list(dict.fromkeys(task.sample.id.prompt for task in tasks))
        return self._end_round(generation_round, tracker, tasks, positions)

    def _migration_plan(self, tracker: ReadyTracker, num_samples: int) -> MigrationPlan:
        """The plan with the given threshold, or the best for so many samples."""
        if self.migration_threshold is not None:
            return MigrationPlan(self.migration_threshold, self.limits.max_held)
        costs = self.meter.costs()
        lengths = self.length_model.forecast.sample(num_samples)
        if costs is None or not lengths:
            return NO_MIGRATION
        passes = [s.name for s in tracker.computes if self._scope(s) is Scope.INSTANCE]
        chunk = max(1, self.limits.chunk_tokens // 8)
        inference = sum(costs.compute(name, chunk) for name in passes) / chunk
        prompts = [len(self.length_model.key_of(prompt).prompt_ids) for _, prompt in self._pulled]
        plan = best_migration_plan(
            lengths,
            len(self.executor.instances),
            costs,
            inference,
            self.limits.max_held,
            sum(prompts) / max(1, len(prompts)),
            wait_s=self.limits.steps(costs, 1, self.settings.decode_steps) * costs.step_s / 2,
        )
        self._metrics["samples/migration_threshold"] = float(plan.threshold)
        return plan
