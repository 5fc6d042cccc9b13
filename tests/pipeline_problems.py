"""Random problems, and all plans of a small one."""

import math
import random
from collections.abc import Sequence

from hybridrl.pipelines.operations import Operations
from hybridrl.pipelines.problem import PassCosts, PassKind, PipelinedModel, PipelineProblem

BACKWARD = (
    (PassKind.backward,),
    (PassKind.backward_input, PassKind.backward_weights),
    (),
)


def random_model(
    rng: random.Random, name: str, ranks: Sequence[int], micro_batches: int
) -> PipelinedModel:
    """Ragged costs, whole or of many digits; a model that trains whole or in halves, or scores."""
    unit = rng.choice([1.0, 1.7e-9])

    def costs() -> PassCosts:
        return PassCosts(
            forward_s=rng.randint(1, 5) * unit,
            backward_s=rng.randint(1, 9) * unit,
            weights_s=rng.randint(1, 5) * unit,
            kept_bytes=rng.randint(1, 4),
        )

    return PipelinedModel(
        name=name,
        ranks=tuple(ranks),
        costs=[[costs() for _ in ranks] for _ in range(micro_batches)],
        backward=rng.choices(BACKWARD, (3, 2, 1))[0],
    )


def random_problem(
    rng: random.Random, *, num_ranks: int, most: int, by_rank: bool = False
) -> PipelineProblem:
    """One to three models in either direction, whole, zigzag or repeated on halves of the ranks.

    With `by_rank` each rank has its own limit of memory.
    """
    models: list[PipelinedModel] = []
    for index in range(rng.randint(1, 3)):
        ranks = list(range(num_ranks))
        if rng.random() < 0.5:
            ranks.reverse()
        shapes = [[ranks], [ranks + ranks[::-1]]]
        if num_ranks % 2 == 0:
            shapes.append([ranks[: num_ranks // 2], ranks[num_ranks // 2 :]])
        micro_batches = rng.randint(1, most)
        for own in rng.choice(shapes):
            models.append(random_model(rng, f"model{index}", own, micro_batches))
    return _limited(rng, models, num_ranks, by_rank)


def small_problem(rng: random.Random, by_rank: bool = False) -> PipelineProblem:
    """Two models of two chunks, of at most 14 actions; `by_rank` as above."""
    while True:
        models = [
            random_model(rng, name, rng.choice([(0, 1), (1, 0)]), rng.randint(1, 2))
            for name in ("actor", "critic")
        ]
        problem = _limited(rng, models, 2, by_rank)
        if 8 <= len(list(problem.actions())) <= 14:
            return problem


def _limited(
    rng: random.Random, models: Sequence[PipelinedModel], num_ranks: int, by_rank: bool
) -> PipelineProblem:
    """In most cases with a limit between the least that is possible and twice as much.

    With `by_rank` each rank has its own, or none.
    """
    least = [
        max(
            sum(model.kept_bytes(chunk, number) for chunk, r in enumerate(model.ranks) if r == rank)
            for model in models
            for number in range(len(model.costs))
        )
        for rank in range(num_ranks)
    ]
    limit: float | list[float] = math.inf
    if rng.random() < 0.7:
        limit = max(least) * rng.choice([1.0, 1.5, 2.0])
        if by_rank:
            limit = [most * rng.choice([1.0, 1.5, 2.0, math.inf]) for most in least]
    return PipelineProblem(
        models=models, num_ranks=num_ranks, send_s=rng.choice([0.0, 0.0, 1.0]), limit_bytes=limit
    )


def shortest(problem: PipelineProblem) -> float:
    """The seconds of the best plan, by trying all.

    Operations are appended to their ranks in every possible order. Of two ways to the same set of
    operations, one is dropped if no rank and no result is earlier there. So is what cannot end
    sooner than the best until now.
    """
    ops = Operations.of(problem)
    tails = ops.mirrored().heads()
    reached: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    best = math.inf

    def visit(places: tuple[int, ...], free: tuple[float, ...], ends: dict[int, float]) -> None:
        nonlocal best
        if len(ends) == len(ops.actions):
            best = min(best, max(free))
            return
        # What later operations can still read.
        open_ends = tuple(
            ends[i] for i in sorted(ends) if any(j not in ends for j, _ in ops.feeds[i])
        )
        times = (*free, *open_ends)
        others = reached.setdefault(places, [])
        if any(all(a <= b for a, b in zip(other, times, strict=True)) for other in others):
            return
        others.append(times)
        kept = [0.0] * ops.num_ranks
        for i in ends:
            kept[ops.rank[i]] += ops.takes[i] - ops.frees[i]
        for number, queue in enumerate(ops.queues):
            if places[number] == len(queue):
                continue
            i = queue[places[number]]
            rank = ops.rank[i]
            if any(j not in ends for j, _ in ops.needs[i]):
                continue
            if kept[rank] + ops.takes[i] > ops.limits[rank]:
                continue
            start = max([free[rank], *(ends[j] + delay for j, delay in ops.needs[i])])
            end = start + ops.seconds[i]
            if end + tails[i] >= best:
                continue
            visit(
                (*places[:number], places[number] + 1, *places[number + 1 :]),
                (*free[:rank], end, *free[rank + 1 :]),
                ends | {i: end},
            )

    visit((0,) * len(ops.queues), (0.0,) * ops.num_ranks, {})
    return best
