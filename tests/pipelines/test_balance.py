import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

from hybridrl.pipelines.balance import SequenceCost, balance, equal_number, micro_batches

lengths_of = st.lists(st.integers(1, 300), max_size=60)


def _heaviest(lengths, parts):
    return max(sum(lengths[i] for i in indices) for indices in parts)


@settings(max_examples=60)
@given(lengths_of, st.integers(1, 9))
def test_balance_invariants(lengths, num_parts):
    parts = balance(lengths, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for indices in parts for i in indices) == list(range(len(lengths)))
    assert all(indices == sorted(indices) for indices in parts)
    assert parts == balance(lengths, num_parts)
    bound = max(max(lengths, default=0), -(-sum(lengths) // num_parts))
    assert _heaviest(lengths, parts) <= 4 / 3 * bound + max(lengths, default=0) * (1 / 3)


@settings(max_examples=60)
@given(lengths_of, st.integers(1, 400))
def test_micro_batches_invariants(lengths, max_tokens):
    parts = micro_batches(lengths, max_tokens)
    assert sorted(i for indices in parts for i in indices) == list(range(len(lengths)))
    assert all(indices == sorted(indices) and indices for indices in parts)
    assert all(len(p) == 1 or sum(lengths[i] for i in p) <= max_tokens for p in parts)
    assert parts == micro_batches(lengths, max_tokens)


@pytest.mark.parametrize("num_parts", [2, 8, 16])
def test_as_good_as_verls_karmarkar_karp(num_parts):
    """Heaviest part within 2 % of verl's for batches of 128 heavy-tailed lengths."""
    source = random.Random(0)
    for _ in range(5):
        lengths = [min(4096, int(50 * source.paretovariate(1.2))) for _ in range(128)]
        theirs = get_seqlen_balanced_partitions(lengths, num_parts, equal_size=False)
        assert _heaviest(lengths, balance(lengths, num_parts)) <= 1.02 * _heaviest(lengths, theirs)


def test_fewer_sequences_than_parts_and_long_ones():
    assert balance([5], 3) == [[0], [], []]
    assert micro_batches([], 10) == []
    assert micro_batches([50, 3, 4], 10) == [[0], [1, 2]]


@settings(max_examples=60)
@given(lengths_of, st.integers(1, 9), st.integers(1, 400), st.integers(2, 3))
def test_rows_are_not_split(lengths, num_parts, max_tokens, samples_per_row):
    lengths = lengths[: len(lengths) // samples_per_row * samples_per_row]
    rows = [sum(lengths[i : i + samples_per_row]) for i in range(0, len(lengths), samples_per_row)]
    balanced = balance(lengths, num_parts, samples_per_row)
    bounded = micro_batches(lengths, max_tokens, samples_per_row)
    for parts in (balanced, bounded):
        assert sorted(i for indices in parts for i in indices) == list(range(len(lengths)))
        assert all(indices == sorted(indices) for indices in parts)
        assert all(
            i // samples_per_row * samples_per_row + j in indices
            for indices in parts
            for i in indices
            for j in range(samples_per_row)
        )
    assert [sum(lengths[i] for i in indices) for indices in balanced] == [
        sum(rows[i] for i in indices) for indices in balance(rows, num_parts)
    ]
    assert all(
        len(p) == samples_per_row or sum(lengths[i] for i in p) <= max_tokens for p in bounded
    )


def test_bounds_are_checked():
    with pytest.raises(ValueError, match="num_parts=0"):
        balance([1], 0)
    with pytest.raises(ValueError, match="max_tokens=0"):
        micro_batches([1], 0)
    for split in (balance, micro_batches):
        with pytest.raises(ValueError, match="3 sequences: wanted a multiple of samples_per_row=2"):
            split([1, 1, 1], 10, samples_per_row=2)


COST = SequenceCost(per_token=1000, per_pair=2)  # attention is half of the work at 500 tokens


def _costs(lengths, parts):
    return [sum(COST(lengths[i]) for i in indices) for indices in parts]


@settings(max_examples=60)
@given(lengths_of, st.integers(1, 400), st.integers(1, 9))
def test_micro_batches_by_cost(lengths, max_tokens, number):
    """As many as by tokens, within the bound; the heaviest costs no more."""
    parts = micro_batches(lengths, max_tokens, cost=COST)
    by_tokens = micro_batches(lengths, max_tokens)
    assert sorted(i for indices in parts for i in indices) == list(range(len(lengths)))
    assert all(len(p) == 1 or sum(lengths[i] for i in p) <= max_tokens for p in parts)
    assert max(_costs(lengths, parts), default=0) <= max(_costs(lengths, by_tokens), default=0)
    same = equal_number(lengths, number, max_tokens, cost=COST)
    assert len(same) == number
    assert max(_costs(lengths, same)) <= max(_costs(lengths, balance(lengths, number)))


def test_the_spread_of_seconds_falls():
    """Lengths are heavy-tailed: attention's share grows with the square of a sequence's length."""
    source = random.Random(0)
    spreads = []
    for _ in range(40):
        lengths = [min(4096, int(100 * source.paretovariate(1.1))) for _ in range(64)]
        for parts in (micro_batches(lengths, 8192), micro_batches(lengths, 8192, cost=COST)):
            costs = _costs(lengths, parts)
            spreads.append(max(costs) / (sum(costs) / len(costs)) - 1)
    by_tokens, by_cost = sum(spreads[::2]) / 40, sum(spreads[1::2]) / 40
    assert by_cost < 0.7 * by_tokens
