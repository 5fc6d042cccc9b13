"""Credit of turns, against GiGPO's formulas written out (arXiv 2505.10978, section 4)."""

import random
from statistics import fmean, stdev

import pytest
import torch

from hybridrl.algorithms.turns import group_in_group, of_tokens, turn_returns


def test_returns_are_discounted_by_turns() -> None:
    """Turns have earned 1, 0 and 2, and 4 more in the end: 1 + 0.5 (0 + 0.5 * 6)."""
    earned, states = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([7, -(2**63), 2**63 - 1])
    assert turn_returns(7.0, earned, states, gamma=0.5) == (states.tolist(), [2.5, 3.0, 6.0])
    assert turn_returns(7.0, earned, states, gamma=0.0)[1] == [1.0, 0.0, 6.0]
    assert turn_returns(7.0, earned, states, gamma=1.0)[1][0] == 7.0


@pytest.mark.parametrize("std_normalize", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_turns_are_compared_with_all_that_began_alike(seed: int, std_normalize: bool) -> None:
    """Turns of one conversation are compared, too; a lone one has its conversation's advantage."""
    draw = random.Random(seed)
    rewards = [draw.random() for _ in range(6)]
    states = [[draw.randrange(5) for _ in range(draw.randrange(1, 6))] for _ in rewards]
    states[0].append(99)
    returns = [[draw.random() for _ in row] for row in states]

    def compared(value: float, values: list[float]) -> float:
        if len(values) == 1:
            return 0.0
        return (value - fmean(values)) / (stdev(values) + 1e-6 if std_normalize else 1)

    pairs = [(s, r) for row, of_row in zip(states, returns, strict=True)
             for s, r in zip(row, of_row, strict=True)]  # fmt: skip
    wanted = [
        [
            compared(reward, rewards) + 0.5 * compared(r, [x for state, x in pairs if state == s])
            for s, r in zip(row, of_row, strict=True)
        ]
        for reward, row, of_row in zip(rewards, states, returns, strict=True)
    ]
    got = group_in_group(rewards, states, returns, turn_weight=0.5, std_normalize=std_normalize)
    for row, other in zip(got, wanted, strict=True):
        assert row == pytest.approx(other, rel=1e-9, abs=1e-9)
    assert got[0][-1] == pytest.approx(compared(rewards[0], rewards), rel=1e-4)


def test_tokens_have_the_number_of_their_turn() -> None:
    turn = torch.tensor([0, 0, 1, 2, 2], dtype=torch.int32)
    assert of_tokens([0.5, -1.0, 2.0], turn).tolist() == [0.5, 0.5, -1.0, 2.0, 2.0]
