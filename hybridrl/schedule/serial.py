"""The serial schedule: every stage waits for the whole batch (HybridFlow, arXiv 2409.19256).

It is the specification: every on-policy schedule must train on the same batch.
"""

from collections.abc import Mapping, Sequence

from hybridrl.flow.executor import (
    Advanced,
    Phase,
    Submit,
    TargetsLoaded,
    WorkerDied,
)
from hybridrl.flow.graph import AnswersStage, GenerateStage, Stage
from hybridrl.flow.ledger import SampleStatus, sampling_of, with_updates_together
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule.base import Batch, Schedule
from hybridrl.schedule.events import learn
from hybridrl.schedule.lost_samples import InstanceDied


class SerialSchedule(Schedule):
    """Runs a graph stage by stage, in the recipe's order, each on the whole batch.

    Prompts are dealt to instances by position in the step, all samples of a prompt to one. An
    instance that dies ends the run.
    """

    def _run_stages(self, stages: Sequence[Stage], batch: Batch) -> None:
        for stage in with_updates_together(stages):
            match stage:
                case list():
                    self._update(stage, batch)
                case GenerateStage():
                    self._enter(Phase.GENERATE)
                    with self._span(stage.name):
                        batch[stage.name] = self._generate(stage, batch)
                case AnswersStage():
                    with self._span(stage.name):
                        batch[stage.name] = self._load_targets(stage, batch)
                case _:
                    self._run(stage, batch)

    def _generate(self, stage: GenerateStage, batch: Batch) -> list[Sample]:
        """Submit every group to its instance, then let the instances run until all is finished."""
        sampling = sampling_of(stage, self.settings.sampling)
        dispatched = self._begin_samples(stage, self.pulled, batch)
        samples = {sample.id: sample for _, group in dispatched for sample in group}
        instances = self.executor.instances
        commands: dict[int, list[Submit]] = {}
        for i, ((_, prompt), group) in enumerate(dispatched):
            submit = Submit(tuple(sample.id for sample in group), prompt, sampling)
            commands.setdefault(instances[i % len(instances)], []).append(submit)
        held: dict[int, dict[SampleId, None]] = {}
        for instance, submits in commands.items():
            held[instance] = {id: None for submit in submits for id in submit.ids}
            for id in held[instance]:
                self._ledger.move(id, SampleStatus.DECODING)
            self.executor.advance(instance, submits, self.settings.decode_steps)
        self._decode(stage, held)
        lost = [str(id) for id in samples if not self._ledger.is_finished(id)]
        assert not lost, f"instances stopped without finishing {lost}"
        return self._whole(samples.values())

    def _decode(self, stage: GenerateStage, held: Mapping[int, dict[SampleId, None]]) -> None:
        """Let each instance, which has a call in flight, run the samples that it holds.

        Each call ends with events. An instance gets its next one unless all of its samples wait for
        their environments. Where an instance dies the others end what they have; then this raises
        InstanceDied.
        """
        in_flight, dead = set(held), list[int]()
        while in_flight or any(held.values()):
            for event in self._wait():
                match event:
                    case WorkerDied(instance=instance):
                        dead.append(instance)
                        in_flight.discard(instance)
                        held.get(instance, {}).clear()
                    case Advanced(instance=instance):
                        learn(self.meter, event)
                        in_flight.remove(instance)
                        self._turns.ended(event.turns, self.executor.clock.now())
                        for turn in event.turns:
                            self._ledger.move(turn.id, SampleStatus.WAITING)
                        for finished in event.finished:
                            self._ledger.finish(stage, finished)
                            del held[instance][finished.id]
                    case _:
                        raise AssertionError(event)
            for instance, ids in held.items():
                if instance not in in_flight and self._turns.can_go(ids):
                    answers = self._turns.answer(ids)
                    for id in (id for answer in answers for id in answer.ids):
                        self._ledger.move(id, SampleStatus.DECODING)
                    self.executor.advance(instance, answers, self.settings.decode_steps)
                    in_flight.add(instance)
        if dead:
            raise InstanceDied(f"generation instance {dead[0]} died")

    def _load_targets(self, stage: AnswersStage, batch: Batch) -> list[Sample]:
        """Make the dataset's targets samples."""
        dispatched = self._begin_samples(stage, self.pulled, batch)
        samples = {sample.id: sample for _, (sample,) in dispatched}
        self.executor.load_targets(stage, tuple(samples), [prompt for _, prompt in self.pulled])
        waiting = set(samples)
        while waiting:
            for event in self._wait():
                assert isinstance(event, TargetsLoaded), event
                for finished in event.finished:
                    self._ledger.finish(stage, finished)
                    waiting.remove(finished.id)
        return list(samples.values())
