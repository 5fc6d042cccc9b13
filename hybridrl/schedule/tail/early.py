"""Groups that are trained while others are still generated."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from hybridrl.costs.instance import Costs
from hybridrl.flow.executor import TRAINING_POOL, EarlyTrained
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.ledger import ready
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule import StageSpan
from hybridrl.schedule.instances import Instance, InstanceStatus
from hybridrl.schedule.streamed_stages import StreamedStages

SPAN = "early backward"
_SHARE = 0.5
_GROWTH = 0.25  # a response longer than the forecast's longest is taken to grow by this share more


class StillDecoding(NamedTuple):
    """The work of the instances that still decode, `width` times as wide as one that trains.

    The largest of their batches has `rows` rows and their samples up to `progress` tokens. Of
    conversations `left_s` gives the seconds that are left.
    """

    rows: int
    progress: float
    width: int
    left_s: Callable[[], float] | None


class StreamedUpdate:
    """The early part of an update (`early_updates`) in a round.

    | a sample is | when                                                                   |
    |-------------|------------------------------------------------------------------------|
    | waiting     | it has left all stages before the update, with its prompt's others     |
    | running     | an instance computes its gradient                                      |
    | trained     | the gradient is on an instance; `update` does not compute it again     |

    An instance without samples takes a chunk of those that wait, its own first. A chunk has at most
    `chunk_tokens`, one micro-batch. It has less where that would take more than half of the time
    that the others are expected to decode. The instance does not decode again in this round
    (TRAINING). All ranks train the rest at the barrier.

    Invariants: a sample is in one of these states at most, and trained by one instance. No sample
    moves while a streamed stage runs on it. Where an instance dies, its gradients are gone: its
    samples wait again, those that are made anew when they are back.

    Example: of 8 samples on instances A and B, A's four end early. They are two whole groups, so A
    trains on them while B decodes. The update computes the other four on both.
    """

    def __init__(
        self, stage: UpdateStage, stages: StreamedStages, chunk_tokens: int, longest: float
    ) -> None:
        """`longest` is the expected length of the longest response; 0 where it is not known."""
        self.stage, self.stages = stage, stages
        self.chunk_tokens, self.longest = chunk_tokens, longest
        self.seconds = 0.0
        self._waiting: dict[SampleId, Sample] = {}
        self._running: dict[SampleId, Sample] = {}
        self._trained: dict[int, dict[SampleId, Sample]] = defaultdict(dict)
        self._refused = set[int]()  # groups that the pool has passed over
        self._times: list[float] = []

    @property
    def num_trained(self) -> int:
        """Samples whose gradient is there."""
        return sum(map(len, self._trained.values()))

    @property
    def is_running(self) -> bool:
        """Whether some gradient is computed."""
        return bool(self._running)

    @property
    def spans(self) -> list[StageSpan]:
        """From the first start to the last end."""
        return [StageSpan(SPAN, self._times[0], self._times[-1])] if self._times else []

    def add(self, prompts: Iterable[int]) -> None:
        """Samples of these prompts may have become ready."""
        for prompt in prompts:
            group = self.stages.tracker.left(self.stage.name, prompt) or ()
            if not all(ready(self.stage, sample) for sample in group):
                continue
            for sample in group:
                if sample.id not in self._running and not self._is_trained(sample.id):
                    self._waiting[sample.id] = sample

    def start(self, instance: Instance, others: StillDecoding) -> bool:
        """Let an instance that has time train a chunk of the samples that wait, if any do."""
        samples = self._chunk(instance, others)
        if not samples:
            return False
        for sample in samples:
            self._running[sample.id] = self._waiting.pop(sample.id)
        self.stages.begin_move(samples)
        self._times.append(self.stages.executor.clock.now())
        self.stages.executor.train_early(self.stage, instance.number, samples)
        return True

    def start_in_pool(self, least_tokens: float) -> None:
        """Let all ranks that train do so on the samples that wait, if they are enough."""
        kept = {s.id.prompt for s in self._waiting.values() if not self.stages.may_move(s)}
        samples = [s for s in self._waiting.values() if s.id.prompt not in kept]
        if not samples or sum(sample.tokens for sample in samples) < least_tokens:
            return
        samples.sort(key=lambda sample: sample.id)
        for sample in samples:
            self._running[sample.id] = self._waiting.pop(sample.id)
        self.stages.begin_move(samples)  # nothing else begins on them
        self._times.append(self.stages.executor.clock.now())
        self.stages.executor.train_early(self.stage, TRAINING_POOL, samples)

    def trained(self, event: EarlyTrained) -> dict[int, None]:
        """An instance has computed the gradient of a chunk; gives the prompts of its samples.

        The pool passes over groups that have lost a sample with an instance that died.
        """
        self._trained[event.instance] |= {id: self._running.pop(id) for id in event.ids}
        self._times.append(self.stages.executor.clock.now())
        self.seconds += event.seconds
        if event.instance == TRAINING_POOL:  # it has one call in flight
            self._refused |= {id.prompt for id in self._running}
            self.stages.end_move(self._running)
            self._running.clear()
        return self.stages.end_move(event.ids)

    def take_refused(self) -> set[int]:
        """Groups that the pool has passed over: once."""
        refused, self._refused = self._refused, set()
        return refused

    @property
    def begun_prompts(self) -> set[int]:
        """Prompts of which gradients are there, or are computed."""
        return {id.prompt for ids in (self._running, *self._trained.values()) for id in ids}

    def undone(self, prompt: int) -> None:
        """The samples of a prompt do not wait until they are ready again."""
        for id in [id for id in self._waiting if id.prompt == prompt]:
            del self._waiting[id]

    def forget(self, sample: Sample) -> None:
        """A sample begins anew; a gradient that is on another instance stays."""
        self._waiting.pop(sample.id, None)
        self._running.pop(sample.id, None)

    def died(self, instance: int) -> None:
        """The gradients on an instance are gone, after the samples that were there (`forget`)."""
        prompts = dict.fromkeys(id.prompt for id in self._trained.pop(instance, {}))
        self.add(prompts)

    def _is_trained(self, id: SampleId) -> bool:
        return any(id in trained for trained in self._trained.values())

    def _chunk(self, instance: Instance, others: StillDecoding) -> list[Sample]:
        """Whole samples of at most a chunk's tokens together, the instance's own first."""
        if not self._waiting:
            return []
        affordable = self._affordable(instance, others)
        able = [
            sample
            for sample in self._waiting.values()
            if (affordable is None or sample.tokens <= affordable) and self.stages.may_move(sample)
        ]
        chosen: list[Sample] = []
        for sample in self._own_first(instance.number, able):
            if not chosen:  # it may be longer than a micro-batch
                wanted: float = max(self.chunk_tokens, sample.tokens)
                wanted = wanted if affordable is None else min(wanted, affordable)
            if sample.tokens <= wanted:  # else a shorter one behind it may still fit
                chosen.append(sample)
                wanted -= sample.tokens
                if wanted <= 0:
                    break
        return chosen

    def _own_first(self, instance: int, samples: Iterable[Sample]) -> Iterator[Sample]:
        """The instance's own samples, then the others; each by their ids."""
        own, others = list[Sample](), list[Sample]()
        for sample in samples:
            (own if self.stages.is_on(sample, instance) else others).append(sample)
        for some in (own, others):
            yield from sorted(some, key=lambda sample: sample.id)

    def _affordable(self, instance: Instance, others: StillDecoding) -> float | None:
        """Tokens that the instance can train in half of the time that is left to decode.

        All would wait for a call that lasts longer, and how long that is, is a guess. None where
        costs or lengths are not known.
        """
        executor, costs = self.stages.executor, self.stages.meter.costs()
        if costs is None or not costs.train_token_s or not self.longest:
            return None
        rows, progress, width, left_s = others
        if left_s is None:
            decoding = costs.at_width(width)
            seconds = _SHARE * seconds_left(decoding, self.longest, progress, rows)
        else:
            seconds = _SHARE * left_s()
        if instance.status is not InstanceStatus.TRAINING:
            seconds -= costs.train_switch_s
        return seconds / (costs.train_token_s * len(executor.instances))


def seconds_left(costs: Costs, longest: float, progress: float, num_rows: float) -> float:
    """Expected seconds until the longest response ends, which has `progress` tokens by now.

    `longest` tokens are expected of it. It decodes in a batch of `num_rows` rows.
    """
    tokens = round(max(longest - progress, _GROWTH * progress))
    return float(tokens * costs.pace(num_rows, progress + tokens / 2))
