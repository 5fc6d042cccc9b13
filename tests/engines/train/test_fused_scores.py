"""Forward passes in one plan against separate passes: log-probabilities and values bit for bit."""

import pytest
import torch
import torch.distributed as dist
from small_engines import SIZES, make_engine, set_head
from surrogate_loss import Surrogate

from hybridrl.engines.train.fused_update import FusedUpdate, ScoreInputs
from hybridrl.pipelines.search import search


def score(path, sequences, actor, critic, settings):
    """Scores of an actor and critics, alone, together and together again after an update."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = sequences[rank::world]
    if settings.get("some_have_none") and rank == world - 1:
        mine = []
    schedule = settings.get("schedule", "one_f_one_b")
    engines = [make_engine(path, actor, schedule=schedule)]
    for number in range(settings.get("critics", 1)):
        engines.append(make_engine(path, critic, values=True, reverse=number == 0))
        set_head(engines[-1])
    inputs = [ScoreInputs(sequences=mine, alone=engine.gives_values) for engine in engines]
    problems = []

    def plan(problem):
        problems.append(problem)
        return search(problem, rounds=1).plan

    together = FusedUpdate(engines, plan)
    pairs = list(zip(engines, inputs, strict=True))
    alone = [own.score(engine) for engine, own in pairs]
    first = together.score(pairs)
    # The next update is as if nothing had been scored together, and scoring goes on after it.
    metrics = engines[0].update(mine or sequences[:1], Surrogate())
    after = [own.score(engine) for engine, own in pairs]
    return alone, first, after, together.score(pairs), metrics["grad_norm"], problems


def check(ranks, world, path, sequences, actor, critic, **settings):
    results = ranks(world, score, path, sequences, actor, critic, settings)
    num_scored = 0
    for alone, together, after, together_after, grad_norm, problems in results:
        for wanted, got in ((alone, together), (after, together_after)):
            for own, other in zip(wanted, got, strict=True):
                assert len(own) == len(other)
                assert all(map(torch.equal, own, other))
                num_scored += sum(len(x) for x in own)
        assert grad_norm > 1e-3
        for problem in problems:
            assert all(not model.backward for model in problem.models)
    assert num_scored
    # The updates in between changed the actor's scores.
    before, changed = results[0][0][0], results[0][2][0]
    assert not all(map(torch.equal, before, changed))
    assert len(results[0][5]) == 2  # the first rank plans
    assert not any(result[5] for result in results[1:])


@pytest.fixture(scope="module")
def path(tiny) -> str:
    """A tied Qwen3 of four layers."""
    return tiny("qwen3", **SIZES)


@pytest.mark.long
def test_two_ranks_in_both_directions(ranks, path, sequences):
    check(ranks, 2, path, sequences, (2, 1, 1, 1), (2, 1, 1, 1))


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("actor", "critic", "settings"),
    [
        ((4, 1, 1, 1), (2, 2, 1, 1), {}),
        ((4, 1, 1, 1), (2, 1, 2, 1), {"some_have_none": True}),
        ((2, 1, 2, 1), (2, 2, 1, 1), {"critics": 2}),
        ((2, 1, 1, 2), (2, 1, 1, 2), {}),
        ((2, 1, 2, 1), (4, 1, 1, 1), {"schedule": "zero_bubble"}),
        ((2, 2, 1, 1), (1, 1, 4, 1), {"schedule": "interleaved"}),
    ],
    ids=str,
)
def test_four_ranks(ranks, path, sequences, actor, critic, settings):
    check(ranks, 4, path, sequences, actor, critic, **settings)
