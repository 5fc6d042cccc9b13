"""The serial schedule: every stage waits for the whole batch (HybridFlow, arXiv 2409.19256).

It is the specification: the batch that it trains on is what every on-policy schedule must train on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from hybridrl.flow.barriers import run_barrier
from hybridrl.flow.batch import (
    Ledger,
    before_take,
    generation_first,
    groups,
    new_samples,
    phase_of,
    ready,
    record_computed,
    record_finished,
    sampling_of,
)
from hybridrl.flow.executor import (
    Advanced,
    Computed,
    Event,
    Executor,
    Phase,
    Placed,
    Sampling,
    Submit,
)
from hybridrl.flow.graph import Graph, Kind, Stage
from hybridrl.flow.sample import Sample
from hybridrl.flow.schedules import StageSpan, StepResult

Prompt = tuple[int, Any]  # position in the run's prompt stream, and what schedules do not look into
Batch = dict[str, list[Sample]]  # the samples that have left each stage, in training order


class SerialSchedule:
    """Runs a graph stage by stage.

    A step: pull prompts; make all samples; run every further stage on the whole batch, in the
    recipe's order; update. With a `take` in the graph, what lies before it runs in rounds of
    prompts until it has enough groups, the rest once.

    Invariants: samples are trained in the stream's order, whatever the order in which they
    finished; prompts are dealt to instances by position in the step, all samples of a prompt to
    one; every dispatched sample is used or dropped, and the ranks keep it until `release`.

    `prompts` gives positions (growing over the run) and prompts; the sampling settings hold where a
    stage does not say otherwise; `decode_steps` bound one call of an instance.
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
    ) -> None:
        graph.check()
        self.graph, self.executor, self.prompts = graph, executor, prompts
        self.sampling = sampling
        self.decode_steps, self.prompts_per_step = decode_steps, prompts_per_step
        self._order = generation_first(list(graph.stages.values()))
        self._take, self._in_rounds = before_take(graph)
        self._ledger = Ledger()
        self._begin()

    def run_step(self, step: int) -> StepResult:
        """One iteration. `step` is for the record. Its samples stay on the ranks until `release`.

        Raises `ValueError` when the prompts end, when `take` does not get enough groups, and when a
        recipe's function returns what does not fit.
        """
        self.release()
        self._begin()
        batch = self._run_rounds() if self._take else self._pull(self.prompts_per_step)
        for stage in self._order:
            if stage.name not in batch:
                self._run(stage, batch)
        used, dropped = self._ledger.settle()
        return StepResult(
            step,
            tuple(used),
            self._ledger.samples,
            dropped,
            self._summary(used, len(dropped)),
            tuple(self._spans),
        )

    def release(self) -> None:
        """Let the ranks forget the last step's samples; the next step does it by itself."""
        if self._ledger.ids:
            self.executor.release(self._ledger.ids)
        self._ledger = Ledger()

    # -- prompts and rounds --------------------------------------------------------------------

    def _begin(self) -> None:
        self._spans: list[StageSpan] = []
        self._metrics: dict[str, float] = {}
        self._phase: Phase | None = None
        self._pulled: list[Prompt] = []

    def _pull(self, num: int) -> Batch:
        """The next prompts; a round's batch begins with none but them."""
        self._pulled = list(islice(self.prompts, num))
        if len(self._pulled) < num:
            raise ValueError(f"the prompts have ended: got {len(self._pulled)}, wanted {num}")
        return {"prompts": []}

    def _run_rounds(self) -> Batch:
        """Pull and run rounds of prompts until the take has its groups; then merge the rounds."""
        take = self._take
        assert take is not None
        options = take.options
        wanted = options["num_groups"] or self.prompts_per_step
        num_prompts = options["round_prompts"] or self.prompts_per_step
        merged: Batch = {}
        all_pulled: list[Prompt] = []
        passed: list[list[Sample]] = []
        for _ in range(options["max_rounds"]):
            batch = self._pull(num_prompts)
            all_pulled += self._pulled
            for stage in self._order:
                if stage.name in self._in_rounds and stage.name not in batch:
                    self._run(stage, batch)
            for name, samples in batch.items():
                merged.setdefault(name, []).extend(samples)
            passed = groups(merged[take.upstream[0]])
            if len(passed) >= wanted:
                break
        else:
            raise ValueError(
                f"take {take.name!r}: got {len(passed)} groups out of {len(all_pulled)} prompts in "
                f"max_rounds={options['max_rounds']} rounds, wanted {wanted}; raise max_rounds or "
                "round_prompts, or loosen the filter before it"
            )
        for group in passed[wanted:]:
            self._ledger.leave(group, f"take: past the first {wanted} groups of {take.name}")
        merged[take.name] = [sample for group in passed[:wanted] for sample in group]
        self._pulled = all_pulled
        return merged

    # -- stages --------------------------------------------------------------------------------

    def _run(self, stage: Stage, batch: Batch) -> None:
        """Run one stage on everything that has left its upstream."""
        upstream, *others = (batch[name] for name in stage.upstream)
        phase = phase_of(stage)
        # A stage without samples is left out, so that a step whose groups are all filtered away
        # neither switches weights nor takes an optimizer step.
        works = bool(upstream) or stage.kind in (Kind.GENERATE, Kind.ANSWERS)
        if works and phase and phase is not self._phase:
            with self._span(f"to_{phase.value}"):
                self.executor.enter(phase)
            self._phase = phase
        with self._span(stage.name):
            batch[stage.name] = upstream
            match stage.kind:
                case Kind.GENERATE:
                    batch[stage.name] = self._generate(stage)
                case Kind.ANSWERS:
                    batch[stage.name] = self._place(stage)
                case Kind.COMPUTE:
                    self._compute(stage, upstream)
                case Kind.UPDATE:
                    self._update(stage, upstream)
                case Kind.COLLECT:
                    self._ledger.use(upstream)
                case _:
                    batch[stage.name] = run_barrier(
                        stage, upstream, others[0] if others else [], self._ledger
                    )

    def _generate(self, stage: Stage) -> list[Sample]:
        """Submit every group to its instance, then let the instances run until all is finished."""
        sampling = sampling_of(stage, self.sampling)
        made = new_samples(stage, (position for position, _ in self._pulled))
        samples = {sample.id: sample for group in made for sample in group}
        self._ledger.dispatch(samples.values())
        commands: dict[int, list[Submit]] = {}
        for i, (group, (_, prompt)) in enumerate(zip(made, self._pulled, strict=True)):
            submit = Submit(tuple(sample.id for sample in group), prompt, sampling)
            commands.setdefault(i % self.executor.num_instances, []).append(submit)
        for instance, submits in commands.items():
            self.executor.advance(instance, submits, self.decode_steps)
        running = set(commands)
        while running:
            for event in self._wait():
                assert isinstance(event, Advanced), event
                for finished in event.finished:
                    record_finished(stage, samples[finished.id], finished)
                if event.running:
                    self.executor.advance(event.instance, (), self.decode_steps)
                else:
                    running.remove(event.instance)
        lost = [str(sample.id) for sample in samples.values() if sample.rank < 0]
        assert not lost, f"instances stopped without finishing {lost}"
        return list(samples.values())

    def _place(self, stage: Stage) -> list[Sample]:
        """Make the dataset's targets samples."""
        made = new_samples(stage, (position for position, _ in self._pulled))
        samples = {sample.id: sample for (sample,) in made}
        self._ledger.dispatch(samples.values())
        self.executor.place(stage, tuple(samples), [prompt for _, prompt in self._pulled])
        waiting = set(samples)
        while waiting:
            for event in self._wait():
                assert isinstance(event, Placed), event
                for finished in event.finished:
                    record_finished(stage, samples[finished.id], finished)
                    waiting.remove(finished.id)
        return list(samples.values())

    def _compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        """Run a per-sample stage where the samples lie."""
        if not samples:
            return
        assert all(ready(stage, sample) for sample in samples), stage
        by_id = {sample.id: sample for sample in samples}
        self.executor.compute(stage, samples)
        waiting = set(by_id)
        while waiting:
            for event in self._wait():
                assert isinstance(event, Computed), event
                record_computed(stage, by_id, event)
                waiting.difference_update(event.ids)

    def _update(self, stage: Stage, samples: Sequence[Sample]) -> None:
        if not samples:
            return
        assert all(ready(stage, sample) for sample in samples), stage
        self._ledger.use(samples)
        for name, value in self.executor.update(stage, samples).items():
            self._metrics[f"{stage.role}/{name}"] = value

    def _wait(self) -> list[Event]:
        """Events that tell something: a rank that took part without samples answers emptily."""
        return [e for e in self.executor.wait() if not isinstance(e, Computed) or e.ids]

    # -- the record ----------------------------------------------------------------------------

    @contextmanager
    def _span(self, name: str) -> Iterator[None]:
        start = self.executor.clock.now()
        yield
        self._spans.append(StageSpan(name, start, self.executor.clock.now()))

    def _summary(self, used: Sequence[Sample], num_dropped: int) -> dict[str, float]:
        summary = {
            **self._metrics,
            "samples/used": float(len(used)),
            "samples/dropped": float(num_dropped),
            "samples/prompts": float(len(self._pulled)),
            "samples/tokens": float(sum(sample.tokens for sample in used)),
        }
        return summary | {f"state/{name}": value for name, value in self.graph.states.items()}
