"""Rewards made of other scalars."""

from collections import Counter

import numpy as np
import pytest

from hybridrl.algorithms.rewards import majority_vote, overlong_shaped


def test_the_majority_is_rewarded() -> None:
    assert majority_vote(["7", "5", "7", "", "3"]) == [1.0, 0.0, 1.0, 0.0, 0.0]
    assert majority_vote(["", "", "4"]) == [0.0, 0.0, 1.0], "no answer has no vote"
    assert majority_vote(["a", "b", "b", "a"]) == [1.0, 0.0, 0.0, 1.0], "a tie: the first"
    assert majority_vote(["", ""]) == [0.0, 0.0]
    assert majority_vote(["x"]) == [1.0]
    assert majority_vote([]) == []


def test_the_majority_agrees_with_a_count() -> None:
    generator = np.random.default_rng(0)
    for size in (3, 8, 33):
        answers = [str(x) for x in generator.integers(0, 4, size=size)]
        counts = Counter(answers)
        rewards = majority_vote(answers)
        winners = {a for a, reward in zip(answers, rewards, strict=True) if reward}
        assert len(winners) == 1
        assert sum(rewards) == max(counts.values())


@pytest.mark.parametrize(("max_tokens", "buffer_tokens"), [(100, 20), (7, 7), (64, 1)])
def test_overlong_agrees_with_trl(max_tokens: int, buffer_tokens: int) -> None:
    trl = pytest.importorskip("trl.rewards", reason="TRL, an oracle here, is in the extra `bench`")
    lengths = list(range(max_tokens + 9))
    rewards = [0.1 * length for length in lengths]
    theirs = trl.get_soft_overlong_punishment(max_tokens, buffer_tokens)([[0] * n for n in lengths])
    shaped = overlong_shaped(rewards, lengths, max_tokens=max_tokens, buffer_tokens=buffer_tokens)
    np.testing.assert_allclose(np.array(shaped) - rewards, theirs, rtol=0, atol=1e-12)


def test_overlong_by_its_example() -> None:
    shaped = overlong_shaped([1.0] * 4, [80, 90, 100, 130], max_tokens=100, buffer_tokens=20)
    assert shaped == [1.0, 0.5, 0.0, 0.0]
    half = overlong_shaped([1.0], [90], max_tokens=100, buffer_tokens=20, penalty=0.5)
    assert half == [0.75]
    assert overlong_shaped([], [], max_tokens=100, buffer_tokens=20) == []
    for buffer_tokens in (0, 101):
        with pytest.raises(ValueError, match=r"wanted 1 to max_tokens=100"):
            overlong_shaped([1.0], [1], max_tokens=100, buffer_tokens=buffer_tokens)
