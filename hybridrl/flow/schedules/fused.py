"""The fused schedule: per-sample stages overlap generation, and its long tail is gathered.

RLHFuse, inter-stage fusion (arXiv 2409.13221, section 4).
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from hybridrl.flow.batch import phase_of, sampling_of
from hybridrl.flow.executor import Executor, Phase, Sampling, Submit
from hybridrl.flow.graph import Graph, Kind, Stage
from hybridrl.flow.schedules.base import Batch, Prompt, Schedule
from hybridrl.flow.schedules.overlap import Overlap

_MAKERS = (Kind.GENERATE, Kind.ANSWERS)
_SAME_SAMPLES = (Kind.COMPUTE, Kind.BY_GROUP, Kind.BY_BATCH)  # what comes in goes out


class FusedSchedule(Schedule):
    """Trains on the same batch as `SerialSchedule`, sooner.

    Stages that make samples run together, and a per-sample stage that needs no other phase starts
    on a sample when the fields that it reads are there. What is across samples, changes the weights
    or needs the training shards runs afterwards, in the recipe's order.

    When at most `migration_threshold` samples are unfinished, they are gathered on the fewest
    instances that hold them, of which each takes up to `max_held`, and the others are free for
    waiting work. Threshold 0 leaves every sample where it is.
    """

    def __init__(
        self,
        graph: Graph,
        executor: Executor,
        prompts: Iterator[Prompt],
        *,
        sampling: Sampling,
        decode_steps: int,
        prompts_per_step: int,
        migration_threshold: int,
        max_held: int,
    ) -> None:
        super().__init__(
            graph,
            executor,
            prompts,
            sampling=sampling,
            decode_steps=decode_steps,
            prompts_per_step=prompts_per_step,
        )
        self.migration_threshold, self.max_held = migration_threshold, max_held

    def _begin(self) -> None:
        super()._begin()
        self._metrics["samples/migrated"] = 0.0

    def _run_stages(self, stages: Sequence[Stage], batch: Batch) -> None:
        todo = list(stages)
        while todo:
            # Nothing moves across an update, since it changes the weights.
            until_update = list(takewhile(lambda stage: stage.kind is not Kind.UPDATE, todo))
            early = early_stages(self.graph, until_update)
            self._make([s for s in until_update if s.kind in _MAKERS], early, batch)
            for stage in todo[: len(until_update) + 1]:
                if stage in early:
                    batch[stage.name] = batch[stage.upstream[0]]
                elif stage.name not in batch:
                    self._run(stage, batch)
            del todo[: len(until_update) + 1]

    def _make(self, makers: Sequence[Stage], early: Sequence[Stage], batch: Batch) -> None:
        """Make all samples and run the early stages on them."""
        if any(stage.kind is Kind.GENERATE for stage in makers):
            self._enter(Phase.GENERATE)
        overlap = Overlap(
            self.executor, self.decode_steps, early, self.migration_threshold, self.max_held
        )
        prompts: list[Any] = [prompt for _, prompt in self._pulled]
        for stage in makers:
            made = self._begin_samples(stage)
            batch[stage.name] = [sample for group in made for sample in group]
            follow = [s for s in early if _maker(self.graph, s) is stage]
            overlap.expect(stage, batch[stage.name], follow)
            if stage.kind is Kind.ANSWERS:
                self.executor.place(stage, [sample.id for sample in batch[stage.name]], prompts)
                continue
            sampling = sampling_of(stage, self.sampling)
            for i, (group, prompt) in enumerate(zip(made, prompts, strict=True)):
                submit = Submit(tuple(sample.id for sample in group), prompt, sampling)
                overlap.submit(i % self.executor.num_instances, submit)
        overlap.run()
        self._spans += overlap.spans
        self._metrics["samples/migrated"] += overlap.num_migrated


def early_stages(graph: Graph, stages: Sequence[Stage]) -> list[Stage]:
    """The per-sample stages among `stages` that can run while samples are being made.

    They need no phase of their own, read only what a maker among `stages` and other early stages
    give, and see every sample of that maker: no filter, take or join lies between.

    Example: of generate, score, reference log-probabilities, map over the rollout's, map over both,
    by_group, update, these are score and the first map.
    """
    early: list[Stage] = []
    for stage in stages:
        if stage.kind is not Kind.COMPUTE or phase_of(stage) is not None:
            continue
        maker = _maker(graph, stage)
        if maker is None or maker not in stages:
            continue
        before = [maker, *(other for other in early if _maker(graph, other) is maker)]
        if set(stage.inputs) <= {name for other in before for name in other.outputs}:
            early.append(stage)
    return early


def _maker(graph: Graph, stage: Stage) -> Stage | None:
    """The stage that made exactly the samples that come to `stage`; None if some were lost."""
    while stage.kind in _SAME_SAMPLES:
        stage = graph.stages[stage.upstream[0]]
    return stage if stage.kind in _MAKERS else None
