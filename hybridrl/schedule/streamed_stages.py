"""Stages that run on finished samples while others are generated."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from hybridrl.costs.instance import Costs
from hybridrl.costs.meter import CostMeter
from hybridrl.flow.executor import Computed, Executor, SamplesRead, Scope
from hybridrl.flow.graph import ComputeStage, Stage
from hybridrl.flow.ledger import record_computed
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule import StageSpan
from hybridrl.schedule.events import learn
from hybridrl.schedule.readiness import ReadyTracker
from hybridrl.schedule.waiting_samples import WaitingSamples


class StreamedStages:
    """The early stages (`ReadyTracker`) of a section, in all of its rounds.

    Stages of scope RANK start at once, on the sample's rank. So do those of scope DRIVER, which
    keep a sample in place only until they have read it. Forward passes wait until an instance holds
    no sample, which takes a chunk of them of at most `chunk_tokens`, its own samples first.
    Stages of scope POOL run on their own ranks while others decode, one call at a time with all
    samples that wait.

    Without `overlaps` forward passes wait until nothing decodes any more. Then each instance takes
    an equal share at once: fewer, larger calls, and no short ones of decoding.

    Invariant: a sample does not move while a stage runs on it, and no stage starts on a sample that
    moves.
    """

    def __init__(
        self,
        executor: Executor,
        tracker: ReadyTracker,
        meter: CostMeter,
        chunk_tokens: int,
    ) -> None:
        self.executor, self.tracker, self.meter = executor, tracker, meter
        self.chunk_tokens = chunk_tokens
        self._spare: dict[str, WaitingSamples] = {}  # for an instance
        self._pooled: dict[str, dict[SampleId, Sample]] = {}  # waits for the role's own pool
        self._running: dict[str, dict[SampleId, Sample]] = {}
        self._busy = Counter[SampleId]()  # stages that keep a sample in place
        self._kept_on: dict[SampleId, int] = {}  # where they do
        self._read: set[tuple[str, SampleId]] = set()  # stages that run, and let it move
        self._moving: set[SampleId] = set()  # on its way to a forward pass elsewhere
        self._outdated: set[tuple[str, SampleId]] = set()  # stages that run on what was undone
        for stage in tracker.computes:
            if executor.scope(stage) is Scope.POOL:
                self._pooled[stage.name] = {}
            else:
                self._spare[stage.name] = WaitingSamples(self._instance_of)
            self._running[stage.name] = {}

        self.begin(overlaps=True)

    def begin(
        self,
        overlaps: bool,
        lasts: bool = False,
        of_step: Callable[[int], bool] = lambda prompt: True,
    ) -> None:
        """A round begins; stages may run still if the loop `lasts`.

        Pools of models run passes on prompts `of_step` alone.
        """
        assert lasts or not self.running, "stages run beyond the end of a round"
        self.overlaps, self._of_step = overlaps, of_step
        self._last_stage: dict[int, str] = {}
        self._times: dict[str, list[float]] = {}

    @property
    def spans(self) -> list[StageSpan]:
        """From a stage's first start to its last end; those of different stages overlap."""
        return [StageSpan(name, times[0], times[-1]) for name, times in self._times.items()]

    def has(self, stage: str) -> bool:
        """Whether it runs the stage of this name."""
        return stage in self._running

    def uses_pool(self, stage: Stage) -> bool:
        """Whether some stage runs in the pool of `stage`."""
        pool = self.executor.pool(stage)
        running = (name for name in self._pooled if self._running[name])
        return any(self.executor.pool(self._stage(name)) == pool for name in running)

    @property
    def running(self) -> bool:
        """Whether some stage runs on some sample."""
        return any(self._running.values())

    @property
    def waiting(self) -> bool:
        """Whether some sample waits for an instance or a pool."""
        return any(self._spare.values()) or any(self._pooled.values())

    @property
    def wait_for_samples(self) -> bool:
        """Whether some stage has time while samples are made, beyond that of the samples' ranks."""
        late = (Scope.RANK,) if self.overlaps else (Scope.RANK, Scope.INSTANCE)
        return any(self.executor.scope(stage) not in late for stage in self.tracker.computes)

    def stamp(self, stage: Stage) -> None:
        """A stage, one that makes samples too, begins or ends now."""
        self._times.setdefault(stage.name, []).append(self.executor.clock.now())

    def start(self, prompts: Iterable[int]) -> None:
        """Start the stages that can run on these prompts now, or keep them for an idle instance."""
        starting: dict[str, list[Sample]] = {}
        for prompt in prompts:
            self.tracker.choose(prompt)
            for stage, samples in self.tracker.startable(prompt):
                new = [s for s in samples if s.id not in self._running[stage.name]]
                starting.setdefault(stage.name, []).extend(new)
        for name, samples in starting.items():
            stage = self._stage(name)
            scope = self.executor.scope(stage)
            if scope is Scope.POOL:
                self._pooled[name] |= {sample.id: sample for sample in samples}
                continue
            if scope is Scope.INSTANCE:
                for sample in samples:
                    self._spare[name].add(sample, self._kept_on.get(sample.id))
                continue
            here = [sample for sample in samples if sample.id not in self._moving]
            if isinstance(stage, ComputeStage) and stage.whole_groups:
                moving = {sample.id.prompt for sample in samples if sample.id in self._moving}
                here = [sample for sample in here if sample.id.prompt not in moving]
            if here:
                self._begin(stage, here)
                self.executor.compute(stage, here)
        self._use_pools()

    def could_start(self, instance: int) -> bool:
        """Whether a forward pass waits that an instance may run while others decode."""
        return self.overlaps and any(w.able_tokens(instance) for w in self._spare.values())

    def start_waiting(
        self, instance: int, num_instances: int, decoding: bool, trains: bool = False
    ) -> bool:
        """Let an instance that has time run a chunk of the forward passes that wait, if any do.

        `num_instances` share them, now or, while others are `decoding`, later. An instance that
        `trains` has no generation weights, so the actor's own passes are left to others.
        """
        stage = self._next_stage(instance, trains) if self.overlaps or not decoding else None
        if stage is None:
            return False
        samples = self._chunk(instance, stage, num_instances, decoding)
        for sample in samples:
            self._spare[stage.name].remove(sample.id)
        self._begin(stage, samples, instance)
        self._moving |= {sample.id for sample in samples if not self.is_on(sample, instance)}
        self._last_stage[instance] = stage.name
        self.executor.infer(stage, instance, samples)
        return True

    def computed(self, event: Computed) -> dict[int, None]:
        """Record a stage's outputs; gives the prompts of its samples."""
        running = self._running[event.stage]
        stage = self._stage(event.stage)
        record_computed(stage, running, event)
        for id in [id for id in event.ids if (event.stage, id) in self._outdated]:
            self._outdated.remove((event.stage, id))
            running[id].forget(stage.outputs)
        self.stamp(stage)
        samples = [running.pop(id) for id in event.ids]
        for sample in samples:
            self._let_go(event.stage, sample.id)
        if event.instance is not None:
            self._moving.difference_update(event.ids)
        learn(self.meter, event, samples)
        return dict.fromkeys(sample.id.prompt for sample in samples)

    def read(self, event: SamplesRead) -> dict[int, None]:
        """A stage no longer keeps its samples in place; gives their prompts."""
        for id in event.ids:
            if id in self._running[event.stage]:  # else it began anew, or the stage has ended
                self._read.add((event.stage, id))
                self._free(id)
        return dict.fromkeys(id.prompt for id in event.ids)

    def forget(self, sample: Sample) -> None:
        """Nothing waits for a sample or runs on it any more: it is gone."""
        for waiting in self._spare.values():
            waiting.remove(sample.id)
        for pooled in self._pooled.values():
            pooled.pop(sample.id, None)
        for name, running in self._running.items():
            if running.pop(sample.id, None) is not None:
                self._let_go(name, sample.id)
            self._outdated.discard((name, sample.id))
        self._moving.discard(sample.id)

    def undo(self, prompt: int) -> None:
        """A sample of a prompt begins anew.

        What runs on the others, and follows from fields of all of them, is to run again. No
        results come of a stage of whole groups.
        """
        follow = self.tracker.undo(prompt)
        others = [task.sample for task in self.tracker.groups[prompt].tasks.values()]
        for name, running in self._running.items():
            stage = self._stage(name)
            if follow.isdisjoint(stage.outputs):
                continue
            for sample in others:
                for waiting in (self._pooled.get(name), self._spare.get(name)):
                    if isinstance(waiting, dict):
                        waiting.pop(sample.id, None)
                    elif waiting is not None:
                        waiting.remove(sample.id)
                if sample.id not in running:
                    continue
                if isinstance(stage, ComputeStage) and stage.whole_groups:
                    del running[sample.id]
                    self._let_go(name, sample.id)
                else:
                    self._outdated.add((name, sample.id))

    def is_on(self, sample: Sample, instance: int) -> bool:
        """Whether a sample's tensors are on a rank of an instance."""
        return self._instance_of(sample) == instance

    def _instance_of(self, sample: Sample) -> int:
        return self.executor.instance_of(sample.rank)

    def may_move(self, sample: Sample) -> bool:
        """Whether no stage runs on a sample, and it is not on its way."""
        return not self._busy[sample.id] and sample.id not in self._moving

    def begin_move(self, samples: Iterable[Sample]) -> None:
        """These are on their way: no stage starts on them until `end_move`."""
        self._moving |= {sample.id for sample in samples}

    def end_move(self, ids: Iterable[SampleId]) -> dict[int, None]:
        """They have arrived; gives their prompts, on which stages may start."""
        self._moving.difference_update(ids)
        return dict.fromkeys(id.prompt for id in ids)

    def _use_pools(self) -> None:
        """Let every idle pool run all samples that wait for the first of its stages.

        One call at a time: samples that come meanwhile share the next one.
        """
        stages = [self._stage(name) for name in self._pooled]
        busy = {self.executor.pool(stage) for stage in stages if self._running[stage.name]}
        for stage in stages:
            waiting = self._pooled[stage.name]
            if not waiting or self.executor.pool(stage) in busy:
                continue
            # Many samples of later steps may wait, so each prompt is asked for once.
            of_step = {p for p in {id.prompt for id in waiting} if self._of_step(p)}
            here = [
                sample
                for id, sample in waiting.items()
                if id.prompt in of_step and id not in self._moving
            ]
            if here:
                busy.add(self.executor.pool(stage))
                for sample in here:
                    del waiting[sample.id]
                self._begin(stage, here)
                self.executor.compute(stage, here)

    def _next_stage(self, instance: int, trains: bool) -> Stage | None:
        """The stage that an instance ran last, while there is some of it left; else the largest."""
        able = {
            name: tokens
            for name, waiting in self._spare.items()
            if (tokens := waiting.able_tokens(instance))
            and not (trains and self._stage(name).role == "actor")
        }
        if not able:
            return None
        last = self._last_stage.get(instance)
        return self._stage(last if last in able else max(able, key=lambda name: able[name]))

    def _chunk(
        self, instance: int, stage: Stage, num_instances: int, decoding: bool
    ) -> list[Sample]:
        """One share of the samples that wait for `stage`, the instance's own samples first.

        While others decode that is half of an instance's, but not so few tokens that the call
        itself counts. Afterwards instances have equal shares, of no fewer tokens than take as long
        as their call. The last one also takes what did not fit into the others'.
        """
        spare = self._spare[stage.name]
        waiting = spare.able_tokens(instance)
        least = least_tokens(self.meter.costs(), stage.name, self.chunk_tokens)
        share = waiting / (2 * num_instances)
        if not decoding:
            running = sum(sample.tokens for sample in self._running[stage.name].values())
            everywhere = running + spare.tokens()
            share, least = everywhere / num_instances, least / 10
            if waiting < 1.5 * share:
                share = waiting
        wanted = max(least, min(self.chunk_tokens, share))
        chosen: list[Sample] = []
        shortest = spare.least_tokens(instance)
        for sample in spare.able(instance):
            if chosen and sample.tokens > wanted:
                if decoding:
                    break
                continue
            wanted -= sample.tokens
            chosen.append(sample)
            if wanted < shortest:  # no other fits
                break
        return chosen

    def _begin(self, stage: Stage, samples: Sequence[Sample], instance: int | None = None) -> None:
        """A stage begins on samples, which it keeps in place, or brings to an instance first."""
        self.stamp(stage)
        for sample in samples:
            self._running[stage.name][sample.id] = sample
            self._busy[sample.id] += 1
            if self._busy[sample.id] == 1:
                on = self.executor.instance_of(sample.rank) if instance is None else instance
                self._kept_on[sample.id] = on
                for waiting in self._spare.values():
                    waiting.keep(sample.id, on)

    def _let_go(self, stage: str, id: SampleId) -> None:
        """A stage has ended on a sample."""
        if (stage, id) in self._read:
            self._read.remove((stage, id))
        else:
            self._free(id)

    def _free(self, id: SampleId) -> None:
        """One stage less keeps a sample in place."""
        self._busy[id] -= 1
        if not self._busy[id]:
            del self._busy[id], self._kept_on[id]
            for waiting in self._spare.values():
                waiting.keep(id, None)

    def _stage(self, name: str) -> Stage:
        return self.tracker.graph.stages[name]


def least_tokens(costs: Costs | None, stage: str, chunk_tokens: int) -> float:
    """Tokens of a forward pass of which its call is a tenth; at most `chunk_tokens`."""
    if costs is None or not (per_token := costs.token_s.get(stage)):
        return chunk_tokens / 8
    call_s = costs.stage_call_s.get(stage, 0.0) + costs.round_trip_s
    return min(chunk_tokens, max(1.0, 10 * call_s / per_token))
