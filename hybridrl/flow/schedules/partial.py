"""The partial schedule: more prompts than a step needs; what is unfinished goes on in the next.

APRIL, active partial rollouts ("APRIL: Active Partial Rollouts in Reinforcement Learning to Tame
Long-tail Generation").
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from hybridrl.flow.executor import Executor, Parked
from hybridrl.flow.graph import Graph, SourceStage, UpdateStage
from hybridrl.flow.migration import MigrationPlan
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.schedules.base import Batch, PendingSample, Prompt, StepSettings
from hybridrl.flow.schedules.fused import FusedSchedule, LengthModel
from hybridrl.flow.schedules.generation_round import GenerationTask, RoundLimits
from hybridrl.flow.schedules.readiness import ReadyTracker

ENDED = "unfinished when the run ended"


@dataclass(slots=True)
class _Open:
    """A prompt that is not trained on yet; `step` is the one in which its samples began."""

    prompt: Any
    step: int
    jobs: dict[SampleId, GenerationTask]


class PartialSchedule(FusedSchedule):
    """Trains on the groups that are complete first, and leaves the long ones for later steps.

    A step begins with `over_provision` times the prompts that it wants, those of earlier steps
    among them. It stops when as many groups are complete as are wanted, and parks the rest with
    their tokens; they go on in the next step under the new weights, so a response may have spans
    of several versions, each with the log-probabilities of the version that made it.

    `max_staleness` bounds the steps between a sample's first token and its training: a step stops
    only where all that stays open can still be trained in time, at so many groups a step
    (`over_provision` at most 1 + `max_staleness`). So no token is thrown away.

    Which groups a step trains on follows from decode steps, not from time: instances decode in
    equal rounds, and the oldest complete groups are taken. Rewards start as samples finish, forward
    passes when generation has stopped.

    Example, 2 wanted, over-provision 2, one sample a prompt: prompts 0 to 3 begin; 1 and 3 are done
    first and trained on; 0 and 2 go on with 4 and 5.

    Raises `ValueError` for a recipe that generates in several stages of a step, or whose ratio is
    taken against log-probabilities of a single version without weights that lead there from what
    sampled (`rollout_weights`: decoupled PPO).
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
        over_provision: float,
        max_staleness: int,
    ) -> None:
        check_partial(graph)
        assert 1 <= over_provision <= 1 + max_staleness
        self._open: dict[int, _Open] = {}
        self._wanted = self._version = 0
        self.over_provision, self.max_staleness = over_provision, max_staleness
        super().__init__(
            graph,
            executor,
            prompts,
            settings,
            limits=limits,
            knowledge=knowledge,
            migration_threshold=0,
        )

    def state_dict(self) -> dict[str, Any]:
        """With the prompts that are open, and their samples as far as they are."""
        return super().state_dict() | {
            "open": [
                {
                    "position": position,
                    "step": group.step,
                    "jobs": [_job_to_json(job) for job in group.jobs.values()],
                }
                for position, group in self._open.items()
            ]
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, prompt_at: Callable[[int], Any], num_ranks: int
    ) -> None:
        """Go on from there, with the open prompts' samples."""
        super().load_state_dict(state, prompt_at=prompt_at, num_ranks=num_ranks)
        records = [job for group in state["open"] for job in group["jobs"] if job["parked"]]
        ids = tuple(SampleId(*record["sample"]["id"]) for record in records)
        parked = Parked(ids, tuple(record["parked"] for record in records), -1, None)
        for group in state["open"]:
            position = group["position"]
            prompt, jobs = prompt_at(position), dict[SampleId, GenerationTask]()
            for record in group["jobs"]:
                stage = self.graph.stages[record["stage"]]
                assert isinstance(stage, SourceStage), stage
                sample = Sample.from_json(record["sample"])
                sample.rank = sample.rank % num_ranks if sample.rank >= 0 else -1
                predicted = (record["total"], record["tokens"])
                state_of = parked if record["parked"] else None
                sampling = self._sampling(stage)
                jobs[sample.id] = GenerationTask(
                    sample, stage, prompt, sampling, *predicted, state_of
                )
            self._open[position] = _Open(prompt, group["step"], jobs)
            self._expect(position, list(jobs.values()))

    def _expect(self, position: int, jobs: Sequence[GenerationTask]) -> None:
        """Have ledger and dataflow know an open prompt's samples, as when they were dispatched."""
        self._ledger.dispatch(job.sample for job in jobs)
        groups: dict[str, list[GenerationTask]] = {}
        for job in jobs:
            groups.setdefault(job.stage.name, []).append(job)
        for same in groups.values():
            dataflow = self._dataflow_of(same[0].stage)
            dataflow.expect(same[0].stage, [job.sample for job in same])
        dataflow.choose(position, self._ledger)

    def carried(self) -> tuple[PendingSample, ...]:
        """Of the open prompts' samples those that are parked, and those that are finished."""
        jobs = [job for group in self._open.values() for job in group.jobs.values()]
        return tuple(
            PendingSample(job.sample.id, job.prompt, job.sampling, job.sample.rank, _parked(job))
            for job in jobs
            if _parked(job) is not None or job.sample.rank >= 0
        )

    def restore_parked(self, state: Any) -> None:
        """Know where what is parked lies."""
        before = next(sample.parked for sample in self.carried() if sample.parked is not None)
        parked = replace(before, state=state)
        for group in self._open.values():
            for id, job in group.jobs.items():
                if _parked(job) is not None:
                    group.jobs[id] = replace(job, parked=parked)

    def close(self) -> dict[SampleId, str]:
        """End the run: what is unfinished is dropped."""
        dropped = dict.fromkeys(self._unfinished(), ENDED)
        for group in self._open.values():
            for job in group.jobs.values():
                job.sample.dropped = ENDED
        self._open.clear()
        self.release()
        return dropped

    def _unfinished(self) -> Collection[SampleId]:
        return {id for group in self._open.values() for id in group.jobs}

    def _begin(self, step: int) -> None:
        super()._begin(step)
        self._began: dict[int, int] = {}  # the step in which each trained prompt's samples began
        for name in ("resumed", "parked", "off_policy_tokens", "trained_tokens", "staleness"):
            self._metrics[f"samples/{name}"] = 0.0

    def _forget(self) -> None:
        dataflows = getattr(self, "_dataflows", {})
        for dataflow in dataflows.values():
            dataflow.forget({job.sample.id.prompt for job in self._made})
        self._dataflows, self._made = dataflows, []

    def _pull(self, num: int) -> Batch:
        """Prompts are pulled as they are needed; `num` groups are wanted."""
        self._wanted, self._pulled = num, []
        return {"prompts": []}

    def _gathering(self, dataflow: ReadyTracker, num_samples: int) -> MigrationPlan:
        return MigrationPlan(0, 0)

    def _make(self, makers: Sequence[SourceStage], batch: Batch) -> Batch:
        """Go on until enough groups are complete, park the rest, run the early stages."""
        dataflow = self._dataflow_of(makers[0])
        carried = [job for group in self._open.values() for job in group.jobs.values()]
        waiting = [job for job in carried if job.sample.rank < 0]
        fresh = self._top_up(makers, dataflow, batch)
        self._metrics["samples/resumed"] += sum(job.parked is not None for job in waiting)
        self._enter_for([*makers, *dataflow.computes])
        self._version = self.executor.version
        overlap = self._overlap(dataflow, len(waiting) + len(fresh))
        overlap.adopt([*carried, *self._made])
        self._submit(overlap, [*waiting, *fresh])
        overlap.run_until(lambda: self._enough(dataflow))
        stopped = overlap.park(with_kv=self.limits.stale_kv)
        self._metrics["samples/parked"] += sum(parked is not None for parked in stopped.values())
        overlap.run()
        for id, parked in stopped.items():
            open_jobs = self._open[id.prompt].jobs
            open_jobs[id] = self._put_by(open_jobs[id], parked)
        positions = self._complete(dataflow)[: self._wanted]
        assert not (waiting_for := dataflow.open_stages(positions)), f"{waiting_for} wait for ever"
        taken = {position: self._open.pop(position) for position in positions}
        self._pulled = [(position, group.prompt) for position, group in taken.items()]
        jobs = [job for group in taken.values() for job in group.jobs.values()]
        self._made += jobs
        self._note(overlap, [job.sample for job in jobs])
        self._began |= {position: group.step for position, group in taken.items()}
        return self._taken(dataflow, positions)

    def _put_by(self, job: GenerationTask, parked: Parked | None) -> GenerationTask:
        """A job as it goes on in the next step."""
        if parked is None:
            return replace(job, parked=None)
        made = parked.tokens[parked.ids.index(job.sample.id)]
        made -= len(self.knowledge.key_of(job.prompt).prompt_ids)
        return replace(job, parked=parked, tokens=max(1.0, job.total - made))

    def _top_up(
        self, makers: Sequence[SourceStage], dataflow: ReadyTracker, batch: Batch
    ) -> list[GenerationTask]:
        """Begin as many prompts as are missing; those that are open are the oldest."""
        num = math.ceil(self._wanted * self.over_provision) - len(self._open)
        pulled = list(islice(self.prompts, max(0, num)))
        if len(self._open) + len(pulled) < self._wanted:
            raise ValueError(
                f"the prompts have ended: got {len(self._open) + len(pulled)}, "
                f"wanted {self._wanted}"
            )
        fresh = [job for stage in makers for job in self._jobs(stage, dataflow, pulled, batch)]
        for position, prompt in pulled:
            mine = {job.sample.id: job for job in fresh if job.sample.id.prompt == position}
            self._open[position] = _Open(prompt, self._step, mine)
        return fresh

    def _complete(self, dataflow: ReadyTracker) -> list[int]:
        """Positions whose samples are all finished, the oldest first."""
        return [position for position in sorted(self._open) if dataflow.whole(position)]

    def _enough(self, dataflow: ReadyTracker) -> bool:
        """Enough groups are complete, and those that stay can be trained before they are too old.

        The oldest complete ones are trained now, `wanted` in every later step; so h steps from now
        at most h times as many may have reached their last step.
        """
        complete = self._complete(dataflow)
        lost = any(job.sample.rank < 0 for job in self._made)  # of an earlier round, by a death
        if lost or len(complete) < self._wanted:
            return False
        taken = {*complete[: self._wanted]}
        last = [g.step + self.max_staleness for p, g in self._open.items() if p not in taken]
        return all(
            sum(step <= self._step + later for step in last) <= self._wanted * later
            for later in range(self.max_staleness + 1)
        )

    def _summary(self, used: Sequence[Sample], num_dropped: int) -> dict[str, float]:
        """With the tokens of older weights among those trained, and the oldest sample's age."""
        spans = [span for sample in used for span in sample.spans if span.trained]
        made = [span for span in spans if span.version >= 0]  # not the dataset's own
        old = sum(s.stop - s.start for s in made if s.version < self._version)
        self._metrics["samples/off_policy_tokens"] = float(old)
        self._metrics["samples/trained_tokens"] = float(sum(s.stop - s.start for s in spans))
        ages = [self._step - self._began[sample.id.prompt] for sample in used]
        self._metrics["samples/staleness"] = float(max(ages, default=0))
        return super()._summary(used, num_dropped)


def _parked(job: GenerationTask) -> Parked | None:
    """What there is of a sample that has begun and is not finished."""
    return job.parked if job.sample.rank < 0 else None


def _job_to_json(job: GenerationTask) -> dict[str, Any]:
    """`parked` is the number of tokens, of prompt and response, that were parked, if they were."""
    parked = _parked(job)
    return {
        "sample": job.sample.to_json(),
        "stage": job.stage.name,
        "total": job.total,
        "tokens": job.tokens,
        "parked": None if parked is None else parked.tokens[parked.ids.index(job.sample.id)],
    }


def check_partial(graph: Graph) -> None:
    """Raise `ValueError`, with what is allowed, for a recipe whose samples cannot be parked."""
    updates = [stage for stage in graph.stages.values() if isinstance(stage, UpdateStage)]
    order = list(graph.stages)
    for stage in graph.stages.values():
        late = [u.name for u in updates if order.index(u.name) < order.index(stage.name)]
        if stage.makes_more:
            raise ValueError(
                f"a recipe that generates once a step (stage {stage.name!r} makes more samples of "
                "some prompts)"
            )
        if isinstance(stage, SourceStage) and late:
            raise ValueError(
                f"a recipe that generates before its first update (stage {stage.name!r} comes "
                f"after {late[0]!r})"
            )
    single = {
        field: stage.name
        for stage in graph.stages.values()
        if stage.role == "actor" and stage.method == "log_probs"
        for field in stage.outputs
    }
    for update in updates:
        if getattr(update.loss, "on_policy", False):
            raise ValueError(
                f"serial or fused: the loss of stage {update.name!r} has no ratio, so samples must "
                "be the present policy's"
            )
        field = update.fields.get("old_log_probs")
        if field in single and "rollout_weights" not in update.inputs:
            raise ValueError(
                "a recipe that takes old_log_probs as the rollout made them, or has a correction "
                "(recipe.old_log_probs=rollout, recipe.correction=truncate): tokens are of several "
                f"versions, and stage {single[field]!r} gives those of the present weights"
            )
