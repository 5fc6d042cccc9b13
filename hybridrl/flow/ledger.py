"""Bookkeeping that every schedule shares: which samples there are, and what became of them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace

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
from hybridrl.flow.sample import Sample, SampleId


class Ledger:
    """What became of every sample of a step.

    States of a sample: dispatched -> used (trained on or collected) or dropped with a reason.
    Leaving a stream is not the end, since another stream may hold the sample: `leave` notes the
    reason, and `settle` drops what nothing has used by then.

    Invariants: an id is dispatched once; `settle` accounts for every id exactly once; a sample is
    never both used and dropped.

    Example: samples a, b are dispatched, a filter lets b go, the update reads a. Then `settle`
    gives a as used and {b: "filter: has_spread"} as dropped.
    """

    def __init__(self) -> None:
        self._samples: dict[SampleId, Sample] = {}
        self._used: dict[SampleId, Sample] = {}
        self._reasons: dict[SampleId, str] = {}

    @property
    def samples(self) -> tuple[Sample, ...]:
        """Every sample that was dispatched, in that order."""
        return tuple(self._samples.values())

    @property
    def ids(self) -> tuple[SampleId, ...]:
        """Every sample that was dispatched, in that order."""
        return tuple(self._samples)

    def dispatch(self, samples: Iterable[Sample]) -> None:
        """Samples begin."""
        for sample in samples:
            assert sample.id not in self._samples, f"sample {sample.id} was dispatched twice"
            self._samples[sample.id] = sample

    def use(self, samples: Iterable[Sample]) -> None:
        """An update or a collect has read these; actor and critic may read the same."""
        for sample in samples:
            assert sample.id in self._samples, f"sample {sample.id} was never dispatched"
            self._used[sample.id] = sample

    def leave(self, samples: Iterable[Sample], reason: str) -> None:
        """These left a stream; the first reason counts."""
        for sample in samples:
            assert sample.id in self._samples, f"sample {sample.id} was never dispatched"
            self._reasons.setdefault(sample.id, reason)

    def settle(
        self, unfinished: Collection[SampleId] = ()
    ) -> tuple[list[Sample], dict[SampleId, str]]:
        """Close the step: the used samples in the order of use, the dropped ones with reasons.

        `unfinished` ones do neither yet: they belong to the next step.
        """
        dropped = {}
        for id, sample in self._samples.items():
            if id not in self._used and id not in unfinished:
                sample.dropped = dropped[id] = self._reasons.get(id, "unused: no update reads it")
        return list(self._used.values()), dropped


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
    return all(sample.has(name) for name in stage.inputs)


def generation_first(stages: Sequence[Stage]) -> list[Stage]:
    """The recipe's order with samples made first, so that ranks change phase as seldom as can be.

    Nothing moves across an update, since it changes the weights.
    """
    order: list[Stage] = []
    made: list[Stage] = []
    rest: list[Stage] = []
    for stage in stages:
        if isinstance(stage, PromptsStage | SourceStage) and not stage.makes_more:
            made.append(stage)
        else:
            rest.append(stage)
        if isinstance(stage, UpdateStage):
            order += made + rest
            made, rest = [], []
    return order + made + rest


def before_take(graph: Graph) -> tuple[TakeStage | None, frozenset[str]]:
    """The graph's `take`, if any, and the names of the stages that run once per round for it."""
    take = next((s for s in graph.stages.values() if isinstance(s, TakeStage)), None)
    return take, graph.ancestors(take.name) if take else frozenset()


def sections(stages: Iterable[Stage]) -> list[list[Stage]]:
    """Stretches whose samples are made together: each ends with updates or before a stage that
    makes more samples for those there are.
    """
    found: list[list[Stage]] = [[]]
    for stage in stages:
        trained = bool(found[-1]) and isinstance(found[-1][-1], UpdateStage)
        if found[-1] and (stage.makes_more or (trained and not isinstance(stage, UpdateStage))):
            found.append([])
        found[-1].append(stage)
    return [section for section in found if section]


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
    """How many samples a stage makes, by prompt; `upstream` came to it.

    Raises ValueError where a recipe's function asks for what is no number of samples.
    """
    if stage.num_samples is not None:
        return dict.fromkeys(positions, stage.num_samples)
    assert isinstance(stage, GenerateStage)
    assert stage.count is not None
    field = stage.count
    counts = {group[0].id.prompt: float(group[0].scalars[field]) for group in groups(upstream)}
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
    """The run's sampling settings with what the stage says otherwise."""
    overrides = asdict(stage.sampling)
    return replace(default, **{name: x for name, x in overrides.items() if x is not None})


def record_finished(stage: Stage, sample: Sample, event: Finished) -> None:
    """Write a finished response into the sample's metadata."""
    assert sample.rank < 0, f"sample {sample.id} finished twice"
    sample.rank = event.rank
    sample.prompt_tokens = event.prompt_tokens
    sample.response_tokens = event.response_tokens
    sample.spans = event.spans
    sample.scalars["finish"] = event.finish
    sample.tensors.update(set(stage.outputs) - set(stage.scalars))


def record_computed(stage: Stage, samples: dict[SampleId, Sample], event: Computed) -> None:
    """Write what a per-sample stage has made into the metadata of `event.ids`."""
    assert event.stage == stage.name, f"an event of {event.stage!r} while {stage.name!r} runs"
    missing = set(stage.outputs) - set(event.scalars) - set(event.tensors)
    assert not missing or not event.ids, f"stage {stage.name!r} did not make {sorted(missing)}"
    for i, id in enumerate(event.ids):
        sample = samples[id]
        for name, values in event.scalars.items():
            value = values[i]
            sample.scalars[name] = value if isinstance(value, str | int) else float(value)
        sample.tensors.update(event.tensors)


def groups(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Samples by prompt, prompts and samples in the order they come."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.id.prompt, []).append(sample)
    return list(found.values())
