"""Which rank trains which sample, and pass@k."""

import itertools
import random

import pytest

from hybridrl.controller.evaluate import pass_at_k
from hybridrl.controller.load_balance import assign_ranks
from hybridrl.flow.sample import Sample, SampleId


def samples(lengths, ranks):
    return [
        Sample(id=SampleId(i), rank=rank, prompt_tokens=2, response_tokens=length)
        for i, (length, rank) in enumerate(zip(lengths, ranks, strict=True))
    ]


def loads(batch, ranks, num_ranks):
    total = [0] * num_ranks
    for sample, rank in zip(batch, ranks, strict=True):
        total[rank] += sample.tokens
    return total


def test_balanced_samples_stay():
    batch = samples([5] * 8, [0, 1] * 4)
    assert assign_ranks(batch, 2) == [0, 1] * 4


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_skewed_batch_is_balanced(num_ranks):
    rng = random.Random(num_ranks)
    batch = samples([rng.randint(1, 60) for _ in range(64)], [0] * 64)
    got = loads(batch, assign_ranks(batch, num_ranks), num_ranks)
    assert max(got) <= 1.05 * sum(got) / num_ranks


def test_atoms_stay_together():
    batch = samples([1, 50, 3, 4, 9, 9, 2, 2], [0, 1, 0, 0, 1, 1, 1, 1])
    ranks = assign_ranks(batch, 2, samples_per_row=2)
    assert all(ranks[i] == ranks[i + 1] for i in range(0, 8, 2))


def test_fewer_samples_than_ranks():
    assert set(assign_ranks(samples([3], [1]), 4)) <= set(range(4))


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n, c, k in [(4, 1, 2), (5, 0, 3), (5, 5, 1), (6, 2, 4)]:
        right = [True] * c + [False] * (n - c)
        subsets = list(itertools.combinations(right, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
