"""Bookkeeping that every schedule shares: the samples, their status, the order of the stages."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from hybridrl.flow.executor import Computed, Finished, Phase, Sampling, Scope
from hybridrl.flow.graph import (
    GenerateStage,
    Graph,
    PromptsStage,
    SourceStage,
    Stage,
    TakeStage,
    UpdateStage,
)
from hybridrl.flow.sample import NO_RANK, Sample, SampleId, Scalar


class SampleStatus(Enum):
    """Status of a sample in its life; `Ledger` has the table of transitions."""

    __hash__ = object.__hash__  # by identity: Enum's own is a Python call

    QUEUED = "queued"  # no token yet; waits for a call of an instance
    DECODING = "decoding"  # an instance makes its tokens
    WAITING = "waiting"  # an instance has it, which holds it between two turns
    PARKED = "parked"  # stopped with its tokens so far; waits to resume
    FINISHED = "finished"  # has its last token, and tensors on a rank
    USED = "used"  # an update or a collect has read it
    DROPPED = "dropped"  # left without being used


class DropReason(Enum):
    """Why a sample was not used."""

    FILTER = "filter"  # a filter did not pass its group
    TAKE = "take"  # past the groups that the step wants
    JOIN = "join"  # without a partner, or a partner that only gives scalars
    JUDGE = "judge"  # its judge has failed, so it has no reward
    ABORTED = "aborted"  # the rollout engine gave up
    UNUSED = "unused"  # no update reads its stream
    STEP_FAILED = "step_failed"  # an error ended its step
    RUN_ENDED = "run_ended"  # unfinished when the run ended


@dataclass(frozen=True, slots=True)
class Drop:
    """A reason, and `text` for people: which stage, for example."""

    reason: DropReason
    text: str


UNUSED = Drop(DropReason.UNUSED, "unused: no update reads it")
STEP_FAILED = Drop(DropReason.STEP_FAILED, "an error ended its step")

_Q, _D, _W, _P, _F, _USED, _DROPPED = SampleStatus
_NEXT: dict[SampleStatus, tuple[SampleStatus, ...]] = {
    _Q: (_D, _F, _DROPPED),
    _D: (_Q, _W, _P, _F, _DROPPED),
    _W: (_Q, _D, _P, _DROPPED),
    _P: (_Q, _D, _W, _DROPPED),
    _F: (_Q, _USED, _DROPPED),
    _USED: (_Q,),
    _DROPPED: (),
}
_UNFINISHED = (_Q, _D, _W, _P)
_KEPT_TYPES = (float, str, int, bool, list)
ON_INSTANCE = (_D, _W)
"""A sample has one of these from the call that takes it to an instance to its end there."""


@dataclass(slots=True)
class SampleRecord:
    """A sample, its status, and why it left its first stream, if it has, or was dropped."""

    sample: Sample
    status: SampleStatus = SampleStatus.QUEUED
    left: Drop | None = None


class Ledger:
    """Every sample that was dispatched and not yet released, and its status.

    The life of a sample. A new one is queued; one from a checkpoint is queued, parked or finished.

    | from     | to       | when                                                           |
    |----------|----------|----------------------------------------------------------------|
    | queued   | decoding | a call takes it to an instance                                 |
    | queued   | finished | it is the dataset's own answer, which is loaded                |
    | queued   | dropped  | the run ends, or its step fails                                |
    | decoding | waiting  | its turn has ended                                             |
    | decoding | parked   | its instance has stopped it, for another instance or step      |
    | decoding | finished | it has its last token                                          |
    | decoding | queued   | its instance died, or the tokens it was to resume from         |
    | decoding | dropped  | its step fails                                                 |
    | waiting  | decoding | a call takes it its environment's reply                        |
    | waiting  | parked   | its instance has stopped it, for another instance or step      |
    | waiting  | queued   | its instance died, or the tokens it was to resume from         |
    | waiting  | dropped  | its step fails                                                 |
    | parked   | decoding | a call resumes it                                              |
    | parked   | waiting  | a call resumes it between two turns                            |
    | parked   | queued   | the instance that was to resume it died                        |
    | parked   | dropped  | the run ends, or its step fails                                |
    | finished | used     | an update or a collect reads it                                |
    | finished | dropped  | its step ends and nothing has read it                          |
    | finished | queued   | its rank died                                                  |
    | used     | queued   | its rank died, and a later stage of the step may still read it |

    A queued, parked or finished sample that is withdrawn has no record any more: its prompt begins
    again in a later step.

    Leaving a stream does not change the status, since another stream may hold the sample. `leave`
    notes the reason, and `settle` drops samples that nothing has used by then. Which stage may
    start on a sample follows from its fields, not from its status.

    Invariants: an id is dispatched once. A status changes by this table alone. A sample that has
    been used once is used when its step ends. After `forget` each sample was used or dropped with a
    reason.

    Example: a and b are dispatched (queued), submitted (decoding) and finished. A filter lets b go,
    the update reads a (used). Then `settle` gives a as used, and b as dropped with the filter's
    reason. c, long, is parked, and decodes again in the next step.
    """

    def __init__(self) -> None:
        self._records: dict[SampleId, SampleRecord] = {}
        self._in_order_of_use: dict[SampleId, Sample] = {}
        self._num_unfinished = 0
        self.num_dispatched = 0
        """Samples that `dispatch` has been given so far, less those withdrawn."""
        self.num_step_failed = 0
        """Samples that steps have left by failing, so far."""

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Every sample, in order of dispatch."""
        return tuple([record.sample for record in self._records.values()])

    @property
    def num_unfinished(self) -> int:
        """Samples that are queued, decoding, waiting or parked."""
        return self._num_unfinished

    def status(self, id: SampleId) -> SampleStatus:
        """The status of a sample that was dispatched."""
        assert id in self._records, f"sample {id} was never dispatched"
        return self._records[id].status

    def is_finished(self, id: SampleId) -> bool:
        """Whether a sample has its last token and its tensors."""
        assert id in self._records, f"sample {id} was never dispatched"
        return self._records[id].status in (_F, _USED)

    def has_left(self, id: SampleId) -> bool:
        """Whether a sample has left a stream, for whatever reason."""
        return self._records[id].left is not None

    def dispatch(
        self, samples: Iterable[Sample], status: SampleStatus = SampleStatus.QUEUED
    ) -> None:
        """Samples begin, or come from a checkpoint with a `status`."""
        assert status in (_Q, _P, _F), f"no sample begins as {status.value}"
        for sample in samples:
            assert sample.id not in self._records, f"sample {sample.id} was dispatched twice"
            self._records[sample.id] = SampleRecord(sample, status)
            self.num_dispatched += 1
            self._num_unfinished += status in _UNFINISHED

    def move(self, id: SampleId, status: SampleStatus) -> None:
        """Change a sample's status; one that the table lacks is a bug."""
        assert id in self._records, f"sample {id} was never dispatched"
        record = self._records[id]
        before = record.status
        assert status in _NEXT[before], f"sample {id} cannot be {status.value}: {before.value}"
        record.status = status
        self._num_unfinished += (status in _UNFINISHED) - (before in _UNFINISHED)

    def finish(self, stage: Stage, event: Finished) -> Sample:
        """Write a finished response, made by `stage`, into its sample's metadata."""
        self.move(event.id, _F)
        sample = self._records[event.id].sample
        sample.rank = event.rank
        sample.prompt_tokens = event.prompt_tokens
        sample.response_tokens = event.response_tokens
        sample.spans = event.spans
        sample.scalars |= {**event.scalars, "finish": event.finish}
        sample.tensors.update(set(stage.outputs) - set(stage.scalars), event.more_tensors)
        return sample

    def restart(self, id: SampleId, same_weights: bool = False) -> None:
        """A sample begins anew, without the fields that it had.

        By the `same_weights` it gets the same tokens, and its scalars stand: what has read them
        need not run again.
        """
        if self.status(id) is not _Q:
            self.move(id, _Q)
        sample = self._records[id].sample
        sample.rank, sample.spans = NO_RANK, ()
        sample.tensors.clear()
        if not same_weights:
            sample.prompt_tokens = sample.response_tokens = 0
            sample.scalars.clear()

    def withdraw(self, ids: Iterable[SampleId]) -> None:
        """These are as if they had never been dispatched: a later step begins their prompts again.

        Nothing has read them, and no instance decodes them.
        """
        for id in ids:
            status = self.status(id)
            assert status in (_Q, _P, _F), f"sample {id} cannot begin again: {status.value}"
            del self._records[id]
            self.num_dispatched -= 1
            self._num_unfinished -= status in _UNFINISHED

    def use(self, samples: Iterable[Sample]) -> None:
        """An update or a collect has read these; actor and critic may read the same."""
        for sample in samples:
            assert sample.id in self._records, f"sample {sample.id} was never dispatched"
            if self._records[sample.id].status is not _USED:
                self.move(sample.id, _USED)
            self._in_order_of_use[sample.id] = sample

    def leave(self, samples: Iterable[Sample], reason: DropReason, text: str) -> None:
        """These left a stream; the first reason counts."""
        for sample in samples:
            assert sample.id in self._records, f"sample {sample.id} was never dispatched"
            record = self._records[sample.id]
            record.left = record.left or Drop(reason, text)

    def come_back(self, ids: Iterable[SampleId]) -> None:
        """These are in their streams again: one of their prompt begins anew, so filters run."""
        for id in ids:
            self._records[id].left = None

    def settle(
        self, pending: Collection[SampleId] = ()
    ) -> tuple[list[Sample], dict[SampleId, Drop]]:
        """Close the step: the used samples in the order of use, the dropped ones with reasons.

        `pending` ones are neither yet: they belong to a later step.
        """
        used = list(self._in_order_of_use.values())
        self.use(used)  # some were made anew meanwhile
        dropped = {}
        for id, record in self._records.items():
            if record.status is not _USED and id not in pending:
                dropped[id] = record.left or UNUSED
                self.drop([id], dropped[id])
        return used, dropped

    def drop(self, ids: Iterable[SampleId], reason: Drop) -> None:
        """Nothing will use these."""
        for id in ids:
            self.move(id, _DROPPED)
            self._records[id].left = reason

    def forget(self, pending: Collection[SampleId] = ()) -> list[SampleId]:
        """Forget all but the `pending`, which a later step trains on; gives the forgotten ones.

        Samples left by a step that failed are dropped.
        """
        gone = {id: record for id, record in self._records.items() if id not in pending}
        ended = (_USED, _DROPPED)
        failed = [id for id, record in gone.items() if record.status not in ended]
        self.drop(failed, STEP_FAILED)
        self.num_step_failed += len(failed)
        for id in gone:
            del self._records[id]
        self._in_order_of_use.clear()
        return list(gone)


def phase_of(stage: Stage, scope: Scope | None) -> Phase | None:
    """The phase that a stage runs in; None is any. `scope` is that of a per-sample stage.

    The actor's own forward passes in an instance use the generation weights that are there.
    """
    if isinstance(stage, GenerateStage):
        return Phase.GENERATE
    if isinstance(stage, UpdateStage) or scope is Scope.WORLD:
        return Phase.TRAIN
    if scope is Scope.INSTANCE and stage.role == "actor":
        return Phase.GENERATE
    return None


def ready(stage: Stage, sample: Sample) -> bool:
    """Whether the sample has every field that a per-sample stage reads."""
    scalars, tensors = sample.scalars, sample.tensors
    return not [name for name in stage.inputs if name not in scalars and name not in tensors]


def generation_first(stages: Sequence[Stage]) -> list[Stage]:
    """The recipe's order with samples made first, so that ranks change phase as seldom as can be.

    Nothing moves across an update, since it changes the weights.
    """
    order: list[Stage] = []
    makers: list[Stage] = []
    rest: list[Stage] = []
    for stage in stages:
        if isinstance(stage, PromptsStage | SourceStage) and not stage.makes_more:
            makers.append(stage)
        else:
            rest.append(stage)
        if isinstance(stage, UpdateStage):
            order += makers + rest
            makers, rest = [], []
    return order + makers + rest


def before_take(graph: Graph) -> tuple[TakeStage | None, frozenset[str]]:
    """The graph's `take`, if any, and the names of the stages that run once per round for it."""
    take = next((s for s in graph.stages.values() if isinstance(s, TakeStage)), None)
    return take, graph.ancestors(take.name) if take else frozenset()


def sections(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Stretches whose samples are made together: each ends with updates or before a stage that
    makes more samples for those there are.
    """
    stretches: list[list[Stage]] = [[]]
    for stage in stages:
        trained = bool(stretches[-1]) and isinstance(stretches[-1][-1], UpdateStage)
        if stretches[-1] and (stage.makes_more or (trained and not isinstance(stage, UpdateStage))):
            stretches.append([])
        stretches[-1].append(stage)
    return [section for section in stretches if section]


def with_updates_together(stages: Iterable[Stage]) -> list[Stage | list[UpdateStage]]:
    """The stages in order: updates that follow each other as one list, any other alone."""
    together: list[Stage | list[UpdateStage]] = []
    for stage in stages:
        if not isinstance(stage, UpdateStage):
            together.append(stage)
        elif together and isinstance(together[-1], list):
            together[-1].append(stage)
        else:
            together.append([stage])
    return together


def wanted(
    stage: SourceStage, positions: Iterable[int], upstream: Sequence[Sample]
) -> dict[int, int]:
    """The number of samples that a stage makes, by prompt; `upstream` came to it.

    Raises ValueError where a recipe's function returns something else than a number of samples.
    """
    if stage.num_samples is not None:
        return dict.fromkeys(positions, stage.num_samples)
    assert isinstance(stage, GenerateStage)
    assert stage.count is not None
    field = stage.count
    counts = {group[0].id.prompt: group[0].number(field) for group in groups(upstream)}
    for count in counts.values():
        if count < 0 or count != int(count):
            raise ValueError(f"{stage.name!r}: got {field}={count}, wanted a whole number from 0")
    return {position: int(counts.get(position, 0)) for position in positions}


def new_samples(stage: SourceStage, numbers: Mapping[int, int]) -> list[list[Sample]]:
    """The samples that a stage makes: one list per prompt, in order of k."""
    return [
        [Sample(id=SampleId(position, stage.branch, k)) for k in range(number)]
        for position, number in numbers.items()
    ]


def sampling_of(stage: GenerateStage, default: Sampling) -> Sampling:
    """The run's sampling settings, overridden by the stage's."""
    overrides = asdict(stage.sampling)
    return replace(default, **{name: x for name, x in overrides.items() if x is not None})


def record_computed(stage: Stage, samples: dict[SampleId, Sample], event: Computed) -> None:
    """Write the results of a per-sample stage into the metadata of `event.ids`."""
    assert event.stage == stage.name, f"an event of {event.stage!r} while {stage.name!r} runs"
    missing = set(stage.outputs) - set(event.scalars) - set(event.tensors)
    assert not missing or not event.ids, f"stage {stage.name!r} did not make {sorted(missing)}"
    computed = [samples[id] for id in event.ids]
    for name, values in event.scalars.items():
        for sample, value in zip(computed, values, strict=True):
            sample.scalars[name] = value if type(value) in _KEPT_TYPES else _plain_scalar(value)
    if event.tensors:
        for sample in computed:
            sample.tensors.update(event.tensors)


def _plain_scalar(value: Any) -> Scalar:
    """A number of another type, as numpy has them, as a float."""
    return value if isinstance(value, str | int | list) else float(value)


def groups(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Samples by prompt, prompts and samples in the order they come."""
    by_prompt: dict[int, list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault(sample.id.prompt, []).append(sample)
    return list(by_prompt.values())
