"""The evaluator refuses what breaks an invariant, and names it."""

from typing import Any

import pytest

from hybridrl.pipelines.evaluation import evaluate, lower_bound
from hybridrl.pipelines.problem import (
    PassCosts,
    PassKind,
    PipelineAction,
    PipelinedModel,
    PipelineProblem,
    side_by_side,
)

F, B = PassKind.forward, PassKind.backward
COSTS = PassCosts(forward_s=1.0, backward_s=2.0, kept_bytes=3.0)


def _problem(**settings: Any) -> PipelineProblem:
    model = PipelinedModel.uniform("m", ranks=(0, 1), micro_batches=2, costs=COSTS)
    return PipelineProblem(models=[model], num_ranks=2, **settings)


def _plan(first: str, second: str) -> list[list[PipelineAction]]:
    return [
        [PipelineAction(0, PassKind(word[0]), int(word[1]), int(word[2])) for word in text.split()]
        for text in (first, second)
    ]


GOOD = ("F00 F01 B00 B01", "F10 B10 F11 B11")


def test_the_example_by_hand() -> None:
    plan = _plan(*GOOD)
    times = evaluate(_problem(send_s=0.5), plan)
    # rank 1: F 1.5 to 2.5, B to 4.5, F to 5.5, B to 7.5; rank 0: B at 5, then at 8.
    assert [times.starts[action] for action in plan[0]] == [0, 1, 5, 8]
    assert [times.starts[action] for action in plan[1]] == [1.5, 2.5, 4.5, 5.5]
    assert times.seconds == 10
    assert times.busy_s == (6, 6)
    assert times.peak_bytes == (6, 3)
    assert lower_bound(_problem()) == 9  # (2 + 2 - 1) x 3


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("F01 F00 B00 B01", GOOD[1], "F0.1 of model 0, wanted micro-batch 0"),
        ("F00 F00 B00 B01", GOOD[1], "F0.0 of model 0, wanted micro-batch 1"),
        ("F00 B00 B01", GOOD[1], "7 actions, wanted 8"),
        (GOOD[1], GOOD[0], "rank 0: F1.0 of model 0 is of rank 1"),
        ("F00 B00 F01 B01", "F10 F11 B10 B11", "waits for ever"),
        ("B00 F00 F01 B01", GOOD[1], "waits for ever"),
    ],
)
def test_what_breaks_an_invariant_is_refused(first: str, second: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(_problem(), _plan(first, second))


def test_what_a_rank_cannot_keep_is_refused() -> None:
    assert evaluate(_problem(limit_bytes=6.0), _plan(*GOOD)).seconds == 9
    with pytest.raises(ValueError, match=r"rank 0: F0.1 of model 0 makes 6 bytes of 5"):
        evaluate(_problem(limit_bytes=5.0), _plan(*GOOD))


def test_each_rank_has_its_own_limit() -> None:
    assert evaluate(_problem(limit_bytes=(6.0, 3.0)), _plan(*GOOD)).seconds == 9
    with pytest.raises(ValueError, match=r"rank 0: F0.1 of model 0 makes 6 bytes of 3"):
        evaluate(_problem(limit_bytes=(3.0, 6.0)), _plan(*GOOD))
    with pytest.raises(AssertionError):
        _problem(limit_bytes=(6.0,))


def test_a_smaller_model_is_repeated_side_by_side() -> None:
    assert side_by_side(range(7, -1, -1), 2) == [(7, 6, 5, 4), (3, 2, 1, 0)]
    # RLHFuse's first problem: the bound is rank 4's work after 12 and before 24 seconds.
    actor = PipelinedModel.uniform(
        "actor", ranks=range(8), micro_batches=32, costs=PassCosts(forward_s=5.0, backward_s=10.0)
    )
    critics = [
        PipelinedModel.uniform(
            "critic", ranks=ranks, micro_batches=16, costs=PassCosts(forward_s=4.0, backward_s=8.0)
        )
        for ranks in side_by_side(range(7, -1, -1), 2)
    ]
    problem = PipelineProblem(models=[actor, *critics], num_ranks=8)
    assert lower_bound(problem) == 12 + (32 * 15 + 16 * 12) + 24
