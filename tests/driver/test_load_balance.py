"""Which rank trains which sample, and pass@k."""

import random

import pytest

from hybridrl.config import TrainLayoutConfig
from hybridrl.driver.load_balance import RankWork, assign_ranks
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.pipelines.balance import SequenceCost


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


def work_of(batch, ranks, work, num_ranks):
    """The load of each rank."""
    loads = [0.0] * num_ranks
    for sample, rank in zip(batch, ranks, strict=True):
        sharers = work.sharers([sample], rank)
        for sharer in sharers:
            loads[sharer] += work.cost(sample.tokens) / len(sharers)
    return loads


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_attention_makes_a_long_sample_cost_more_than_its_tokens(num_ranks):
    rng = random.Random(num_ranks)
    batch = samples([rng.choice([10, 200, 4000]) for _ in range(64)], [0] * 64)
    work = RankWork(SequenceCost(per_token=1000, per_pair=1))
    got = work_of(batch, assign_ranks(batch, num_ranks, work=work), work, num_ranks)
    by_tokens = work_of(batch, assign_ranks(batch, num_ranks), work, num_ranks)
    mean = sum(got) / num_ranks
    assert max(got) <= 1.05 * mean
    assert max(got) <= max(by_tokens)


def test_one_long_sample_balances_many_short_ones():
    """1,000 tokens cost 2,000,000, and 10 cost 10,100: so 198 of those, not 100."""
    batch = samples([998] + [8] * 198, [0] * 199)
    ranks = assign_ranks(batch, 2, work=RankWork(SequenceCost(1000, 1)))
    assert [ranks.count(0), ranks.count(1)] == [1, 198]


LAYOUT = TrainLayoutConfig(pp=2, fsdp=4, tp=2, cp=2)  # rank = (pp 4 + fsdp) 2 + tp


def test_ranks_that_share_long_rows():
    """The stages and tp ranks of a replica are in one block: they pool their sequences."""
    work = RankWork.of(LAYOUT, 100, SequenceCost())
    first, second = (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)
    assert set(work.blocks) == {first, second}
    assert all(rank in block for rank, block in enumerate(work.blocks))
    assert RankWork.of(TrainLayoutConfig(fsdp=4), 100, SequenceCost()).blocks == ()


@pytest.mark.parametrize("samples_per_row", [1, 2])
def test_shared_rows_weigh_on_their_block(samples_per_row):
    """One row of 798 for 16 ranks, and 640 of short ones: what is shared costs 8 ranks alike."""
    work = RankWork.of(LAYOUT, 100, SequenceCost())
    batch = samples([398] * 2 + [3] * 160, [0] * 162)
    ranks = assign_ranks(batch, 16, samples_per_row, work=work)
    rows = [batch[i : i + samples_per_row] for i in range(0, 162, samples_per_row)]
    loads = [0.0] * 16
    for row, rank in zip(rows, ranks[::samples_per_row], strict=True):
        for sharer in work.sharers(row, rank):
            loads[sharer] += sum(work.costs([row])) / len(work.sharers(row, rank))
    assert max(loads) <= 1.1 * sum(loads) / 16
    assert assign_ranks(batch, 16, samples_per_row, work=work) == ranks


def test_samples_stay_where_shared_rows_balance():
    work = RankWork.of(TrainLayoutConfig(fsdp=2, cp=2), 100, SequenceCost())
    batch = samples([398, 8, 8], [0, 0, 1])
    assert assign_ranks(batch, 2, work=work) == [0, 0, 1]
    assert assign_ranks(batch, 2) == [0, 1, 1]


def groups(num: int, size: int, ranks: int) -> list[Sample]:
    """Groups of samples with long prompts, spread over the ranks."""
    rng = random.Random(num)
    return [
        Sample(
            id=SampleId(prompt, k=k),
            rank=k % ranks,
            prompt_tokens=100,
            response_tokens=rng.randint(50, 150),
        )
        for prompt in range(num)
        for k in range(size)
    ]


def test_groups_with_shared_prompts_are_on_one_rank():
    batch = groups(8, 8, 2)
    work = RankWork(SequenceCost(1000, 1), shares_prompts=True)
    ranks = assign_ranks(batch, 2, work=work)
    by_prompt = [
        {r for s, r in zip(batch, ranks, strict=True) if s.id.prompt == p} for p in range(8)
    ]
    assert all(len(of_group) == 1 for of_group in by_prompt)
    # Samples that are dealt well stay.
    for sample, rank in zip(batch, ranks, strict=True):
        sample.rank = rank
    assert assign_ranks(batch, 2, work=work) == ranks


def test_a_group_is_cut_where_ranks_would_be_idle():
    batch = groups(1, 8, 1)
    ranks = assign_ranks(batch, 2, work=RankWork(SequenceCost(1000, 1), shares_prompts=True))
    assert sorted(ranks.count(rank) for rank in range(2)) >= [3, 4]
