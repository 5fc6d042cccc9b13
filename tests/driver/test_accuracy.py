"""Estimates of accuracy against brute force, verl, and the formulas of lm-evaluation-harness."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from hybridrl.driver.accuracy import (
    JudgedPrompt,
    accuracy_metrics,
    interval,
    maj_at_k,
    pass_at_k,
)


def stored_responses(num_prompts: int, num_samples: int) -> list[JudgedPrompt]:
    """Answers of prompts of every difficulty; `0` is right."""
    rng = random.Random(0)
    prompts = []
    for number in range(num_prompts):
        weights = [1 + number % 7, *(rng.random() * 4 for _ in range(4))]
        answers = rng.choices("01234", weights, k=num_samples)
        prompts.append(JudgedPrompt(tuple(a == "0" for a in answers), tuple(answers)))
    return prompts


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n, c, k in [(4, 0, 2), (4, 1, 2), (4, 2, 3), (5, 4, 2), (6, 6, 6), (6, 1, 1)]:
        right = [i < c for i in range(n)]
        subsets = list(itertools.combinations(right, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_maj_at_k_is_the_share_of_subsets_whose_most_frequent_answer_is_right():
    # a thousand draws of 15 samples: three standard deviations are at most 0.048
    for num_samples, k, tolerance in ((7, 1, 1e-12), (7, 3, 1e-12), (7, 7, 1e-12), (15, 5, 0.05)):
        for prompt in stored_responses(num_prompts=12, num_samples=num_samples):
            chances = []
            for subset in itertools.combinations(prompt.answers, k):
                votes = Counter(subset)
                most = [answer for answer in votes if votes[answer] == max(votes.values())]
                chances.append(most.count("0") / len(most))
            expected = sum(chances) / len(chances)
            assert maj_at_k(prompt.right, prompt.answers, k) == pytest.approx(
                expected, abs=tolerance
            )


def test_one_answer_judged_in_two_ways_counts_by_its_share():
    """As a judge of the whole response may: of two equal answers one was right."""
    assert maj_at_k((True, False, False), ("a", "a", "b"), 3) == 0.5


@pytest.mark.layouts
def test_agrees_with_verl_on_stored_responses():
    """verl's mean@n is avg@n. Its best@k and maj@k draw with replacement, ours without."""
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    prompts = stored_responses(num_prompts=60, num_samples=64)
    rows = [
        (n, a, r) for n, p in enumerate(prompts) for a, r in zip(p.answers, p.right, strict=True)
    ]
    theirs = process_validation_metrics(
        data_sources=["stored"] * len(rows),
        sample_uids=[str(n) for n, _, _ in rows],
        infos_dict={"acc": [float(r) for _, _, r in rows], "pred": [a for _, a, _ in rows]},
    )["stored"]["acc"]
    ours = accuracy_metrics(prompts, (4,))
    assert ours["avg@64"] == pytest.approx(theirs["mean@64"], abs=1e-12)
    assert ours["pass@4"] == pytest.approx(theirs["best@4/mean"], abs=0.02)
    assert ours["maj@4"] == pytest.approx(theirs["maj@4/mean"], abs=0.02)


def test_agrees_with_the_formulas_of_lm_evaluation_harness():
    """Its pass@k is code_eval's product; its maj@n the first of the most frequent answers."""
    for prompt in stored_responses(num_prompts=40, num_samples=9):
        n, c, k = 9, sum(prompt.right), 4
        product = 1.0 if n - c < k else 1 - np.prod(1 - k / np.arange(n - c + 1, n + 1))
        assert pass_at_k(n, c, k) == pytest.approx(product)
        votes = Counter(prompt.answers).most_common()
        if len(votes) == 1 or votes[0][1] > votes[1][1]:  # they take the first where two are equal
            assert maj_at_k(prompt.right, prompt.answers, n) == float(votes[0][0] == "0")


@pytest.mark.long
def test_the_interval_covers_the_true_mean_in_95_of_100():
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        low, high = interval(list(rng.random(80) < 0.3))
        covered += low <= 0.3 <= high
    assert 0.91 < covered / 400 < 0.98


def test_keys_follow_what_there_is():
    greedy = accuracy_metrics([JudgedPrompt((True,)), JudgedPrompt((False,))], (1,))
    assert list(greedy) == ["avg@1", "avg@1/low", "avg@1/high"]
    assert greedy["avg@1"] == 0.5
    unread = accuracy_metrics([JudgedPrompt((True, False))], (1, 2))
    assert [key for key in unread if "/" not in key] == ["avg@2", "pass@2"]
    read = accuracy_metrics([JudgedPrompt((True, False), ("a", "b"))], (1, 2))
    assert [key for key in read if "/" not in key] == ["avg@2", "pass@2", "maj@2"]
    assert accuracy_metrics([], (1,)) == {}
