"""A record that is followed on ranks that train, too: a step makes the tokens of its weights."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from hybridrl.flow.executor import Parked, Phase
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule.asynchronous import Async
from hybridrl.schedule.dealing import Dealer, Dealt
from hybridrl.schedule.following import no_longer_there
from hybridrl.schedule.groups import GenerationTask
from hybridrl.schedule.instances import Instance
from hybridrl.schedule.loop_schedule import LoopSchedule, SchedulePolicy
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.tail import NoTail


class _Rests(NoTail):
    """Samples that are parked wait for a later step, unless the present one has more of them."""

    def __init__(self, is_due: Callable[[SampleId], bool]) -> None:
        super().__init__()
        self._is_due = is_due

    def arrive(self, source: Instance, parked: Parked) -> Sequence[SampleId]:
        return [id for id in parked.ids if self._is_due(id)]


@dataclass(kw_only=True, eq=False)
class FollowedRounds(Async):
    """Follows the record of a run whose ranks generated alone, on ranks that train, too.

    While step k makes samples all ranks have v_k, the weights after k steps. Of the batches k to
    k + S it makes each sample up to where the tokens of v_k end in the record. There the sample is
    parked, until the step whose weights make its next tokens. Then step k trains batch k.

    All stages run on a sample in the step that trains it. So models that change between steps
    compute with the weights that they have on separate ranks.

    Example, S = 1, a record in which v_0 has made 8 tokens of prompt 1, and v_1 the others: step 0
    makes prompt 0, and 8 tokens of prompt 1. It trains prompt 0. Step 1 makes the others of prompt
    1, by v_1, and trains it.
    """

    lasts = False

    def bind(self, schedule: LoopSchedule) -> None:
        """Belong to a schedule; groups are trained when their batch is there."""
        assert self.follows is not None
        SchedulePolicy.bind(self, schedule)

    def needs_versions(self) -> Collection[int]:
        """A step has made all that its weights make."""
        return ()

    def begin(self) -> list[GenerationTask]:
        """Batches begin as on separate ranks; gives the samples that have tokens of this step."""
        super().begin()
        ledger = self.schedule.groups.ledger
        begun = {position for positions in self._batches.values() for position in positions}
        tasks = [task for p in begun for task in self.schedule.groups[p].tasks.values()]
        tasks = [task for task in tasks if not ledger.is_finished(task.sample.id)]
        return [task for task in tasks if task.sampling is None or self._is_due(task.sample.id)]

    def _is_due(self, id: SampleId) -> bool:
        """Whether the weights of the present step make the next tokens of a sample."""
        assert self.follows is not None
        if not self._has_step(id):
            return False
        if self._awaits_end(id, num_tokens := self._num_tokens(id)):
            return True
        segment = self.follows.segment(id, num_tokens)
        if segment.steps < self._batch:
            raise no_longer_there(id, segment)
        return segment.steps == self._batch

    def begin_step(self) -> None:
        """Ranks generate and train by turns: none waits for the others."""
        super().begin_step()
        del self.schedule.metrics["training_wait_s"]

    def metrics(self, used: Sequence[Sample]) -> dict[str, float]:
        """As on separate ranks, without the rate of those that generate."""
        metrics = super().metrics(used)
        del metrics["samples/generated_tokens"]
        return metrics

    def deal(
        self, dealer: Dealer, queue: Sequence[SampleId], able: Sequence[Instance]
    ) -> tuple[list[Dealt], list[SampleId]]:
        """All instances have the weights of the step."""
        return SchedulePolicy.deal(self, dealer, queue, able)

    def enter(self, phases: set[Phase | None]) -> None:
        """All ranks take the weights of the step."""
        SchedulePolicy.enter(self, phases)
        self._versions[self._batch] = self.schedule.executor.version

    def tail(self, stages: StreamedStages, tasks: Sequence[GenerationTask]) -> tuple[NoTail, bool]:
        """Samples rest where the tokens of the step's weights end."""
        return _Rests(self._is_due), True

    def may_start(self, position: int) -> bool:
        """Whether the present step trains on a prompt: earlier, no stage starts on it."""
        return self.of_step(position)

    def make(self, tasks: Sequence[GenerationTask]) -> None:
        """Make the tokens of the step's weights, and let the stages run on its batch."""
        loop = self.schedule.loop
        loop.make(tasks)
        loop.run_on(lambda: True, self._round)  # samples that earlier steps have finished
        loop.finish()

    def step_ended(self) -> None:
        """Forget the batch, and the versions that no later step trains tokens of."""
        del self._batches[self._batch]
        oldest = self._batch + 1 - self.max_staleness
        self._versions = {s: version for s, version in self._versions.items() if s >= oldest}
