"""When a sample may enter a stage, prompt by prompt, while others are still generated."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

from hybridrl.flow.barriers import run_barrier
from hybridrl.flow.early_updates import EarlySettings, EarlyUpdate, early_update
from hybridrl.flow.executor import Phase, StagePlaces
from hybridrl.flow.graph import (
    CHOOSERS,
    ByBatchStage,
    ByGroupStage,
    ComputeStage,
    FilterStage,
    Graph,
    JoinStage,
    JudgedStage,
    PromptsStage,
    SourceStage,
    Stage,
    gate_of,
)
from hybridrl.flow.ledger import generation_first, phase_of, ready, sections
from hybridrl.flow.sample import Sample
from hybridrl.schedule.groups import BegunPrompts


class ReadyTracker:
    """The early stages of a graph, run by prompt instead of by batch.

    A sample has left a maker when it is finished. A chooser (filter, judged, join) runs for a
    prompt when all of its samples have come to it. A per-sample stage may start on a sample that
    has left the last maker or chooser before it and has the fields that it reads. Other per-sample
    stages before it need not have run.

    Invariants: a chooser runs once for a prompt, on samples in training order, so it chooses the
    same as from the whole batch. A per-sample stage runs once on each sample that comes to it. If a
    sample is made anew they run again (`undo`). What choosers and `by_group` have done for a prompt
    is noted there (`BegunPrompt`), so that it ends with it.

    Example of generate, score, filter, reference: sample 3.0 is scored when it is finished. When
    3.1 is scored too, the filter keeps both. Then both wait for the reference.
    """

    def __init__(
        self, graph: Graph, makers: Sequence[Stage], early: Sequence[Stage], groups: BegunPrompts
    ) -> None:
        self.graph, self.groups, self.ledger = graph, groups, groups.ledger
        self.computes = [stage for stage in early if isinstance(stage, ComputeStage)]
        self._choosers = [stage for stage in early if isinstance(stage, CHOOSERS)]
        self._by_group = [stage for stage in early if isinstance(stage, ByGroupStage)]
        self._barriers = [s for s in early if isinstance(s, (*CHOOSERS, ByGroupStage))]
        self._makers, self._order = {stage.name: stage for stage in makers}, list(early)
        self._gates = {
            name: gate_of(graph, stage)
            for name, stage in graph.stages.items()
            if not isinstance(stage, PromptsStage)
        }

    def choose(self, prompt: int) -> None:
        """Run every chooser and `by_group` that can run for `prompt` now; in the recipe's order.

        A sample that two choosers leave out has the first one's reason.
        """
        for stage in self._barriers:
            if isinstance(stage, ByGroupStage):
                self._compare(stage, prompt)
                continue
            if stage.name in self.groups[prompt].chosen:
                continue
            sides = [self.left(name, prompt) for name in stage.upstream]
            if any(side is None for side in sides):
                return
            samples, *others = (side or [] for side in sides)
            missing = any(not s.has(x) for s in samples for x in _read(stage))
            if missing or any(
                not s.has(x) for other in others for s in other for x in scalars_of_partner(stage)
            ):
                return
            partners = others[0] if others else []
            chosen = run_barrier(stage, samples, partners, self.ledger)
            self.groups[prompt].chosen[stage.name] = chosen

    def _compare(self, stage: ByGroupStage, prompt: int) -> None:
        """Run a `by_group` on the samples of `prompt`, once all that come to it have its inputs."""
        samples, compared = self.left(stage.name, prompt), self.groups[prompt].compared
        if stage.name in compared or samples is None:
            return
        if all(ready(stage, sample) for sample in samples):
            compared.add(stage.name)
            run_barrier(stage, samples, [], self.ledger)

    def undo(self, prompt: int) -> frozenset[str]:
        """A sample of `prompt` begins anew: what was chosen and compared is not, and fields go.

        Gives the fields that follow from those of all samples of the prompt; no sample has them.
        """
        group = self.groups[prompt]
        group.chosen.clear()
        group.compared.clear()
        for task in group.tasks.values():
            task.sample.forget(self.group_fields)
        return self.group_fields

    @cached_property
    def group_fields(self) -> frozenset[str]:
        """Fields that early stages make of a sample from those of others of its prompt."""
        fields = set[str]()
        for stage in self._order:
            across = isinstance(stage, ByGroupStage | JoinStage) or (
                isinstance(stage, ComputeStage) and stage.whole_groups
            )
            if across or not fields.isdisjoint(stage.inputs):
                fields |= {*stage.outputs}
        return frozenset(fields)

    def startable(self, prompt: int) -> Iterator[tuple[Stage, list[Sample]]]:
        """The per-sample stages that can run, or are running, on samples of `prompt`.

        One of whole groups is given all of the prompt's samples, or none.
        """
        group, entered = self.groups[prompt], dict[str, list[Sample]]()
        for stage in self.computes:
            gate = self._gates[stage.name]
            if gate not in entered:  # most stages have the same
                came = group.samples(gate) if gate in self._makers else group.chosen.get(gate, [])
                entered[gate] = [s for s in came if self._entered(s)]
            todo = [s for s in entered[gate] if not done(stage, s) and ready(stage, s)]
            if stage.whole_groups and todo:
                able = [s for s in entered[gate] if ready(stage, s)]
                todo = able if able == self.left(stage.name, prompt) else []
            if todo:
                yield stage, todo

    def open_stages(self, prompts: Iterable[int]) -> list[str]:
        """Stages that have not had all that comes to them; for the check at the end."""
        prompts = list(prompts)
        groups = [self.groups[prompt] for prompt in prompts]
        waiting = [s.name for s in self._choosers if any(s.name not in g.chosen for g in groups)]
        waiting += [s.name for s in self._by_group if any(s.name not in g.compared for g in groups)]
        for stage in self.computes:
            left = [self.left(stage.name, prompt) for prompt in prompts]
            if any(one is None or not all(done(stage, s) for s in one) for one in left):
                waiting.append(stage.name)
        return waiting

    def take(self, prompts: Sequence[int]) -> dict[str, list[Sample]]:
        """The samples that have left each maker and early stage, in training order.

        All of it must be there.
        """
        taken: dict[str, list[Sample]] = {}
        for stage in (*self._makers.values(), *self._order):
            taken[stage.name] = []
            for prompt in prompts:
                left = self.left(stage.name, prompt)
                assert left is not None, (stage.name, prompt)
                taken[stage.name] += left
        return taken

    def left(self, name: str, prompt: int) -> list[Sample] | None:
        """The samples that have left the gate of stage `name`; None if they are not known yet."""
        gate = self._gates[name]
        if gate not in self._makers:
            return self.groups[prompt].chosen.get(gate)
        group = self.groups[prompt].samples(gate)
        if not all(self.ledger.is_finished(sample.id) for sample in group):
            return None
        return [sample for sample in group if self._entered(sample)]

    def _entered(self, sample: Sample) -> bool:
        """Whether the engine has finished a sample and not given it up."""
        return self.ledger.is_finished(sample.id) and sample.scalars["finish"] != "abort"


def early_stages(
    graph: Graph, stages: Sequence[Stage], places: StagePlaces, by_group: bool = False
) -> list[Stage]:
    """The stages among `stages` that can run while samples are being made.

    Per-sample stages that do not need the training shards, and filters and joins between them. They
    read only fields of a maker among `stages` and of other early stages. With `by_group` also the
    stages of that kind: for a schedule that has a use for their results before the batch is there.

    Example: of generate, score, filter by reward, reference log-probabilities, by_group, map over
    the advantage, update, these are score, filter and reference. With `by_group` they are all but
    the update.
    """
    known: dict[str, set[str]] = {}  # a stage's fields, as far as early stages go
    early: list[Stage] = []
    late_chooser = False  # none may overtake another: the first reason counts
    for stage in stages:
        if isinstance(stage, SourceStage):
            known[stage.name] = set(stage.outputs)
            continue
        upstream = [known.get(name) for name in stage.upstream]
        if isinstance(stage, PromptsStage) or any(fields is None for fields in upstream):
            late_chooser |= isinstance(stage, CHOOSERS)
            continue
        fields, *others = (set(names or ()) for names in upstream)
        known[stage.name] = fields
        if isinstance(stage, ComputeStage):
            phase = phase_of(stage, places.scope(stage))
            able = phase in (None, Phase.GENERATE) and fields.issuperset(stage.inputs)
        elif isinstance(stage, CHOOSERS):
            able = fields.issuperset(_read(stage)) and all(
                o.issuperset(scalars_of_partner(stage)) for o in others
            )
        elif by_group and isinstance(stage, ByGroupStage):
            able = fields.issuperset(stage.inputs)
        else:
            # Of the stages across prompts only `take` chooses; the others' results come too late.
            if not isinstance(stage, ByGroupStage | ByBatchStage):
                del known[stage.name]
            continue
        if able:
            early.append(stage)
            known[stage.name] |= set(stage.outputs)
        elif isinstance(stage, CHOOSERS):
            late_chooser = True
            del known[stage.name]
    return early


def early_updates(
    graph: Graph, places: StagePlaces, settings: EarlySettings
) -> dict[str, EarlyUpdate]:
    """The update of each section that may begin early, by the name of its first stage."""
    updates = {}
    for section in sections(generation_first(list(graph.stages.values()))):
        streamed = {stage.name for stage in early_stages(graph, section, places, by_group=True)}
        updates[section[0].name] = early_update(graph, section, streamed, places, settings)
    return updates


def scalars_of_partner(stage: Stage) -> list[str]:
    """The scalars that a join reads on its second stream."""
    if not isinstance(stage, JoinStage):
        return []
    return [name.removeprefix(stage.prefix) for name in stage.outputs]


def done(stage: Stage, sample: Sample) -> bool:
    """Whether a per-sample stage has run on a sample."""
    scalars, tensors = sample.scalars, sample.tensors
    return not [name for name in stage.outputs if name not in scalars and name not in tensors]


def _read(stage: Stage) -> Sequence[str]:
    return stage.inputs if isinstance(stage, FilterStage | JudgedStage) else ()
