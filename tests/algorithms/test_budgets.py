"""Where the next samples go: against the papers' sums, and a search over what a dealer could do."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import t as student

from hybridrl.algorithms.advantages import group_relative, novelty_sharpened
from hybridrl.algorithms.budgets import by_uncertainty, equal_treatment, hardness_weighted


def group(right: int, n: int = 8) -> list[float]:
    return [1.0] * right + [0.0] * (n - right)


def test_the_worked_examples() -> None:
    assert equal_treatment([group(1), group(2)], max_samples=32) == [[11] * 8, [3] * 8]
    assert hardness_weighted([group(1)], max_samples=64) == [[24] * 8]


def test_a_prompt_without_samples_gets_none() -> None:
    """Its number would have no sample to stand at."""
    assert equal_treatment([[], group(1)], max_samples=32) == [[], [11] * 8]
    assert hardness_weighted([[]], max_samples=32) == [[]]
    assert by_uncertainty([[]], budget=3, max_samples=8) == [[]]
    assert by_uncertainty([[], [0.0, 1.0]], budget=3, max_samples=8) == [[], [3, 3]]


@given(n=st.integers(1, 24), right=st.integers(0, 24), room=st.integers(0, 200))
def test_a_hard_prompt_comes_to_weigh_what_it_should(n: int, right: int, room: int) -> None:
    """By the sum of |R - mean| over the group, which is what the paper calls its weight."""
    right = min(right, n)
    rewards = group(right, n)
    for rebalance, target_of in (
        (equal_treatment, lambda u: Fraction(n, 2)),
        (hardness_weighted, lambda u: n * (1 - u)),
    ):
        (counts,) = rebalance([rewards], max_samples=n + room)
        (more,) = set(counts)
        assert len(counts) == n
        assert 0 <= more <= room
        u = Fraction(right, n) or Fraction(1, 2 * n)
        if 2 * u >= 1:
            assert more == 0
            continue
        weight = 2 * u * (1 - u)
        if right:  # by the sum itself
            plain = sum(map(abs, group_relative(rewards, std_normalize=False)))
            assert plain == pytest.approx(float(n * weight))
        if more < room:
            assert (n + more) * weight >= target_of(u)
        if more:
            assert (n + more - 1) * weight < target_of(u)


def priority(rewards: list[float], have: int, total: int, exploration: float) -> float:
    """As the docstring has it, with scipy's quantile and the plain sample deviation."""
    mean = sum(rewards) / len(rewards)
    s = math.sqrt(sum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1))

    def h(n: int) -> float:
        return student.ppf(0.975, n - 1) * s / math.sqrt(n)

    return h(have) - h(have + 1) + exploration * math.sqrt(math.log(1 + total) / have)


@given(
    rights=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    budget=st.integers(0, 12),
    exploration=st.sampled_from([0.0, 0.1, 2.0]),
)
def test_each_sample_of_the_budget_goes_to_the_highest_priority(
    rights: list[int], budget: int, exploration: float
) -> None:
    groups = [group(right, 4) for right in rights]
    settings = {"max_samples": 8, "exploration": exploration}
    dealt = [
        [counts[0] for counts in by_uncertainty(groups, budget=used, **settings)]
        for used in range(budget + 1)
    ]
    for used, (before, after) in enumerate(itertools.pairwise(dealt)):
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        if not changed:
            assert before == [4] * len(groups)
            continue
        (i,) = changed
        assert after[i] == before[i] + 1 <= 4
        total = 4 * len(groups) + used
        best = max(
            priority(groups[j], 4 + before[j], total, exploration)
            for j in range(len(groups))
            if before[j] < 4
        )
        assert priority(groups[i], 4 + before[i], total, exploration) == pytest.approx(best)


def test_a_prompt_with_one_sample_is_served_first() -> None:
    counts = by_uncertainty([group(1, 2), group(1, 1)], budget=1, max_samples=8)
    assert counts == [[0, 0], [1]]


def test_the_unsure_are_served_more_than_the_decided() -> None:
    counts = by_uncertainty([group(4), group(0), group(8)], budget=24, max_samples=32)
    (mixed, *_), (none, *_), (all_, *_) = counts
    assert mixed + none + all_ == 24
    assert mixed > none
    assert abs(none - all_) <= 1


def test_rare_right_responses_gain_within_their_bound() -> None:
    likelihoods = [-0.1, -2.0, -0.5, -3.0]
    mean = sum(likelihoods) / 4
    advantages = novelty_sharpened([1.0, 1.0, -1.0, 0.2], likelihoods, weight=0.5, bound=0.5)
    gained = 0.5 * (1 - math.exp(-2.0 - mean))
    assert advantages == pytest.approx([1.0, 1.0 + gained, -1.0, 0.2 + 0.1])
    far = novelty_sharpened([1.0, 1.0], [-1e4, 0.0], weight=0.3, bound=5.0)
    assert far == pytest.approx([1.3, 1.0])
    assert novelty_sharpened([], [], weight=1.0, bound=1.0) == []
