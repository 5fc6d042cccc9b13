"""Prompts that have begun and are not trained yet, with their samples, within and across steps."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from hybridrl.flow.executor import Parked, Sampling
from hybridrl.flow.graph import Graph, SourceStage
from hybridrl.flow.ledger import ON_INSTANCE, Drop, Ledger, SampleStatus
from hybridrl.flow.sample import NO_VERSION, Sample, SampleId
from hybridrl.flow.turns import OpenTurns
from hybridrl.schedule.base import PendingSample, Prompt


@dataclass(frozen=True, slots=True)
class CopiedSample:
    """The tokens so far of a sample that its instance goes on with; whether its turn has ended."""

    tokens: Parked
    waits: bool


@dataclass(frozen=True, slots=True)
class GenerationTask:
    """A sample to be made, from the beginning or from where it was parked.

    `total` response tokens are predicted, of which `tokens` are still to come. Without `sampling`
    it is the dataset's own answer. `copied` is for a checkpoint.
    """

    sample: Sample
    stage: SourceStage
    prompt: Any
    sampling: Sampling | None
    total: float
    tokens: float
    parked: Parked | None = None
    copied: CopiedSample | None = None

    @property
    def converses(self) -> bool:
        """Whether its response has turns, between which it waits."""
        return self.sampling is not None and self.sampling.max_turn_tokens > 0


class GroupStatus(Enum):
    """Status of a prompt that has begun; `BegunPrompts` has the table of transitions."""

    OPEN = "open"  # samples are to be made, or no step has taken it
    TAKEN = "taken"  # the present step trains on it


@dataclass(slots=True)
class BegunPrompt:
    """A prompt with its samples; `step` is the one in which they began.

    `version` is that of the weights that make them, once these are there; None where all instances
    have the same weights. `batch` orders prompts that the same weights make; -1: it is in none yet.
    `chosen` are the samples that have left each filter or join, and `compared` the stages across
    the group that have run (`ReadyTracker`).
    """

    prompt: Any
    step: int
    tasks: dict[SampleId, GenerationTask] = field(default_factory=dict)
    status: GroupStatus = GroupStatus.OPEN
    chosen: dict[str, list[Sample]] = field(default_factory=dict)
    compared: set[str] = field(default_factory=set)
    version: int | None = None
    batch: int = -1

    def samples(self, maker: str) -> list[Sample]:
        """Return its samples that this stage makes, in training order."""
        return [task.sample for task in self.tasks.values() if task.stage.name == maker]


class BegunPrompts:
    """The prompts that have begun, by position, until their step has trained on them.

    | from  | to    | when                                                   |
    |-------|-------|--------------------------------------------------------|
    | open  | taken | a round ends, and its step is to train on the prompt   |
    | taken | open  | a later stage of the step makes more samples of it     |
    | taken | open  | an instance has died with samples of the step          |

    A prompt that is withdrawn, or whose step has ended, is in it no more. Whether an open one is
    complete follows from its samples, since a death may undo it.

    Example, one prompt wanted a step: a and b begin. b is complete first, and taken. The next step
    forgets b, goes on with a, and begins c.
    """

    def __init__(self, graph: Graph, ledger: Ledger, turns: OpenTurns) -> None:
        self.graph, self.ledger, self.turns = graph, ledger, turns
        self._groups: dict[int, BegunPrompt] = {}

    def __getitem__(self, position: int) -> BegunPrompt:
        return self._groups[position]

    def task(self, id: SampleId) -> GenerationTask:
        """Return a sample's task."""
        return self._groups[id.prompt].tasks[id]

    @property
    def tasks(self) -> list[GenerationTask]:
        """All samples of prompts that have begun."""
        return tasks_of(self._groups)

    @property
    def open(self) -> dict[int, BegunPrompt]:
        """The open groups in the order in which they began."""
        return self._with(GroupStatus.OPEN)

    @property
    def taken(self) -> dict[int, BegunPrompt]:
        """The groups that the present step trains on."""
        return self._with(GroupStatus.TAKEN)

    def begin(self, prompts: Iterable[Prompt], step: int, tasks: Iterable[GenerationTask]) -> None:
        """These prompts' samples begin: the first of them, or more."""
        for position, prompt in prompts:
            self._groups.setdefault(position, BegunPrompt(prompt, step))
        for task in tasks:
            self._groups[task.sample.id.prompt].status = GroupStatus.OPEN
            self.update([task])

    def update(self, tasks: Iterable[GenerationTask]) -> None:
        """Samples have come to their prompts, or are to be made otherwise."""
        for task in tasks:
            self._groups[task.sample.id.prompt].tasks[task.sample.id] = task

    def is_complete(self, position: int) -> bool:
        """Whether all samples of a prompt are finished."""
        return all(map(self.ledger.is_finished, self._groups[position].tasks))

    def complete(self) -> list[int]:
        """Positions of the open ones whose samples are all finished, the oldest first."""
        return sorted(filter(self.is_complete, self.open))

    def take(self, positions: Iterable[int]) -> None:
        """The present step trains on these."""
        for position in positions:
            group = self._groups[position]
            assert group.status is GroupStatus.OPEN, f"prompt {position} is taken twice"
            group.status = GroupStatus.TAKEN

    def reopen(self, positions: Iterable[int]) -> None:
        """Samples of these are to be made again, before the present step trains on them."""
        for position in positions:
            self._groups[position].status = GroupStatus.OPEN

    def withdraw(self, positions: Iterable[int]) -> None:
        """These begin again another time, as if they never had, or are dropped."""
        for position in positions:
            assert self._groups.pop(position).status is GroupStatus.OPEN, position

    def drop_open(self, reason: Drop) -> dict[SampleId, Drop]:
        """No step trains on the open ones: their samples are dropped; gives these."""
        dropped = {task.sample.id: reason for task in tasks_of(self.open)}
        self.ledger.drop(dropped, reason)
        return dropped

    def clear(self) -> None:
        """No prompt has begun."""
        self._groups.clear()

    def end_step(self) -> None:
        """The step that has taken groups is over."""
        self._groups = self.open

    def _with(self, status: GroupStatus) -> dict[int, BegunPrompt]:
        return {p: group for p, group in self._groups.items() if group.status is status}

    # -- between steps -------------------------------------------------------------------------

    def pending(self) -> tuple[PendingSample, ...]:
        """Samples of open prompts that are finished, parked, or copied."""
        finished = SampleStatus.FINISHED
        return tuple(
            PendingSample(
                task.sample.id,
                task.prompt,
                task.sampling,
                task.sample.rank,
                self.parked(task),
                self._waits(task),
            )
            for task in tasks_of(self.open)
            if self.ledger.status(task.sample.id) is finished or self.parked(task) is not None
        )

    def parked(self, task: GenerationTask) -> Parked | None:
        """The tokens so far of a sample that is parked, or of which there is a copy."""
        status = self.ledger.status(task.sample.id)
        if status in ON_INSTANCE:
            return None if task.copied is None else task.copied.tokens
        return task.parked if status is SampleStatus.PARKED else None

    def _waits(self, task: GenerationTask) -> bool:
        """Whether the turn of a sample had ended when it was parked or copied."""
        status = self.ledger.status(task.sample.id)
        if status in ON_INSTANCE and task.copied is not None:
            return task.copied.waits
        return self.turns.is_open(task.sample.id)

    def copied(self, copies: Parked) -> None:
        """These samples, which go on, have had so many tokens."""
        for id in copies.ids:
            copied = CopiedSample(copies, self.turns.is_open(id))
            self.update([replace(self.task(id), copied=copied)])

    def drop_copies(self) -> None:
        """Copies are of no use: samples have gone on since."""
        self.update(replace(task, copied=None) for task in self.tasks if task.copied is not None)

    def restore_parked(self, state: Any) -> None:
        """Set the reference to the parked tokens of a checkpoint."""
        held = [task for task in tasks_of(self.open) if self.parked(task) is not None]
        assert held, "nothing is parked"
        assert held[0].parked is not None
        parked = replace(held[0].parked, state=state)
        self.update(replace(task, parked=parked) for task in held)

    def to_json(self) -> list[dict[str, Any]]:
        """The open prompts in plain JSON types."""
        return [
            {
                "position": position,
                "step": group.step,
                "jobs": [self._task_to_json(task) for task in group.tasks.values()],
            }
            for position, group in self.open.items()
        ]

    def _task_to_json(self, task: GenerationTask) -> dict[str, Any]:
        """`parked` counts the tokens, of prompt and response, of a parked sample.

        `waits` says that its turn has ended: once its conversation was replayed, a reply comes. One
        that an instance holds begins anew, unless there is a copy.
        """
        parked = self.parked(task)
        return {
            "sample": task.sample.to_json(),
            "stage": task.stage.name,
            "total": task.total,
            "tokens": task.tokens,
            "parked": None if parked is None else parked.tokens[parked.ids.index(task.sample.id)],
            "waits": parked is not None and self._waits(task),
        }

    def load(
        self,
        records: Sequence[Mapping[str, Any]],
        prompt_at: Callable[[int], Any],
        ranks: range,
        sampling: Callable[[SourceStage], Sampling | None],
    ) -> None:
        """Take up what `to_json` gave; the run may continue with fewer ranks."""
        tokens = {
            SampleId.read(record["sample"]["id"]): record["parked"]
            for group in records
            for record in group["jobs"]
            if record["parked"] is not None
        }
        parked = Parked(tuple(tokens), tuple(tokens.values()), NO_VERSION, None)
        for group in records:
            position = group["position"]
            prompt = prompt_at(position)
            tasks = [self._load_task(x, prompt, parked, ranks, sampling) for x in group["jobs"]]
            self.begin([(position, prompt)], group["step"], tasks)

    def _load_task(
        self,
        record: Mapping[str, Any],
        prompt: Any,
        parked: Parked,
        ranks: range,
        sampling: Callable[[SourceStage], Sampling | None],
    ) -> GenerationTask:
        """A task as it was written; the ledger takes its sample with the status that it had."""
        sample, stage = Sample.from_json(record["sample"]), self.graph.stages[record["stage"]]
        assert isinstance(stage, SourceStage), stage
        task = GenerationTask(
            sample, stage, prompt, sampling(stage), record["total"], record["tokens"]
        )
        if record["parked"] is not None:
            status, task = SampleStatus.PARKED, replace(task, parked=parked)
        elif sample.tensors:
            status = SampleStatus.FINISHED
            if sample.rank not in ranks:
                sample.rank = ranks[sample.rank % len(ranks)]
        else:
            status = SampleStatus.QUEUED
        self.ledger.dispatch([sample], status)
        if record.get("waits"):  # an older checkpoint has no conversations
            self.turns.wait_for([sample.id])
        return task


def begun_anew(
    records: Sequence[Mapping[str, Any]], lost: Collection[SampleId], group_fields: Collection[str]
) -> list[dict[str, Any]]:
    """`BegunPrompts.to_json` where these samples have no token yet.

    `group_fields`, which follow from those of all samples of a prompt, go with them.
    """
    prompts = {id.prompt for id in lost}

    def anew(record: Mapping[str, Any]) -> Mapping[str, Any]:
        sample = Sample.from_json(record["sample"])
        id = sample.id
        if id not in lost:
            if id.prompt in prompts:
                sample.forget(group_fields)
            return {**record, "sample": sample.to_json()}
        begins = {"sample": Sample(id=id).to_json(), "parked": None, "waits": False}
        return {**record, **begins, "tokens": record["total"]}

    return [{**group, "jobs": [anew(record) for record in group["jobs"]]} for group in records]


def tasks_of(groups: Mapping[int, BegunPrompt]) -> list[GenerationTask]:
    """All samples of these groups."""
    return [task for group in groups.values() for task in group.tasks.values()]
