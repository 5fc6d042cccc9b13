"""A problem as numbered operations, for the loops of the search."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hybridrl.pipelines.problem import PassKind, PipelineAction, PipelinePlan, PipelineProblem

Edges = list[tuple[tuple[int, float], ...]]
"""For each operation other operations, with the seconds between the two."""


@dataclass(slots=True)
class Operations:
    """Actions by number, and what the loops of the search read of them.

    In `mirrored` operations time runs backward: what is last comes first, and what frees memory
    takes it. Both kinds of loop then serve for both directions.
    """

    actions: list[PipelineAction]
    num_ranks: int
    limits: list[float]
    """Bytes that each rank may keep."""
    rank: list[int]
    seconds: list[float]
    takes: list[float]
    """Bytes that it keeps from its start on."""
    frees: list[float]
    """Bytes that are free from its end on."""
    needs: Edges
    """Operations that end before it starts."""
    feeds: Edges
    queues: list[list[int]]
    """Operations of a chunk and a kind, in their order."""
    in_flight: list[list[tuple[int, int]]]
    """By model and chunk, the queue that takes memory and the queue that frees it."""
    queue: list[int] = field(default_factory=list)
    """The queue of each operation."""
    by_rank: list[list[int]] = field(default_factory=list)
    """The queues of each rank."""

    def __post_init__(self) -> None:
        self.queue = [0] * len(self.actions)
        self.by_rank = [[] for _ in range(self.num_ranks)]
        for number, queue in enumerate(self.queues):
            self.by_rank[self.rank[queue[0]]].append(number)
            for i in queue:
                self.queue[i] = number

    @classmethod
    def of(cls, problem: PipelineProblem) -> "Operations":
        """Number the actions of a problem."""
        actions = list(problem.actions())
        numbers = {action: i for i, action in enumerate(actions)}
        rank = [problem.rank(action) for action in actions]
        needs: list[list[tuple[int, float]]] = [[] for _ in actions]
        feeds: list[list[tuple[int, float]]] = [[] for _ in actions]
        takes, frees = [0.0] * len(actions), [0.0] * len(actions)
        queues: dict[tuple[int, PassKind, int], list[int]] = {}
        for i, action in enumerate(actions):
            model = problem.models[action.model]
            queues.setdefault((action.model, action.kind, action.chunk), []).append(i)
            needed = problem.needs(action)
            if needed is not None:
                j = numbers[needed]
                delay = problem.delay_s(rank[j], rank[i])
                needs[i].append((j, delay))
                feeds[j].append((i, delay))
            if action.kind is PassKind.forward:
                takes[i] = model.kept_bytes(action.chunk, action.micro_batch)
            if model.backward and action.kind is model.backward[-1]:
                frees[i] = model.kept_bytes(action.chunk, action.micro_batch)
        return cls(
            actions=actions,
            num_ranks=problem.num_ranks,
            # Sums of bytes in another order differ in their last bits.
            limits=[limit * (1 + 1e-9) for limit in problem.limits],
            rank=rank,
            seconds=[problem.seconds(action) for action in actions],
            takes=takes,
            frees=frees,
            needs=[tuple(edges) for edges in needs],
            feeds=[tuple(edges) for edges in feeds],
            queues=list(queues.values()),
            in_flight=_in_flight(problem, list(queues)),
        )

    def mirrored(self) -> "Operations":
        """These operations with time backward: a plan of theirs has each list reversed."""
        return Operations(
            actions=self.actions,
            num_ranks=self.num_ranks,
            limits=self.limits,
            rank=self.rank,
            seconds=self.seconds,
            takes=self.frees,
            frees=self.takes,
            needs=self.feeds,
            feeds=self.needs,
            queues=[queue[::-1] for queue in self.queues],
            in_flight=[[(free, take) for take, free in pairs] for pairs in self.in_flight],
        )

    def heads(self) -> list[float]:
        """The earliest start of each operation, if no rank were ever busy with another queue."""
        following = [-1] * len(self.actions)
        for queue in self.queues:
            for i, j in pairwise(queue):
                following[i] = j
        return self.earliest_starts(following)

    def earliest_starts(self, following: Sequence[int]) -> list[float]:
        """The earliest start of each operation, where `following[i]` waits for i; -1: none does."""
        waits = [len(edges) for edges in self.needs]
        for j in following:
            if j >= 0:
                waits[j] += 1
        starts = [0.0] * len(waits)
        todo = [i for i, count in enumerate(waits) if not count]
        for i in todo:
            end, after = starts[i] + self.seconds[i], following[i]
            for j, delay in self.feeds[i] if after < 0 else (*self.feeds[i], (after, 0.0)):
                starts[j] = max(starts[j], end + delay)
                waits[j] -= 1
                if not waits[j]:
                    todo.append(j)
        assert len(todo) == len(waits), "a circle"
        return starts

    def plan(self, lists: Sequence[Sequence[int]]) -> PipelinePlan:
        """Lists of numbers as actions."""
        return [[self.actions[i] for i in numbers] for numbers in lists]


def _in_flight(
    problem: PipelineProblem, queues: Sequence[tuple[int, PassKind, int]]
) -> list[list[tuple[int, int]]]:
    numbers = {queue: number for number, queue in enumerate(queues)}
    return [
        [
            (numbers[index, model.kinds[0], chunk], numbers[index, model.kinds[-1], chunk])
            for chunk in range(len(model.ranks))
        ]
        for index, model in enumerate(problem.models)
        if model.costs
    ]
