"""The asynchronous schedule: ranks that generate are ahead of those that train, by a fixed number.

Periodic Asynchrony (arXiv 2511.18871) is `max_staleness=0`; StreamRL (2504.15930) and AsyncFlow's
deferred update (2507.01663) are `max_staleness=1`.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Phase
from hybridrl.flow.graph import Graph, Stage, UpdateStage
from hybridrl.flow.ledger import Drop
from hybridrl.flow.sample import NO_VERSION, Sample, SampleId
from hybridrl.flow.turns import RecordDiffers
from hybridrl.flow.versions import failures_of, segments_of
from hybridrl.schedule.base import Prompt
from hybridrl.schedule.dealing import Dealer, Dealt
from hybridrl.schedule.following import Followed, no_longer_there
from hybridrl.schedule.groups import GenerationTask, GroupStatus, tasks_of
from hybridrl.schedule.instances import Instance
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

_METRICS = ("off_policy_tokens", "trained_tokens", "staleness", "mean_staleness")


@dataclass(kw_only=True, eq=False)
class Async(SchedulePolicy):
    """Step k trains batch k, whose tokens were all made by the weights after k - S steps.

    S is `max_staleness`, and a batch is as many prompts as a step trains on, in their order. The
    first S batches are made by the weights before any step. Training and generation have ranks of
    their own: while step k trains, instances make batch k + S. So which weights made a token
    follows from its prompt's position, never from time, and with S = 0 the batch is that of
    `serial`.

    An instance takes new weights (`LoadWeights`) when it has no unfinished sample of an earlier
    batch. With `in_flight` it takes them at its next call, under its unfinished samples (AReaL,
    arXiv 2505.24298; PipelineRL, 2509.19128). Batch k then begins on the weights after k - S steps
    or more, and so does each later token: no token of step k is older. A batch of which no step
    comes, since the run has `num_steps`, does not begin.

    With `follows` the record says which weights make each token, and not `in_flight`.

    Stages of the samples' ranks and of the driver (verifiers, `map`) start as samples finish.
    Passes of models wait for the step that trains the samples, so values and the actor's own
    log-probabilities are of the weights that it begins with.

    Example, S = 1: step 0 begins batches 0 and 1, by v_0. It trains batch 0 to v_1 as soon as this
    is there. Step 1 begins batch 2, by v_1, and trains batch 1.
    """

    max_staleness: int
    early: EarlySettings
    in_flight: bool = False
    follows: Followed | None = None
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
    _gone: Collection[int] = ()
    """The steps behind weights that have made tokens, and are not in the checkpoint."""
    _wanted: int = 0
    _continued_at: int = 0
    """Steps behind the weights that the run began with, or continued with."""
    _num_tokens_before: int = 0
    """Tokens that instances had made before the present step."""
    _has_compared: bool = False
    """Whether the engines' log-probabilities have been compared in the present step."""
    _ages: dict[int, int] = field(default_factory=dict)
    """The staleness in the present step of what a version has made."""

    @classmethod
    def check_graph(cls, graph: Graph) -> None:
        """Raise `ValueError`, with what is allowed, for a recipe that it cannot run."""
        check_generates_once(graph)
        if not graph.generates:
            raise ValueError("serial: the recipe generates nothing")

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
            "in_flight": self.in_flight,
        }

    def load_state_dict(
        self, state: Mapping[str, Any], prompt_at: Callable[[int], Any], ranks: range
    ) -> None:
        """Continue with the open prompts' samples; a checkpoint of `serial` has none."""
        self.schedule.load_open(state.get("open", []), prompt_at, ranks)
        self._batches = {int(b): list(p) for b, p in state.get("batches", {}).items()}
        # The newest weights are pushed again. Of older ones the checkpoint has those that samples
        # go on with, and names those that have made tokens.
        self._continued_at = self._batch
        versions = {int(steps): version for steps, version in state.get("versions", {}).items()}
        versions = {s: v for s, v in versions.items() if self.in_flight or s < self._batch}
        self._versions = versions
        if state.get("in_flight"):  # whose samples go on with the newest
            self._gone = {*versions}
        for batch in self._batches:
            self._set_version(batch)
        self._restored = [*self.schedule.groups.open]

    def needs_versions(self) -> Collection[int]:
        """The versions of open prompts; in flight these go on with the newest."""
        if self.in_flight:
            return ()
        groups = self.schedule.groups
        if self.follows is not None:
            known = {*self._versions} - {*self._gone}
            return {self._versions[steps] for steps in known if steps < self._batch}
        # Of complete groups, too: an instance may die with one.
        return {group.version for group in groups.open.values() if group.version is not None}

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
            group.version, group.batch = self._version_for(batch), batch

    def _version_for(self, batch: int) -> int | None:
        """The weights with which the prompts of a batch may begin, if they are there."""
        if not self.in_flight:
            return self._versions.get(self._steps_behind(batch))
        newest = max(self._versions, default=-1)
        return self.schedule.loop.newest if newest >= batch - self.max_staleness else None

    def deal(
        self, dealer: Dealer, queue: Sequence[SampleId], able: Sequence[Instance]
    ) -> tuple[list[Dealt], list[SampleId]]:
        """Batch by batch, to instances that have their weights or may load them."""
        return dealer.deal_by_batch(queue, able, self._version_of, self.in_flight)

    def _version_of(self, id: SampleId) -> int | None:
        """The weights that make a sample's next tokens; None where they are not there yet."""
        if self.follows is None:
            return self.schedule.groups[id.prompt].version
        if not self._has_step(id):
            return None
        num_tokens = self._num_tokens(id)
        if self._awaits_end(id, num_tokens):
            return self.schedule.loop.newest
        segment = self.follows.segment(id, num_tokens)
        if segment.steps in self._gone:
            if self.waits_for_push:  # perhaps of the same, where a step has trained nothing
                return None
            raise no_longer_there(id, segment)
        return self._versions.get(segment.steps)

    def _has_step(self, id: SampleId) -> bool:
        """Whether a step of the run trains a sample; those of a checkpoint may have been more."""
        batch = self.schedule.groups[id.prompt].batch
        return batch >= 0 and (self.num_steps is None or batch < self.num_steps)

    def _awaits_end(self, id: SampleId, num_tokens: int) -> bool:
        """Whether only the end of its episode is to come of a sample, whose record is followed."""
        assert self.follows is not None
        is_open = self.schedule.groups.turns.is_open(id)
        return is_open and self.follows.is_whole(id, num_tokens)

    def rests_at(self, id: SampleId) -> int:
        """Where the record has other weights."""
        return 0 if self.follows is None else self.follows.rests_at(id, self._num_tokens(id))

    def recomputes(self, id: SampleId) -> bool:
        """Whether a cache was lost there in the record, which these weights compute again."""
        return self.follows is not None and self.follows.recomputes(id, self._num_tokens(id))

    def _num_tokens(self, id: SampleId) -> int:
        """Response tokens of a sample that waits for an instance."""
        return self.schedule.response_tokens(self.schedule.groups.task(id))

    @property
    def _round(self) -> list[int]:
        """The prompts of the step's present round; a recipe without a take has one round."""
        groups, batch = self.schedule.groups, self._batches[self._batch]
        return [position for position in batch if groups[position].status is GroupStatus.OPEN]

    @property
    def _batch(self) -> int:
        """The batch of the present step."""
        return self.schedule.steps_done

    def begin_step(self) -> None:
        """No count yet."""
        self.schedule.metrics |= {f"samples/{name}": 0.0 for name in _METRICS}
        self.schedule.metrics["training_wait_s"] = 0.0
        self._has_compared = False
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
        begun_ones = {position for positions in self._batches.values() for position in positions}
        unfinished = [
            task
            for task in schedule.groups.tasks
            if not schedule.groups.ledger.is_finished(task.sample.id)
            and task.sample.id.prompt in begun_ones
        ]
        if not schedule.loop.has_begun:  # the run continues here
            tasks += unfinished
        last = self._batch + self.max_staleness
        if self.num_steps is not None:
            last = min(last, self.num_steps - 1)
        begun = [batch for batch in range(self._batch, last + 1) if batch not in self._batches]
        # Another round of a step, where a take wants it; a record has the prompts of all rounds.
        another = [self._batch] * (not self.max_staleness and self.follows is None)
        for batch in begun or another:
            if self.follows is None:
                pulled = schedule.next_prompts(self._wanted)
                tasks += schedule.begin(pulled)
                positions = [position for position, _ in pulled]
            else:
                positions = [*self.follows.record.batches[batch]]
                tasks += self._begin_recorded(positions)
            self._batches.setdefault(batch, []).extend(positions)
            self._set_version(batch)
        return tasks

    def _begin_recorded(self, positions: Sequence[int]) -> list[GenerationTask]:
        """These prompts begin; those before them are for batches that come later."""
        schedule = self.schedule
        while missing := {*positions} - schedule.groups.open.keys():
            ((position, prompt),) = schedule.next_prompts(1)
            if position > max(missing):
                raise RecordDiffers(f"prompt {min(missing)} has been trained before")
            schedule.begin([(position, prompt)])
        tasks = (task for p in positions for task in schedule.groups[p].tasks.values())
        # A checkpoint of groups as they complete has finished samples of batches that begin here.
        return [task for task in tasks if not schedule.groups.ledger.is_finished(task.sample.id)]

    def _push(self, steps: int) -> None:
        """Have the present weights pushed, which are those after so many steps."""
        self._pushing.append(steps)
        self.schedule.executor.push_weights()

    @property
    def takes_guests(self) -> bool:  # type: ignore[override]
        """Whether a step may have its groups while others use the instances."""
        return self.lasts and self.max_staleness > 0

    @property
    def waits_for_push(self) -> bool:  # type: ignore[override]
        """Whether weights are on their way to where instances may load them."""
        return bool(self._pushing)

    def pushed(self, version: int) -> None:
        """Weights can be loaded: the batches that they make begin."""
        steps = self._pushing.popleft()
        self._versions[steps] = version
        self._gone = {s for s in self._gone if self._versions.get(s, version) != version}
        for batch in self._batches:
            self._set_version(batch)

    def of_step(self, position: int) -> bool:
        """Whether the present step trains on a prompt."""
        return self.schedule.groups[position].batch == self._batch

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
        self.schedule.loop.make(tasks)
        restored, self._restored = self._restored, []
        self._run_on(self._round, restored)

    def make_again(self, positions: Sequence[int]) -> None:
        """The batch's lost samples are made again, by the newest weights or those of the batch."""
        self._run_on(positions, positions)

    def _run_on(self, positions: Sequence[int], touched: Sequence[int]) -> None:
        """Go on until all samples of these prompts are there, with what early stages make."""
        loop, groups = self.schedule.loop, self.schedule.groups

        def is_there() -> bool:
            if loop.tail.is_training:
                return False
            complete = all(map(groups.is_complete, positions))
            return complete and not loop.stages.tracker.open_stages(positions)

        with self._training_waits():
            loop.tail.touched(positions)
            loop.run_on(is_there, touched)

    @contextmanager
    def _training_waits(self) -> Iterator[None]:
        """Count the seconds in which the ranks that train have nothing to do.

        Those in which a guest has the instances are not waits for a group.
        """
        loop = self.schedule.loop
        start, busy_s = loop.executor.clock.now(), loop.tail.train_seconds
        yield
        start = loop.executor.clock.now() if loop.guest else max(start, loop.returned_at)
        busy_s = (loop.tail.train_seconds - busy_s) / len(loop.executor.instances)
        waited_s = loop.executor.clock.now() - start - busy_s
        self.schedule.metrics["training_wait_s"] += max(0.0, waited_s)

    def take(self) -> list[int]:
        """The step's batch is trained on."""
        if self._batch == self._continued_at:
            # A checkpoint may be so late that its samples have tokens of the newest weights.
            self.schedule.loop.run_on(lambda: not self._pushing)
        positions = self._round
        self._record(positions)
        return positions

    def _record(self, positions: Sequence[int]) -> None:
        """Note which weights have made the tokens that the step trains on."""
        # A step that used no sample leaves the version as it is: its tokens count as the older.
        newest_first = sorted(self._versions.items(), reverse=True)
        steps_of = {version: steps for steps, version in newest_first}
        self._ages = {version: self._batch - steps for version, steps in steps_of.items()}
        samples = [
            task.sample
            for position in positions
            for task in self.schedule.groups[position].tasks.values()
            if task.sampling is not None
        ]
        versions = {sample.id: segments_of(sample.spans, steps_of) for sample in samples}
        self.schedule.versions = {**self.schedule.versions, **versions}
        if self.follows is not None:
            self.follows.check(versions, failures_of(samples))

    def update_begins(self, updates: Sequence[UpdateStage]) -> None:
        """Where the step has no sample of the trainer's weights alone, compare a group that has.

        It is the first one that is complete, and no step has taken it yet. It is scored for
        `mismatch/*` alone, before the weights change.
        """
        update = next((one for one in updates if one.role == "actor"), None)
        version = self._versions.get(self._batch)
        if not self.lasts or update is None or version is None or self._has_compared:
            return
        self._has_compared = True
        groups = self.schedule.groups
        if any(_is_of_version(task.sample, version) for task in tasks_of(groups.taken)):
            return
        for position in groups.complete():
            samples = [task.sample for task in groups[position].tasks.values()]
            if all(_is_of_version(sample, version) for sample in samples):
                self.schedule.compare(update, samples)
                return

    def step_ended(self) -> None:
        """The new weights go to whoever will take them; older ones stay that batches need.

        The push of the step before has ended by then: a checkpoint knows all versions but the
        newest, which a run that continues pushes again.
        """
        self.schedule.loop.run_on(lambda: not self._pushing)
        # What trains groups early is of this step; the next one has its own.
        self.schedule.loop.tail = NoTail()
        after = self._batch + 1
        needed = self._end_batch(after)
        self._versions = {s: version for s, version in self._versions.items() if s in needed}
        guest = self.schedule.loop.guest
        of_guest = [] if guest is None else [guest.version]
        self.schedule.executor.keep_versions([*self._kept_versions(), *of_guest])
        self._push(after)

    def _end_batch(self, after: int) -> Collection[int]:
        """The step's prompts are trained; gives the steps behind weights that are of use yet."""
        del self._batches[self._batch]
        if self.in_flight or self.follows is not None:
            return range(after - self.max_staleness, after)
        return {*map(self._steps_behind, (*self._batches, after + self.max_staleness))}

    def _kept_versions(self) -> Collection[int]:
        """The versions that instances may load, besides the newest."""
        return [] if self.in_flight else [*self._versions.values()]

    def metrics(self, used: Sequence[Sample]) -> dict[str, float]:
        """Count the tokens of older weights among those trained, and the staleness in steps."""
        spans = [span for sample in used for span in sample.spans if span.trained]
        generated = [span for span in spans if span.version != NO_VERSION]  # not the dataset's own
        tokens = Counter[int]()
        for span in generated:
            tokens[self._ages[span.version]] += span.stop - span.start
        num_tokens = self.schedule.loop.num_tokens
        before, self._num_tokens_before = self._num_tokens_before, num_tokens
        return {
            "samples/generated_tokens": float(num_tokens - before),
            "samples/off_policy_tokens": float(tokens.total() - tokens[0]),
            "samples/trained_tokens": float(sum(span.stop - span.start for span in spans)),
            "samples/staleness": float(max(+tokens, default=0)),
            "samples/mean_staleness": sum(age * n for age, n in tokens.items())
            / max(1, tokens.total()),
        }


def _is_of_version(sample: Sample, version: int) -> bool:
    """Whether the weights of a version have made all tokens of a finished response."""
    versions = {span.version for span in sample.spans if span.trained}
    return versions == {version} and "log_probs" in sample.tensors
