"""The search for the shortest plan: many policies, justification, annealing.

Rounds repeat until the lower bound is met or the budget is spent. A round

1. runs list scheduling under policies, half of them changes of the best until now;
2. justifies the best schedules, and others that chance has shaken;
3. anneals the best schedule.

Wall time decides how many rounds there are, so two ranks that searched would differ: search once
and send the plan. With `rounds` in place of seconds the same seed gives the same plan.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hybridrl.pipelines.annealing import anneal
from hybridrl.pipelines.dispatch import Dispatched, Dispatcher, Justifier
from hybridrl.pipelines.evaluation import PlanTimes, evaluate, lower_bound
from hybridrl.pipelines.operations import Operations
from hybridrl.pipelines.policies import Policy, RuleMaker, change_policy, draw_policy
from hybridrl.pipelines.problem import PipelinePlan, PipelineProblem

POLICIES, SHAKES, MOVES = 60, 40, 6_000
"""Policies, shaken schedules and moves of annealing in a round."""
ELITE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """The best plan, its times, and the bound that it was measured against."""

    plan: PipelinePlan
    times: PlanTimes
    bound_s: float
    rounds: int
    policies: tuple[Policy, ...]
    """The best of the search, the best first: a search for a similar problem may begin with them.
    """


@dataclass(order=True, slots=True)
class _Candidate:
    seconds: float
    number: int
    schedule: Dispatched = field(compare=False)


def search(
    problem: PipelineProblem,
    *,
    budget_s: float = math.inf,
    rounds: float = math.inf,
    seed: int = 0,
    policies: Sequence[Policy] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> SearchResult:
    """The shortest plan that a budget of seconds, or of rounds, finds.

    Of `policies`, those of a search for a similar problem, all are tried first. They are shares of
    a problem's own times, so other lengths and numbers of micro-batches do not matter.

    Raises ValueError if a rank cannot keep one micro-batch: the rank, what it may keep, what the
    micro-batch needs.
    """
    assert math.isfinite(budget_s) or math.isfinite(rounds), "a search without end"
    deadline = clock() + budget_s
    return _Search(problem, seed, policies, lambda: clock() < deadline).run(rounds)


class _Search:
    """The state of one search: the best schedule, and the elite that policies come from."""

    def __init__(
        self,
        problem: PipelineProblem,
        seed: int,
        policies: Sequence[Policy],
        go_on: Callable[[], bool],
    ) -> None:
        self.problem, self.go_on = problem, go_on
        self.rng = random.Random(seed)
        self.operations = Operations.of(problem)
        self.dispatcher = Dispatcher(self.operations)
        if self.dispatcher.guard and (missing := self.dispatcher.guard.missing()):
            rank, size = missing
            raise ValueError(
                f"rank {rank} may keep {problem.limits[rank]:g} bytes of activations; "
                f"one micro-batch keeps {size:g}"
            )
        self.bound = lower_bound(problem)
        self.justifier = Justifier(self.operations)
        self.rules = RuleMaker(problem, self.operations, self.bound)
        self.begins_with = [p for p in policies if len(p.models) == len(self.rules.names)]
        self.elite: list[_Candidate] = []
        self.policies: list[tuple[float, int, Policy]] = []
        """The best until now, with their seconds."""
        self.tried = 0

    @property
    def best(self) -> _Candidate:
        return self.elite[0]

    @property
    def ended(self) -> bool:
        """Nothing is shorter, or the budget is spent; a first schedule is needed."""
        if not self.elite:
            return False
        return self.best.seconds <= self.bound * (1 + 1e-9) or not self.go_on()

    def run(self, rounds: float) -> SearchResult:
        count = 0
        for policy in self.begins_with:
            if not self.ended:
                self._try(policy)
        while count < rounds and not self.ended:
            self._try_policies()
            self._justify()
            self._anneal()
            count += 1
        plan = self.operations.plan(self.best.schedule.lists)
        return SearchResult(
            plan=plan,
            times=evaluate(self.problem, plan),
            bound_s=self.bound,
            rounds=count,
            policies=tuple(policy for _, _, policy in self.policies),
        )

    def _keep(self, schedule: Dispatched) -> None:
        self.tried += 1
        least = 1e-9 * self.bound
        if all(abs(schedule.seconds - other.seconds) > least for other in self.elite):
            self.elite.append(_Candidate(schedule.seconds, self.tried, schedule))
            self.elite.sort()
            del self.elite[ELITE:]

    def _try_policies(self) -> None:
        for _ in range(POLICIES):
            if self.ended:
                return
            if self.policies and self.rng.random() < 0.6:
                policy = change_policy(self.rng, self.rng.choice(self.policies)[2])
            else:
                policy = draw_policy(self.rng, len(self.rules.names))
            self._try(policy)

    def _try(self, policy: Policy) -> None:
        schedule = self.dispatcher.run(self.rules.rule(policy))
        self.policies.append((schedule.seconds, self.tried, policy))
        self.policies.sort(key=lambda entry: entry[:2])
        del self.policies[ELITE:]
        self._keep(schedule)

    def _justify(self) -> None:
        for candidate in list(self.elite):
            if self.ended:
                return
            self._keep(self.justifier.improve(candidate.schedule))
        current = self.best.schedule
        for _ in range(SHAKES):
            if self.ended:
                return
            schedule = self.justifier.once(self._shaken(current.starts))
            if schedule.seconds <= current.seconds:
                if schedule.seconds < current.seconds:
                    schedule = self.justifier.improve(schedule)
                current = schedule
                self._keep(schedule)

    def _shaken(self, starts: list[float]) -> list[float]:
        """Starts with noise: on each operation, each queue, each model, or in a span of time."""
        rng, ops = self.rng, self.operations
        mean_s = sum(ops.seconds) / len(ops.seconds)
        most = mean_s * rng.choice([0.3, 0.7, 1.5, 3.0, 6.0])
        match rng.randrange(4):
            case 0:
                return [start + rng.uniform(-most, most) for start in starts]
            case 1:
                noise = [rng.uniform(-most, most) for _ in ops.queues]
                return [start + noise[ops.queue[i]] for i, start in enumerate(starts)]
            case 2:
                noise = [rng.uniform(-most, most) for _ in self.problem.models]
                return [start + noise[ops.actions[i].model] for i, start in enumerate(starts)]
            case _:
                begin = rng.random() * max(starts)
                end = begin + 0.3 * rng.random() * max(starts)
                return [
                    start + (rng.uniform(-most, most) if begin <= start <= end else 0.0)
                    for start in starts
                ]

    def _anneal(self) -> None:
        candidate = self.elite[min(int(self.rng.expovariate(1.0)), len(self.elite) - 1)]
        if self.ended:
            return
        lists, starts = anneal(
            self.operations,
            candidate.schedule.lists,
            bound=self.bound,
            moves=MOVES,
            rng=self.rng,
            go_on=self.go_on,
        )
        ends = (starts[i] + self.operations.seconds[i] for own in lists for i in own)
        self._keep(Dispatched(lists=lists, starts=starts, seconds=max(ends)))
