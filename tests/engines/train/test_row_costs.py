"""Costs of rows in a pipeline plan, and the memory that a plan of several models may take."""

import random

import pytest

from hybridrl.engines.train.row_costs import kept_under_1f1b, row_costs
from hybridrl.models.flops import ForwardFlops
from hybridrl.pipelines.evaluation import evaluate
from hybridrl.pipelines.problem import PipelinedModel, PipelineProblem
from hybridrl.pipelines.search import search
from hybridrl.pipelines.standard import one_f_one_b

FLOPS = ForwardFlops(per_token=600, per_scored=1000, per_pair=4)


def test_the_head_is_on_the_last_chunk_and_layers_are_shared() -> None:
    first, last = row_costs(FLOPS, [4, 6], 3, [2, 1], 8)
    layers = 600 * 10 + 4 * (10 + 21)  # pairs of four tokens, and of six
    assert first.forward_s == pytest.approx(layers * 2 / 3)
    assert last.forward_s == pytest.approx(layers / 3 + 3000)
    assert (first.backward_s, last.backward_s) == (2 * first.forward_s, 2 * last.forward_s)
    assert (first.kept_bytes, last.kept_bytes) == (10 * 2 * 8, 10 * 8)
    for whole, half in zip(
        (first, last), row_costs(FLOPS, [4, 6], 3, [2, 1], 8, True), strict=True
    ):
        assert half.backward_s + half.weights_s == whole.backward_s


def test_a_long_sequence_costs_more_than_short_ones_of_equal_tokens() -> None:
    """Attention grows with the square of lengths; what is kept does not."""
    (long,), (short,) = (row_costs(FLOPS, row, 3, [1], 8) for row in ([1000], [10] * 100))
    assert long.forward_s > 4 * short.forward_s
    assert long.kept_bytes == short.kept_bytes


def pipeline(name: str, ranks: tuple[int, ...], rows: list[int]) -> PipelinedModel:
    costs = [row_costs(FLOPS, [tokens], tokens // 2, [1] * len(ranks), 8) for tokens in rows]
    return PipelinedModel(name=name, ranks=ranks, costs=costs)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_keeps_no_more_than_all_models_under_1f1b(seed: int) -> None:
    rng = random.Random(seed)
    rows = [[rng.randrange(1, 50) for _ in range(rng.randrange(1, 9))] for _ in range(3)]
    actor = pipeline("actor", (0, 1, 2, 3), rows[0])
    critics = [pipeline("critic", (3, 2), rows[1]), pipeline("critic", (1, 0), rows[2])]
    alone = []
    for own in (actor, pipeline("critic", (0, 1), rows[1]), pipeline("critic", (0, 1), rows[2])):
        problem = PipelineProblem(models=[own], num_ranks=len(own.ranks))
        alone.append(max(evaluate(problem, one_f_one_b(own)).peak_bytes))
    limit = kept_under_1f1b([actor, *critics], ["actor", "critic", "critic"])
    assert limit >= alone[0] + max(alone[1:])
    problem = PipelineProblem(models=[actor, *critics], num_ranks=4, limit_bytes=limit)
    times = search(problem, rounds=1, seed=seed).times
    assert max(times.peak_bytes) <= limit


def test_of_equal_rows_it_is_that_of_the_first_stage() -> None:
    """Two rows of the actor's and one layer each, two of the critic's."""
    models = [pipeline("actor", (0, 1), [5] * 6), pipeline("critic", (1, 0), [7] * 6)]
    assert kept_under_1f1b(models, [0, 1]) == pytest.approx(2 * 5 * 8 + 2 * 7 * 8)


def test_a_response_attends_to_a_prompt_that_is_computed_once():
    """A prompt of 40 tokens and two responses of 10: as two whole sequences less a prompt."""
    (shared,) = row_costs(FLOPS, [10, 10, 40], 20, [1], 8, before=[40, 40, 0])
    (whole,) = row_costs(FLOPS, [50, 50], 20, [1], 8)
    (prompt,) = row_costs(FLOPS, [40], 0, [1], 8)
    assert shared.forward_s == whole.forward_s - prompt.forward_s
    assert shared.kept_bytes == 60 * 8
