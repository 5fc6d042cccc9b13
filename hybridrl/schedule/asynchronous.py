"""The asynchronous schedule: ranks that generate are ahead of those that train, by a fixed number.

Periodic Asynchrony (arXiv 2511.18871) is `max_staleness=0`; StreamRL (2504.15930) and AsyncFlow's
deferred update (2507.01663) are `max_staleness=1`.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Phase
from hybridrl.flow.graph import Graph, Stage, TakeStage, UpdateStage
from hybridrl.flow.ledger import Drop
from hybridrl.flow.sample import NO_VERSION, Sample, SampleId
from hybridrl.schedule.base import Prompt
from hybridrl.schedule.groups import GenerationTask
from hybridrl.schedule.loop_schedule import (
    LoopSchedule,
    SchedulePolicy,
    check_generates_once,
)
from hybridrl.schedule.partial import ENDED
from hybridrl.schedule.readiness import early_updates
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.tail import NoTail
from hybridrl.schedule.tail.early import StreamedUpdate
from hybridrl.schedule.tail.pool_update import PoolUpdate

logger = logging.getLogger(__name__)

_METRICS = ("off_policy_tokens", "trained_tokens", "staleness")


@dataclass(kw_only=True, eq=False)
class Async(SchedulePolicy):
    """Step k trains batch k, whose tokens were all made by the weights after k - S steps.

    S is `max_staleness`, and a batch is as many prompts as a step trains on, in their order. The
    first S batches are made by the weights before any step. Training and generation have ranks of
    their own: while step k trains, instances make batch k + S. So which weights made a token
    follows from its prompt's position, never from time, and with S = 0 the batch is that of
    `serial`.

    An instance takes new weights (`LoadWeights`) when it has no unfinished sample of an earlier
    batch. A batch of which no step comes, since the run has `num_steps`, does not begin.

    Stages of the samples' ranks and of the driver (verifiers, `map`) start as samples finish.
    Passes of models wait for the step that trains the samples, so values and the actor's own
    log-probabilities are of the weights that it begins with.

    Example, S = 1: step 0 begins batches 0 and 1, by v_0. It trains batch 0 to v_1 as soon as this
    is there. Step 1 begins batch 2, by v_1, and trains batch 1.
    """

    max_staleness: int
    early: EarlySettings
    num_training: int = 1
    """Ranks that train: they begin on groups that are a micro-batch for each of them."""
    num_steps: int | None = None
    keeps = lasts = True
    _updates: dict[str, UpdateStage | None] = field(default_factory=dict)
    """The update of each section that may begin early."""
    _batches: dict[int, list[int]] = field(default_factory=dict)
    """The prompts of each batch that has begun and is not trained."""
    _versions: dict[int, int] = field(default_factory=dict)
    """What the trainer calls the weights after so many steps."""
    _pushing: deque[int] = field(default_factory=deque)
    """The steps behind the weights that are on their way, oldest first."""
    _restored: list[int] = field(default_factory=list)
    """Prompts of a checkpoint, on whose finished samples stages have still to start."""
    _wanted: int = 0
    _continued_at: int = 0
    """Steps behind the weights that the run began with, or continued with."""
    _staleness: int = 0
    """The staleness of the batch that the present step trains."""

    @classmethod
    def check_graph(cls, graph: Graph) -> None:
        """Raise `ValueError`, with what is allowed, for a recipe that it cannot run."""
        check_generates_once(graph)
        if not graph.generates:
            raise ValueError("serial: the recipe generates nothing")
        if any(isinstance(stage, TakeStage) for stage in graph.stages.values()):
            raise ValueError("serial: a take may ask for another round of prompts")

    def bind(self, schedule: LoopSchedule) -> None:
        """Belong to a schedule; find the update that may begin before its batch is there."""
        super().bind(schedule)
        updates = early_updates(schedule.graph, schedule.executor, self.early)
        self._updates = {name: update.stage for name, update in updates.items()}
        for update in updates.values():
            if update.stage is None:
                logger.info("groups are trained when all are there: %s", update.reason)

    # -- between steps -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The open prompts and their samples, and the weights that make them."""
        return {
            "open": self.schedule.groups.to_json(),
            "batches": {str(batch): positions for batch, positions in self._batches.items()},
            "versions": {str(steps): version for steps, version in self._versions.items()},
        }

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue with the open prompts' samples; a checkpoint of `serial` has none."""
        self.schedule.load_open(state.get("open", []), prompt_at, ranks)
        self._batches = {int(b): list(p) for b, p in state.get("batches", {}).items()}
        # The newest weights are pushed again; only older ones are in the checkpoint.
        self._continued_at = self._batch
        versions = {int(steps): version for steps, version in state.get("versions", {}).items()}
        self._versions = {s: v for s, v in versions.items() if s < self._batch}
        for batch in self._batches:
            self._set_version(batch)
        self._restored = [*self.schedule.groups.open]

    def close(self) -> dict[SampleId, Drop]:
        """The open prompts' samples are dropped."""
        return self.schedule.groups.drop_open(ENDED)

    # -- a step --------------------------------------------------------------------------------

    def _steps_behind(self, batch: int) -> int:
        """Steps of training behind the weights that make a batch.

        A run that is longer than its checkpoint knew has no older weights than it continues with.
        """
        steps = max(0, batch - self.max_staleness)
        return steps if steps in self._versions else max(steps, self._continued_at)

    def _set_version(self, batch: int) -> None:
        """Let the prompts of a batch begin, if its weights are there."""
        for position in self._batches[batch]:
            group = self.schedule.groups[position]
            group.version, group.batch = self._versions.get(self._steps_behind(batch)), batch

    @property
    def _batch(self) -> int:
        """The batch of the present step."""
        return self.schedule.steps_done

    def begin_step(self) -> None:
        """No count yet."""
        self.schedule.metrics |= {f"samples/{name}": 0.0 for name in _METRICS}
        if any(self._updates.values()):
            self.schedule.metrics["samples/trained_early"] = 0.0

    def pull(self, num: int) -> list[Prompt]:
        """Prompts are pulled when their batch may begin; a batch has `num`."""
        self._wanted = num
        return []

    def enter(self, phases: set[Phase | None]) -> None:
        """Instances take weights one by one; the first are pushed here."""
        if not self.schedule.loop.has_begun:
            self._push(self._batch)

    def begin(self) -> list[GenerationTask]:
        """All batches begin that the weights of this step may make, and that have a step."""
        schedule, tasks = self.schedule, list[GenerationTask]()
        unfinished = [
            task
            for task in schedule.groups.tasks
            if not schedule.groups.ledger.is_finished(task.sample.id)
        ]
        if not schedule.loop.has_begun:  # the run continues here
            tasks += unfinished
        last = self._batch + self.max_staleness
        if self.num_steps is not None:
            last = min(last, self.num_steps - 1)
        for batch in range(self._batch, last + 1):
            if batch not in self._batches:
                pulled = schedule.next_prompts(self._wanted)
                tasks += schedule.begin(pulled)
                self._batches[batch] = [position for position, _ in pulled]
                self._set_version(batch)
        return tasks

    def _push(self, steps: int) -> None:
        """Have the present weights pushed, which are those after so many steps."""
        self._pushing.append(steps)
        self.schedule.executor.push_weights()

    @property
    def waits_for_push(self) -> bool:  # type: ignore[override]
        """Whether weights are on their way to where instances may load them."""
        return bool(self._pushing)

    def pushed(self, version: int) -> None:
        """Weights can be loaded: the batches that they make begin."""
        steps = self._pushing.popleft()
        self._versions[steps] = version
        for batch in self._batches:
            self._set_version(batch)

    def of_step(self, position: int) -> bool:
        """Whether the present step trains on a prompt."""
        return position in self._batches.get(self._batch, ())

    def compares_early(self, section: Sequence[Stage]) -> bool:
        """Whether groups are trained before the batch is there."""
        return self._updates.get(section[0].name) is not None

    def tail(self, stages: StreamedStages, tasks: Sequence[GenerationTask]) -> tuple[NoTail, bool]:
        """Groups of the step are trained as they come, where recipe and settings allow it."""
        schedule = self.schedule
        section = next(s for s in schedule.sections if schedule.stages_of(s[0]) is stages)
        update = self._updates.get(section[0].name)
        if update is None or schedule.steps_done < update.after:
            return NoTail(), True
        limits = schedule.limits
        streamed = StreamedUpdate(update, stages, limits.chunk_tokens, 0.0)
        return PoolUpdate(streamed, limits.chunk_tokens * self.num_training, self.of_step), True

    def make(self, tasks: Sequence[GenerationTask]) -> None:
        """Let samples be made until the step's batch is there; others go on."""
        schedule, positions = self.schedule, self._batches[self._batch]
        tracker = schedule.loop.stages.tracker
        schedule.loop.make(tasks)
        schedule.loop.tail.touched(positions)

        def is_there() -> bool:
            if schedule.loop.tail.is_training:
                return False
            complete = all(map(schedule.groups.is_complete, positions))
            return complete and not tracker.open_stages(positions)

        restored, self._restored = self._restored, []
        schedule.loop.run_on(is_there, restored)

    def take(self) -> list[int]:
        """The step's batch is trained on."""
        self._staleness = self._batch - self._steps_behind(self._batch)
        return self._batches[self._batch]

    def step_ended(self) -> None:
        """The new weights go to whoever will take them; older ones stay that batches need.

        The push of the step before has ended by then: a checkpoint knows all versions but the
        newest, which a run that continues pushes again.
        """
        self.schedule.loop.run_on(lambda: not self._pushing)
        del self._batches[self._batch]
        after = self._batch + 1
        needed = {
            self._steps_behind(batch) for batch in (*self._batches, after + self.max_staleness)
        }
        self._versions = {s: version for s, version in self._versions.items() if s in needed}
        self.schedule.executor.keep_versions([*self._versions.values()])
        self._push(after)

    def metrics(self, used: Sequence[Sample]) -> dict[str, float]:
        """Count the tokens of older weights among those trained, and the staleness in steps."""
        spans = [span for sample in used for span in sample.spans if span.trained]
        stale = self._staleness
        generated = sum(span.stop - span.start for span in spans if span.version != NO_VERSION)
        return {
            "samples/off_policy_tokens": float(generated if stale else 0),
            "samples/trained_tokens": float(sum(span.stop - span.start for span in spans)),
            "samples/staleness": float(stale),
        }
