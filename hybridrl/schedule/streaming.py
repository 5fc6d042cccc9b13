"""The common base of schedules whose per-sample stages overlap generation."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from hybridrl.flow.executor import Executor, Phase, Sampling
from hybridrl.flow.graph import GenerateStage, Graph, SourceStage, Stage, UpdateStage
from hybridrl.flow.ledger import phase_of, sampling_of, sections, with_updates_together
from hybridrl.flow.lengths import LengthModel
from hybridrl.flow.sample import Sample
from hybridrl.schedule.base import Batch, Prompt, Schedule, StepSettings
from hybridrl.schedule.generation_task import GenerationTask, RoundLimits
from hybridrl.schedule.groups import BegunPrompts
from hybridrl.schedule.loop import Loop
from hybridrl.schedule.readiness import ReadyTracker, early_stages
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.tail import NoTail


class StreamingSchedule(Schedule):
    """Runs each section of a graph as a generation round, then its other stages.

    Stages of a section that make samples run together; samples go to instances by predicted length.
    A stage that needs no training shards starts on a sample, a filter or join on a prompt, when its
    fields are there. Stages across the batch, updates, and stages that need the training shards run
    afterwards, in the recipe's order. A subclass says which prompts a round begins and when it
    ends.
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
    ) -> None:
        super().__init__(graph, executor, prompts, settings)
        self.limits, self.length_model = limits, length_model
        self._sections: dict[str, StreamedStages] = {}  # by their first stage
        self._groups = BegunPrompts(graph, self._ledger, self._turns)
        self._loop = Loop(executor, self._groups, self.meter, limits, settings.decode_steps)

    def state_dict(self) -> dict[str, Any]:
        """With the lengths learned."""
        model = self.length_model
        learned = {
            "ranker": model.ranker.state_dict(),
            "forecast": model.forecast.state_dict(),
            "longest_of_prompt": model.longest_of_prompt.state_dict(),
            "turns_of_prompt": model.turns_of_prompt.state_dict(),
        }
        return super().state_dict() | learned

    def load_state_dict(
        self, state: Mapping[str, Any], *, prompt_at: Callable[[int], Any], num_ranks: int
    ) -> None:
        """Continue from a `state_dict`; another schedule may have learned nothing of lengths."""
        super().load_state_dict(state, prompt_at=prompt_at, num_ranks=num_ranks)
        if "ranker" in state:
            self.length_model.ranker.load_state_dict(state["ranker"])
            self.length_model.forecast.load_state_dict(state["forecast"])
        if "longest_of_prompt" in state:
            self.length_model.longest_of_prompt.load_state_dict(state["longest_of_prompt"])
        if "turns_of_prompt" in state:
            self.length_model.turns_of_prompt.load_state_dict(state["turns_of_prompt"])

    def _begin_step(self, step: int) -> None:
        super()._begin_step(step)
        self._metrics |= {"samples/migrated": 0.0, "samples/restarted": 0.0}
        if self.executor.wide:
            self._metrics |= {"samples/widened": 0.0, "samples/moved_kv_bytes": 0.0}

    def _run_stages(self, stages: Sequence[Stage], batch: Batch) -> None:
        for section in sections(stages):
            makers = [stage for stage in section if isinstance(stage, SourceStage)]
            if makers:
                streamed = self._run_round(makers, batch)
                batch |= {s.name: streamed[s.name] for s in section if s.name in streamed}
            left = [stage for stage in section if stage.name not in batch]
            for stage in with_updates_together(left):
                if isinstance(stage, list):
                    self._update(stage, batch)
                else:
                    self._run(stage, batch)

    @abstractmethod
    def _run_round(self, makers: Sequence[SourceStage], batch: Batch) -> Batch:
        """Make samples and run the early stages; gives those that have left these stages."""

    # -- parts of a round ----------------------------------------------------------------------

    def _stages_of(self, maker: Stage) -> StreamedStages:
        """The early stages of a maker's section; one for the run."""
        section = next(section for section in sections(self._order) if maker in section)
        first = section[0].name
        if first not in self._sections:
            makers = [stage for stage in section if isinstance(stage, SourceStage)]
            early = self._early_stages(section)
            tracker = ReadyTracker(self.graph, makers, early, self._groups)
            chunk_tokens = self.limits.chunk_tokens
            stages = StreamedStages(self.executor, tracker, self.meter, chunk_tokens)
            self._sections[first] = stages
        return self._sections[first]

    def _early_stages(self, section: Sequence[Stage]) -> list[Stage]:
        """The stages of a section that run prompt by prompt."""
        return early_stages(self.graph, section, self.executor)

    def _enter_for(self, stages: Sequence[Stage]) -> None:
        phases = {phase_of(stage, self._scope(stage)) for stage in stages}
        if Phase.GENERATE in phases:
            self._enter(Phase.GENERATE)

    def _new_tasks(
        self, stage: SourceStage, pulled: Sequence[Prompt], batch: Batch
    ) -> list[GenerationTask]:
        """Dispatch the samples of a maker for `pulled` prompts."""
        sampling = self._sampling(stage)
        key_of, ranker = self.length_model.key_of, self.length_model.ranker
        dispatched = self._begin_samples(stage, pulled, batch)
        predicted = [0.0] * len(dispatched)
        if sampling is not None:
            most = float(sampling.max_new_tokens)
            lengths = ranker.predict([key_of(prompt) for (_, prompt), _ in dispatched])
            predicted = [min(tokens, most) for tokens in lengths]
        tasks = []
        for ((_, prompt), group), tokens in zip(dispatched, predicted, strict=True):
            tasks += [
                GenerationTask(sample, stage, prompt, sampling, tokens, tokens) for sample in group
            ]
        self._groups.begin(pulled, self._step, tasks)
        return tasks

    def _sampling(self, stage: SourceStage) -> Sampling | None:
        """A maker's sampling; None where it places the dataset's own answers."""
        if not isinstance(stage, GenerateStage):
            return None
        return sampling_of(stage, self.settings.sampling)

    def _begin_round(
        self,
        stages: StreamedStages,
        tail: NoTail,
        may_start: Callable[[int], bool] = lambda prompt: True,
        overlaps: bool = True,
    ) -> None:
        """The loop begins a round; see `StreamedStages` for `overlaps`."""
        stages.begin(overlaps)
        turns = self.length_model.turns_of_prompt.sample(len(self._pulled))
        self._turns.expected = sum(turns) / len(turns) if turns else 0.0
        self._loop.begin(stages, tail, may_start)

    def _end_round(self, tasks: Sequence[GenerationTask], positions: Sequence[int]) -> Batch:
        """Learn from a round and record it; gives the samples that have left its stages.

        `tasks` are those of the prompts at `positions`.
        """
        tracker = self._loop.stages.tracker
        waiting = tracker.open_stages(positions)
        assert not waiting, f"{waiting} still wait"
        self._groups.take(positions)
        self._record_round()
        self._learn_lengths([task.sample for task in tasks])
        return self._streamed(tracker, positions)

    def _record_round(self) -> None:
        loop, tail = self._loop, self._loop.tail
        self._spans += [*loop.stages.spans, *tail.spans]
        self._metrics["samples/migrated"] += tail.num_migrated
        self._metrics["samples/restarted"] += loop.num_restarted
        if self.executor.wide:
            self._metrics["samples/widened"] += tail.num_widened
            self._metrics["samples/moved_kv_bytes"] += loop.kv_bytes
        if "samples/trained_early" in self._metrics:
            self._metrics["samples/trained_early"] += tail.num_trained
            self._early_train_s += tail.train_seconds / len(self.executor.instances)

    def _learn_lengths(self, samples: Sequence[Sample]) -> None:
        by_prompt: dict[int, list[tuple[int, float]]] = {}  # tokens, seconds of waits
        turns: dict[int, int] = {}
        for sample in samples:
            if "log_probs" in sample.tensors and sample.scalars["finish"] != "abort":
                position = sample.id.prompt
                lasted = sample.model_tokens, self._turns.waited(sample.id)
                by_prompt.setdefault(position, []).append(lasted)
                if "num_turns" in sample.scalars:
                    turns[position] = max(turns.get(position, 0), int(sample.number("num_turns")))
        model, every = self.length_model, [*chain(*by_prompt.values())]
        end_of = self._end_of(every)
        last = [max(samples, key=end_of) for samples in by_prompt.values()]
        for forecast, of in ((model.forecast, every), (model.longest_of_prompt, last)):
            in_order = sorted(of, key=end_of)
            forecast.add([tokens for tokens, _ in in_order], [wait for _, wait in in_order])
        model.turns_of_prompt.add([*turns.values()])
        for position, prompt in self._pulled:
            if position in by_prompt:
                lengths = [tokens for tokens, _ in by_prompt[position]]
                model.ranker.observe(model.key_of(prompt), lengths)

    def _end_of(
        self, samples: Sequence[tuple[int, float]]
    ) -> Callable[[tuple[int, float]], tuple[float, int]]:
        """When such a sample ends, by its tokens and seconds of waits, to compare it with others.

        Without waits costs are not asked for.
        """
        costs = self.meter.costs() if any(wait for _, wait in samples) else None
        token_s = 0.0 if costs is None else float(costs.pace(1))
        return lambda sample: (sample[1] + token_s * sample[0], sample[0])

    def _streamed(self, tracker: ReadyTracker, positions: Sequence[int]) -> Batch:
        """The samples that have left makers and early stages; aborted ones leave the step."""
        batch = tracker.take(positions)
        aborted = [
            sample
            for sample in self._ledger.samples
            if sample.id.prompt in positions and sample.scalars.get("finish") == "abort"
        ]
        self._whole(aborted)
        return batch


def check_generates_once(graph: Graph) -> None:
    """Raise `ValueError` for a recipe whose prompts have samples of several rounds of a step."""
    updates: list[str] = []
    for stage in graph.stages.values():
        if stage.makes_more:
            raise ValueError(
                f"a recipe that generates once a step (stage {stage.name!r} makes more samples of "
                "some prompts)"
            )
        if isinstance(stage, SourceStage) and updates:
            raise ValueError(
                f"a recipe that generates before its first update (stage {stage.name!r} comes "
                f"after {updates[0]!r})"
            )
        if isinstance(stage, UpdateStage):
            updates.append(stage.name)
