"""Parts of groups that share prompts: all sequences once, bounded, and cheap."""

import random

import pytest

from hybridrl.pipelines.balance import BY_TOKENS, SequenceCost, balance, equal_number, micro_batches
from hybridrl.pipelines.prompt_groups import KEYS_PER_TOKEN, PromptGroups

COST = SequenceCost(1000, 1)


def groups(prompts, responses, size=8, cost=BY_TOKENS, samples_per_row=1):
    """`prompts` groups of `size` with prompts of 40 tokens, in the order of the groups."""
    draw = random.Random(prompts + responses)
    numbers = [number for number in range(prompts) for _ in range(size)]
    lengths = [40 + draw.randint(1, responses) for _ in numbers]
    return PromptGroups(lengths, numbers, [40] * len(numbers), cost, samples_per_row)


def test_a_prompt_counts_once_in_a_part():
    few = PromptGroups((6, 7, 9, 5), (0, 0, 1, None), (4, 4, 4, 4), SequenceCost(2, 1))
    assert few.tokens_of([0, 1, 2, 3]) == 6 + 3 + 9 + 5
    # The second response costs its own tokens, and its pairs with all tokens before.
    assert few.cost_of([0, 1]) == 2 * 9 + 6**2 + 7**2 - 4**2
    assert few.cost_of([0, 2]) == 2 * 15 + 6**2 + 9**2


@pytest.mark.parametrize("samples_per_row", [1, 2])
@pytest.mark.parametrize("max_tokens", [45, 100, 300, 5000])
@pytest.mark.parametrize("cost", [BY_TOKENS, COST], ids=str)
def test_micro_batches_are_bounded_and_cost_no_more(max_tokens, samples_per_row, cost):
    few = groups(5, 60, cost=cost, samples_per_row=samples_per_row)
    parts = few.micro_batches(max_tokens)
    assert sorted(i for indices in parts for i in indices) == [*range(40)]
    for indices in parts:
        assert len(indices) == samples_per_row or few.tokens_of(indices) <= max_tokens
        assert all(i ^ 1 in indices for i in indices) or samples_per_row == 1
    plain = micro_batches(few.lengths, max_tokens, samples_per_row, cost)
    assert len(parts) <= len(plain)
    if len(parts) == len(plain):
        assert sum(map(few.cost_of, parts)) <= sum(map(few.cost_of, plain))
    assert parts == few.micro_batches(max_tokens)


def test_groups_stay_together():
    few = groups(6, 60)
    parts = few.micro_batches(1000)
    assert all(
        sum(i // 8 == number for i in indices) in (0, 8) for indices in parts for number in range(6)
    )
    assert sum(map(few.tokens_of, parts)) == sum(few.lengths) - 6 * 7 * 40


@pytest.mark.parametrize("num_parts", [2, 4, 7, 40])
def test_an_equal_number_is_balanced(num_parts):
    few = groups(5, 60, cost=COST)
    parts = few.equal_number(num_parts, 5000)
    assert len(parts) == num_parts
    assert sorted(i for indices in parts for i in indices) == [*range(40)]
    assert few.heaviest(parts) <= few.heaviest(balance(few.lengths, num_parts))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks_get_whole_groups_where_that_costs_less(num_ranks):
    few = groups(6, 60, cost=COST)
    parts = few.deal(num_ranks)
    assert sorted(i for indices in parts for i in indices) == [*range(48)]
    scattered = balance([few.cost_of([i]) for i in range(48)], num_ranks)
    assert few.heaviest(parts) <= few.heaviest(scattered)
    if num_ranks in (2, 3):  # whole groups are even enough
        assert few.heaviest(parts) < 0.9 * few.heaviest(scattered)


def test_without_groups_parts_are_those_of_sequences():
    draw = random.Random(1)
    lengths = [draw.randint(3, 50) for _ in range(30)]
    few = PromptGroups(lengths, [None] * 30, [2] * 30, COST)
    assert few.micro_batches(120) == micro_batches(lengths, 120, cost=COST)
    assert few.equal_number(7, 300) == equal_number(lengths, 7, 300, cost=COST)


def test_many_short_responses_of_a_long_prompt_are_bounded_by_their_keys():
    """64 responses of 65 tokens to a prompt of 4,000 have 8,160 tokens and 264,160 keys."""
    groups = PromptGroups([4065] * 64, [0] * 64, [4000] * 64)
    assert groups.tokens_of(range(64)) == 8160
    rows = groups.micro_batches(8192)
    assert sorted(i for row in rows for i in row) == [*range(64)]
    for row in rows:
        keys = 4000 + 4065 * len(row)
        assert keys <= KEYS_PER_TOKEN * 8192
    assert len(rows) == -(-64 // ((KEYS_PER_TOKEN * 8192 - 4000) // 4065))
