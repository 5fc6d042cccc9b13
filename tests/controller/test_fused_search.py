"""Policies for a fused update that are searched before its lengths are all known."""

import itertools
import random
import time
from collections.abc import Callable, Iterator

import pytest

from hybridrl.config import PipelineSchedule, TrainLayoutConfig
from hybridrl.controller.fused_search import NO_SEARCH, FusedRole, FusedSearch, fused_problem
from hybridrl.controller.load_balance import RankWork
from hybridrl.flow.executor import Finished
from hybridrl.flow.sample import SampleId
from hybridrl.models.flops import ForwardFlops
from hybridrl.pipelines.balance import SequenceCost
from hybridrl.pipelines.evaluation import evaluate
from hybridrl.pipelines.search import search
from hybridrl.planner.mapping import SampleLength

MAX_TOKENS = 2048


def role(pp: int, reverse: bool, size: int, schedule: str = "one_f_one_b") -> FusedRole:
    """On 8 ranks with tp 2."""
    flops = ForwardFlops(per_token=size, per_scored=size // 8, per_pair=2)
    return FusedRole(
        layout=TrainLayoutConfig(pp=pp, fsdp=4 // pp, tp=2, schedule=PipelineSchedule[schedule]),
        flops=flops,
        work=RankWork(SequenceCost(size, 1)),
        num_layers=8,
        hidden_size=64,
        reverse=reverse,
    )


ROLES = [role(4, False, 10_000), role(2, True, 4_000)]


def lengths(seed: int, number: int = 48) -> list[SampleLength]:
    draw = random.Random(seed)
    return [SampleLength(64, min(1500, int(80 * draw.paretovariate(1.2)))) for _ in range(number)]


@pytest.mark.parametrize("schedule", ["one_f_one_b", "interleaved", "zero_bubble"])
def test_the_problem_has_the_work_of_all_samples(schedule: str) -> None:
    """Once for each role, on ranks that all have a place; what is found is a valid plan."""
    samples, roles = lengths(0), [role(4, False, 10_000, schedule), ROLES[1]]
    problem = fused_problem(roles, samples, MAX_TOKENS)
    assert problem.num_ranks == 4
    for number, own in enumerate(roles):
        models = [m for m in problem.models if m.name == f"engine {number}"]
        assert len(models) == 4 // own.layout.pp
        done = sum(c.forward_s for m in models for row in m.costs for c in row)
        work = sum(own.flops(sample.tokens, sample.response) for sample in samples)
        assert done == pytest.approx(work)
        places = sorted({rank for m in models for rank in m.ranks})
        assert places == [0, 1, 2, 3]
    # The critic's first stage is on the last ranks: place 2 and 3 of four.
    assert {m.ranks[0] for m in problem.models if m.name == "engine 1"} == {2, 3}
    result = search(problem, rounds=1)
    assert evaluate(problem, result.plan).seconds == result.times.seconds
    assert result.policies


def ticks() -> Callable[[], float]:
    """A clock that counts how often it is asked: a budget of so many tries."""
    numbers: Iterator[int] = itertools.count()
    return lambda: float(next(numbers))


def test_policies_of_other_lengths_are_a_better_start() -> None:
    """Of the same few tries, after a search for the lengths of a step before."""
    policies = search(fused_problem(ROLES, lengths(100), MAX_TOKENS), rounds=3).policies
    apart, seeded, bounds = 0.0, 0.0, 0.0
    for seed in range(6):
        problem = fused_problem(ROLES, lengths(seed), MAX_TOKENS)
        alone = search(problem, budget_s=8.0, clock=ticks())
        begun = search(problem, budget_s=8.0, clock=ticks(), policies=policies)
        apart, seeded = apart + alone.times.seconds, seeded + begun.times.seconds
        bounds += alone.bound_s
    # Measured: 7 % above the bound against 15 %.
    assert seeded - bounds < 0.8 * (apart - bounds)


def finished(number: int, tokens: int) -> Finished:
    return Finished(SampleId(number, 0), 0, 64, tokens, "stop", ())


def test_what_has_not_finished_is_long() -> None:
    """The first step knows what has finished; later ones take the longest of the step before."""
    searched = FusedSearch([("actor", ROLES)], MAX_TOKENS, 1)
    searched.begin()
    searched.saw([finished(i, tokens) for i, tokens in enumerate((10, 500, 20, 300))])
    assert [one.response for one in searched.lengths()] == [10, 500, 20, 300]
    searched.begin()
    assert [one.response for one in searched.lengths()] == [500, 300, 20, 10]
    searched.saw([finished(4, 7), finished(5, 9)])
    assert [one.response for one in searched.lengths()] == [7, 9, 500, 300]
    searched.policies("actor")


def test_a_thread_searches_until_the_update() -> None:
    """It has policies soon, and stops; nothing is searched where no updates are fused."""
    searched = FusedSearch([("actor", ROLES)], MAX_TOKENS, 2)
    searched.begin()
    searched.saw([finished(i, one.response) for i, one in enumerate(lengths(0, 16))])
    deadline = time.monotonic() + 20
    while not searched.num_searches and time.monotonic() < deadline:
        time.sleep(0.02)
    assert searched.policies("actor")
    time.sleep(0.5)  # the search that runs comes to its end
    number = searched.num_searches
    time.sleep(0.5)
    assert searched.num_searches == number
    NO_SEARCH.begin()
    assert NO_SEARCH.policies("actor") == ()
