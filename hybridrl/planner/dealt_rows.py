"""Samples dealt to ranks and micro-batches, as the train engine deals them."""

from collections.abc import Sequence
from functools import lru_cache

from hybridrl.pipelines.balance import (
    SequenceCost,
    balance,
    equal_number,
    micro_batches,
)
from hybridrl.pipelines.standard import least_micro_batches
from hybridrl.planner.mapping import SampleLength, TrainLayout
from hybridrl.planner.model_shape import ModelShape

_balanced = lru_cache(256)(balance)


def sequence_cost(shape: ModelShape) -> SequenceCost:
    """Operations of a sequence by its length, as the engine counts them to share out work."""
    per_token = 2 * (shape.layers * shape.layer_parameters + shape.head_parameters)
    return SequenceCost(per_token, 2 * shape.layers * shape.heads * shape.features)


@lru_cache(256)
def rows_of_ranks(
    shape: ModelShape, layout: TrainLayout, samples: tuple[SampleLength, ...], even: bool
) -> list[list[list[SampleLength]]]:
    """The micro-batches of each data-parallel rank.

    If `even`, all ranks have equally many, as many as the schedule of a pipeline can have. Updates
    in one plan do not need that.
    """
    shares, cost = _dealt(shape, layout, samples), sequence_cost(shape)
    rows_by_share: list[list[list[SampleLength]]] = []
    for share in shares:
        lengths = [sample.tokens for sample in share]
        split = micro_batches(lengths, layout.micro_batch_tokens, cost=cost)
        rows_by_share.append([[share[i] for i in row] for row in split])
    most = max(1, *map(len, rows_by_share))
    for index, (share, rows) in enumerate(zip(shares, rows_by_share, strict=True)):
        number = most if even else max(1, len(rows))
        if layout.pp > 1:
            number = least_micro_batches(layout.schedule.value, layout.pp, number)
        same = rows + [[]] * (number - len(rows))
        if layout.pp > 1 and len(rows) < number:
            lengths = [sample.tokens for sample in share]
            parts = equal_number(lengths, number, layout.micro_batch_tokens, cost=cost)
            same = [[share[i] for i in indices] for indices in parts]
        rows_by_share[index] = same if even else [row for row in same if row] or [[]]
    return rows_by_share


def _dealt(
    shape: ModelShape, layout: TrainLayout, samples: Sequence[SampleLength]
) -> list[list[SampleLength]]:
    """The samples of each data-parallel rank: dealt to all ranks by operations, then pooled."""
    cost = sequence_cost(shape)
    costs = tuple(cost(sample.tokens) for sample in samples)
    shares: list[list[SampleLength]] = [[] for _ in range(layout.data_ranks)]
    for rank, numbers in enumerate(_balanced(costs, layout.ranks)):
        shares[rank // layout.tp % layout.data_ranks] += [samples[i] for i in numbers]
    return shares
