"""The fused schedule: per-sample stages overlap generation, and its long tail is gathered.

RLHFuse, inter-stage fusion (arXiv 2409.13221, section 4).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.flow.executor import Executor, Phase, Sampling, Scope
from hybridrl.flow.graph import GenerateStage, Graph, SourceStage, Stage
from hybridrl.flow.ledger import phase_of, sampling_of, sections, with_updates_together
from hybridrl.flow.lengths import Forecast, LengthRanker, PromptKey, RunningRanker
from hybridrl.flow.migration import MigrationPlan, best_gathering
from hybridrl.flow.sample import Sample
from hybridrl.flow.schedules.base import Batch, Prompt, Schedule, StepSettings
from hybridrl.flow.schedules.generation_round import GenerationRound, GenerationTask, RoundLimits
from hybridrl.flow.schedules.readiness import ReadyTracker, early_stages
from hybridrl.flow.schedules.streamed_stages import StreamedStages


@dataclass(kw_only=True)
class LengthModel:
    """What a schedule learns over its steps; it changes when and where, never what.

    `key_of` says what `ranker` may know of a prompt.
    """

    key_of: Callable[[Any], PromptKey]
    ranker: LengthRanker = field(default_factory=RunningRanker)
    forecast: Forecast = field(default_factory=Forecast)


class FusedSchedule(Schedule):
    """Trains on the same batch as `SerialSchedule`, sooner.

    Stages that make samples run together; samples go to instances by predicted length. A stage
    that needs no training shards starts on a sample, a filter or join on a prompt, when what it
    reads is there. What is across the batch, changes the weights or needs the training shards runs
    afterwards, in the recipe's order.

    When at most `migration_threshold` samples are unfinished, they are gathered on the fewest
    instances that hold them, and the others are free for waiting work. Threshold 0 leaves every
    sample where it is; None takes the one that a model of the step finds best, from the lengths of
    earlier steps and the measured costs.
    """

    def __init__(
        self,
        graph: Graph,
        executor: Executor,
        prompts: Iterator[Prompt],
        settings: StepSettings,
        *,
        limits: RoundLimits,
        knowledge: LengthModel,
        migration_threshold: int | None = None,
    ) -> None:
        super().__init__(graph, executor, prompts, settings)
        self.limits, self.knowledge = limits, knowledge
        self.migration_threshold = migration_threshold

    def state_dict(self) -> dict[str, Any]:
        """With what was learned of lengths."""
        known = self.knowledge
        learned = {"ranker": known.ranker.state_dict(), "forecast": known.forecast.state_dict()}
        return super().state_dict() | learned

    def load_state_dict(
        self, state: Mapping[str, Any], *, prompt_at: Callable[[int], Any], num_ranks: int
    ) -> None:
        """Go on from there; another schedule may have learned nothing of lengths."""
        super().load_state_dict(state, prompt_at=prompt_at, num_ranks=num_ranks)
        if "ranker" in state:
            self.knowledge.ranker.load_state_dict(state["ranker"])
            self.knowledge.forecast.load_state_dict(state["forecast"])

    def _begin(self, step: int) -> None:
        super()._begin(step)
        self._metrics |= {"samples/migrated": 0.0, "samples/restarted": 0.0}
        self._forget()

    def _forget(self) -> None:
        """The last step's samples have left."""
        self._dataflows: dict[str, ReadyTracker] = {}  # by the update before it
        self._made: list[GenerationTask] = []

    def _run_stages(self, stages: Sequence[Stage], batch: Batch) -> None:
        for section in sections(stages):
            makers = [stage for stage in section if isinstance(stage, SourceStage)]
            if makers:
                made = self._make(makers, batch)
                batch |= {s.name: made[s.name] for s in section if s.name in made}
            left = [stage for stage in section if stage.name not in batch]
            for stage in with_updates_together(left):
                if isinstance(stage, list):
                    self._update(stage, batch)
                else:
                    self._run(stage, batch)

    def _dataflow_of(self, maker: Stage) -> ReadyTracker:
        """The early stages of a maker's section; one for all rounds."""
        section = next(found for found in sections(self._order) if maker in found)
        first = section[0].name
        if first not in self._dataflows:
            makers = [stage for stage in section if isinstance(stage, SourceStage)]
            early = early_stages(self.graph, section, self.executor)
            self._dataflows[first] = ReadyTracker(self.graph, makers, early)
        return self._dataflows[first]

    def _make(self, makers: Sequence[SourceStage], batch: Batch) -> Batch:
        """Make samples of the pulled prompts and run the early stages on them."""
        dataflow = self._dataflow_of(makers[0])
        jobs = [job for stage in makers for job in self._jobs(stage, dataflow, self._pulled, batch)]
        if not jobs:
            return self._taken(dataflow, [])
        self._enter_for([*makers, *dataflow.computes])
        overlap = self._overlap(dataflow, len(jobs))
        overlap.adopt(self._made)
        self._submit(overlap, jobs)
        overlap.run()
        self._made += jobs
        self._note(overlap, [job.sample for job in jobs])
        positions = list(dict.fromkeys(job.sample.id.prompt for job in jobs))
        assert not (waiting := dataflow.open_stages(positions)), f"{waiting} wait for ever"
        return self._taken(dataflow, positions)

    def _enter_for(self, stages: Sequence[Stage]) -> None:
        phases = {phase_of(stage, self._scope(stage)) for stage in stages}
        if Phase.GENERATE in phases:
            self._enter(Phase.GENERATE)

    def _jobs(
        self, stage: SourceStage, dataflow: ReadyTracker, pulled: Sequence[Prompt], batch: Batch
    ) -> list[GenerationTask]:
        """Dispatch the samples of a maker for `pulled` prompts."""
        sampling = self._sampling(stage)
        key_of, ranker = self.knowledge.key_of, self.knowledge.ranker
        made = self._begin_samples(stage, pulled, batch)
        predicted = [0.0] * len(made)
        if sampling is not None:
            most = float(sampling.max_new_tokens)
            found = ranker.predict([key_of(prompt) for (_, prompt), _ in made])
            predicted = [min(tokens, most) for tokens in found]
        jobs = []
        for ((_, prompt), group), tokens in zip(made, predicted, strict=True):
            dataflow.expect(stage, group)
            jobs += [
                GenerationTask(sample, stage, prompt, sampling, tokens, tokens) for sample in group
            ]
        return jobs

    def _sampling(self, stage: SourceStage) -> Sampling | None:
        """How a maker draws; None where it places the dataset's own answers."""
        if not isinstance(stage, GenerateStage):
            return None
        return sampling_of(stage, self.settings.sampling)

    def _submit(self, overlap: GenerationRound, jobs: Sequence[GenerationTask]) -> None:
        overlap.make([job for job in jobs if job.sampling is not None])
        placed: dict[str, list[GenerationTask]] = {}
        for job in jobs:
            if job.sampling is None:
                placed.setdefault(job.stage.name, []).append(job)
        for group in placed.values():
            overlap.submit_targets(group)

    def _overlap(self, dataflow: ReadyTracker, num_samples: int) -> GenerationRound:
        chunk = self.limits.chunk_tokens
        stages = StreamedStages(self.executor, dataflow, self._ledger, self.meter, chunk)
        gathering = self._gathering(dataflow, num_samples)
        return GenerationRound(stages, self.limits, self.settings.decode_steps, gathering)

    def _gathering(self, dataflow: ReadyTracker, num_samples: int) -> MigrationPlan:
        if self.migration_threshold is not None:
            return MigrationPlan(self.migration_threshold, self.limits.max_held)
        costs = self.meter.costs()
        lengths = self.knowledge.forecast.sample(num_samples)
        if costs is None or not lengths:
            return MigrationPlan(0, 0)
        passes = [s.name for s in dataflow.computes if self._scope(s) is Scope.INSTANCE]
        chunk = max(1, self.limits.chunk_tokens // 8)
        inference = sum(costs.compute(name, chunk) for name in passes) / chunk
        prompts = [len(self.knowledge.key_of(prompt).prompt_ids) for _, prompt in self._pulled]
        found = best_gathering(
            lengths,
            len(self.executor.instances),
            costs,
            inference,
            self.limits.max_held,
            sum(prompts) / max(1, len(prompts)),
        )
        self._metrics["samples/migration_threshold"] = float(found.threshold)
        return found

    def _note(self, overlap: GenerationRound, samples: Sequence[Sample]) -> None:
        """Learn from a round, and keep its record."""
        self._spans += overlap.stages.spans
        self._metrics["samples/migrated"] += overlap.num_migrated
        self._metrics["samples/restarted"] += overlap.num_restarted
        by_prompt: dict[int, list[int]] = {}
        for sample in samples:
            if "log_probs" in sample.tensors and sample.scalars["finish"] != "abort":
                by_prompt.setdefault(sample.id.prompt, []).append(sample.response_tokens)
        self.knowledge.forecast.add([n for lengths in by_prompt.values() for n in lengths])
        for position, prompt in self._pulled:
            if position in by_prompt:
                self.knowledge.ranker.observe(self.knowledge.key_of(prompt), by_prompt[position])

    def _taken(self, dataflow: ReadyTracker, positions: Sequence[int]) -> Batch:
        """What has left makers and early stages; aborted samples leave the step."""
        batch = dataflow.take(positions)
        aborted = [
            s
            for s in self._ledger.samples
            if s.id.prompt in positions and s.scalars.get("finish") == "abort"
        ]
        self._whole(aborted)
        return batch
