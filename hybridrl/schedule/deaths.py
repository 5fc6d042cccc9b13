"""Instances that die within a run: what they held, and finished samples there, begin anew."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from hybridrl.flow.executor import Executor
from hybridrl.flow.ledger import Ledger
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.turns import OpenTurns
from hybridrl.schedule.groups import BegunPrompts, GenerationTask, GroupStatus
from hybridrl.schedule.instances import Instances
from hybridrl.schedule.streamed_stages import StreamedStages
from hybridrl.schedule.tail import NoTail

logger = logging.getLogger(__name__)


class LoopParts(Protocol):
    """What deaths concern of a `Loop`."""

    executor: Executor
    groups: BegunPrompts
    ledger: Ledger
    turns: OpenTurns
    instances: Instances
    stages: StreamedStages
    tail: NoTail
    lasts: bool

    def queue(self, tasks: Sequence[GenerationTask]) -> None:
        """Have these samples made."""
        ...


class Deaths:
    """Makes again what instances that died had, on those that live.

    Where all instances have the same weights its tokens are the same, since they follow from the
    sample's identity. Else others may come, so what was computed from them is computed again, for
    the samples of its prompt too.

    A finished sample is not made again if ranks that train have its group (`NoTail.kept_prompts`).
    While they are to say so, since a call with it is in flight, it waits for them (`settle`). One
    that the present step has taken is `taken`: the step goes back to make it (`LoopSchedule`).
    """

    def __init__(self, loop: LoopParts) -> None:
        self.loop = loop
        self.num_restarted = 0
        """Samples that began anew since this was last set to 0."""
        self.taken: set[SampleId] = set()
        """Samples of the present step that died after it had taken them."""
        self._lost_tensors: dict[SampleId, frozenset[str]] = {}  # of samples that began anew

    def begin(self) -> None:
        """All ranks have new weights."""
        self._lost_tensors.clear()

    def notice(self) -> None:
        """Instances may have died while another schedule used them, or before the loop began."""
        living = {*self.loop.executor.instances}
        for instance in self.loop.instances.alive:
            if instance.number not in living:
                self.died(instance.number)
        self._lose(self._on_the_dead(self.loop.ledger.samples))

    def died(self, number: int) -> None:
        """Make again the samples that an instance held, and those whose tensors it had.

        Raises RuntimeError where no instance is left.
        """
        loop = self.loop
        instance = next((i for i in loop.instances.alive if i.number == number), None)
        if instance is None:  # it has been noticed, or was dead when the loop began
            return
        lost = instance.die()
        if not loop.instances.alive:
            raise RuntimeError("every generation instance has died")
        lost += loop.tail.dies(instance)
        finished = self._on_the_dead(loop.ledger.samples)
        for id in lost:
            self.restart(id)
        self._lose(finished)
        loop.tail.lost(instance, finished)
        number_lost = len(lost) + len(finished)
        logger.debug("instance %d died; %d samples begin anew", number, number_lost)

    def settle(self) -> None:
        """Ranks that train have said what they have."""
        refused = self.loop.tail.take_refused()
        tasks = [task for prompt in refused for task in self.loop.groups[prompt].tasks.values()]
        self._lose(self._on_the_dead(task.sample for task in tasks))

    def make_taken(self) -> None:
        """The step is to go on without the samples that died after it had taken them."""
        samples = [self.loop.groups.task(id).sample for id in sorted(self.taken)]
        self.taken.clear()
        self._lose(samples)

    def restart(self, id: SampleId) -> None:
        """Begin a sample anew."""
        loop = self.loop
        task = loop.groups.task(id)
        lost = self._lost_tensors.get(id, frozenset())
        self._lost_tensors[id] = lost | task.sample.tensors
        loop.ledger.restart(id, same_weights=not loop.lasts)
        loop.turns.forget([id])
        task = replace(task, parked=None, copied=None, tokens=task.total)
        loop.groups.update([task])
        self.num_restarted += 1
        loop.queue([task])

    def check_restored(self) -> None:
        """Samples that began anew have the tensors again that they had.

        Raises RuntimeError where one came from a stage of an earlier round that waits for the whole
        batch: it does not run again.
        """
        for id, lost in self._lost_tensors.items():
            missing = lost - self.loop.groups.task(id).sample.tensors
            if missing and self.loop.ledger.is_finished(id):
                raise RuntimeError(
                    f"a generation instance died with {', '.join(sorted(missing))} of sample {id},"
                    " which an earlier round has computed"
                )

    def _on_the_dead(self, samples: Iterable[Sample]) -> list[Sample]:
        """Finished samples that are on no instance that lives, nor on ranks that train."""
        loop = self.loop
        living = {*loop.executor.instances}
        gone, kept = list[Sample](), loop.tail.kept_prompts()
        for sample in samples:
            id = sample.id
            if not loop.ledger.is_finished(id) or id.prompt in kept:
                continue
            if loop.executor.instance_of(sample.rank) in living or self._is_left_out(id.prompt):
                continue
            if loop.lasts and loop.groups[id.prompt].status is GroupStatus.TAKEN:
                if not loop.ledger.has_left(id):
                    self.taken.add(id)
            else:
                gone.append(sample)
        return gone

    def _is_left_out(self, prompt: int) -> bool:
        """Whether no step trains on a prompt, and nothing more is computed of it."""
        groups, ledger = self.loop.groups, self.loop.ledger
        if not self.loop.lasts or not all(map(ledger.has_left, groups[prompt].tasks)):
            return False
        return groups.is_complete(prompt) and not self.loop.stages.tracker.open_stages([prompt])

    def _lose(self, samples: Iterable[Sample]) -> None:
        """These finished samples begin anew, and what was computed from them is undone."""
        for sample in samples:
            self.loop.stages.forget(sample)
            self.restart(sample.id)
            self.loop.stages.undo(sample.id.prompt)
            if self.loop.lasts:  # by the same weights choices are those of before, and stand
                self.loop.ledger.come_back(self.loop.groups[sample.id.prompt].tasks)
            self.loop.tail.undone(sample.id.prompt)
