"""What a plan takes: seconds, bytes, and the least that any plan takes."""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass

from hybridrl.pipelines.operations import Operations
from hybridrl.pipelines.problem import PassKind, PipelineAction, PipelinePlan, PipelineProblem


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanTimes:
    """When each action starts, and the most that each rank keeps."""

    starts: Mapping[PipelineAction, float]
    seconds: float
    """The end of the last action."""
    busy_s: tuple[float, ...]
    """What each rank computes."""
    peak_bytes: tuple[float, ...]
    """By rank."""


def evaluate(problem: PipelineProblem, plan: PipelinePlan) -> PlanTimes:
    """Start every action as soon as its rank and its input are there.

    Raises ValueError if the plan breaks an invariant (`problem.py`): the rank, and the action.
    """
    _check_order(problem, plan)
    # each rank runs until it waits for an action, and again when that has ended
    starts: dict[PipelineAction, float] = {}
    ends: dict[PipelineAction, float] = {}
    free = [0.0] * problem.num_ranks
    places = [0] * problem.num_ranks
    waiting: dict[PipelineAction, int] = {}  # the rank that waits for an action
    todo = list(range(problem.num_ranks))
    while todo:
        rank = todo.pop()
        while places[rank] < len(plan[rank]):
            action = plan[rank][places[rank]]
            needed = problem.needs(action)
            start = free[rank]
            if needed is not None:
                if needed not in ends:
                    waiting[needed] = rank
                    break
                delay = problem.delay_s(problem.rank(needed), rank)
                start = max(start, ends[needed] + delay)
            starts[action] = start
            free[rank] = ends[action] = start + problem.seconds(action)
            places[rank] += 1
            if action in waiting:
                todo.append(waiting.pop(action))
    # a circle
    for rank, place in enumerate(places):
        if place < len(plan[rank]):
            action = plan[rank][place]
            raise ValueError(
                f"rank {rank} waits for ever: {action} needs {problem.needs(action)}, "
                "which comes after it"
            )
    busy = tuple(sum(problem.seconds(action) for action in actions) for actions in plan)
    return PlanTimes(
        starts=starts, seconds=max(free, default=0.0), busy_s=busy, peak_bytes=_peaks(problem, plan)
    )


def _check_order(problem: PipelineProblem, plan: PipelinePlan) -> None:
    """Each action once, on its rank, in the order of the micro-batches."""
    if len(plan) != problem.num_ranks:
        raise ValueError(f"a plan of {len(plan)} ranks, wanted {problem.num_ranks}")
    following: dict[tuple[int, PassKind, int], int] = {}
    for rank, actions in enumerate(plan):
        for action in actions:
            if problem.rank(action) != rank:
                raise ValueError(f"rank {rank}: {action} is of rank {problem.rank(action)}")
            queue = action[:3]
            if action.micro_batch != following.get(queue, 0):
                raise ValueError(
                    f"rank {rank}: {action}, wanted micro-batch {following.get(queue, 0)}"
                )
            following[queue] = action.micro_batch + 1
    wanted = sum(1 for _ in problem.actions())
    if sum(map(len, plan)) != wanted:
        raise ValueError(f"{sum(map(len, plan))} actions, wanted {wanted}")


def _peaks(problem: PipelineProblem, plan: PipelinePlan) -> tuple[float, ...]:
    peaks = []
    for rank, (actions, limit) in enumerate(zip(plan, problem.limits, strict=True)):
        kept = peak = 0.0
        for action in actions:
            model = problem.models[action.model]
            size = model.kept_bytes(action.chunk, action.micro_batch)
            if action.kind is PassKind.forward:
                kept += size
                if kept > limit * (1 + 1e-9):
                    raise ValueError(f"rank {rank}: {action} makes {kept:g} bytes of {limit:g}")
            peak = max(peak, kept)
            if model.backward and action.kind is model.backward[-1]:
                kept -= size
        peaks.append(peak)
    return tuple(peaks)


def lower_bound(problem: PipelineProblem) -> float:
    """Seconds that no plan is below: of each rank alone, its passes may be interrupted.

    A pass cannot start before the earliest arrival of its input (its head) and leaves at least the
    passes after it (its tail). The least time of one rank under both is Jackson's preemptive
    schedule (Carlier, European Journal of Operational Research 11, 1982): always the pass with the
    longest tail. Memory is left out.
    """
    operations = Operations.of(problem)
    heads = operations.heads()
    tails = operations.mirrored().heads()
    bound = 0.0
    for rank in range(problem.num_ranks):
        own = [i for queue in operations.by_rank[rank] for i in operations.queues[queue]]
        passes = sorted((heads[i], operations.seconds[i], tails[i]) for i in own)
        bound = max(bound, _one_rank(passes))
    return bound


def _one_rank(passes: list[tuple[float, float, float]]) -> float:
    """Jackson's preemptive schedule of passes (head, seconds, tail), sorted by head."""
    now = latest = 0.0
    waiting: list[tuple[float, float]] = []  # (-tail, seconds left)
    arrived = 0
    while waiting or arrived < len(passes):
        if not waiting:
            now = max(now, passes[arrived][0])
        while arrived < len(passes) and passes[arrived][0] <= now:
            _, seconds, tail = passes[arrived]
            heapq.heappush(waiting, (-tail, seconds))
            arrived += 1
        tail, seconds = heapq.heappop(waiting)
        until = passes[arrived][0] if arrived < len(passes) else math.inf
        if now + seconds > until:
            heapq.heappush(waiting, (tail, now + seconds - until))
            now = until  # not a sum, which rounding could keep below it without end
        else:
            now += seconds
            latest = max(latest, now - tail)
    return latest
