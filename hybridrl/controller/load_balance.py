"""Assignment of samples to the ranks that train, or read, them."""

from collections.abc import Sequence

from hybridrl.engines.train.balance import balance
from hybridrl.flow.sample import Sample

# Moving samples costs a few milliseconds a step; below this surplus of the fullest rank's tokens
# over the mean they train where they were made.
_TOLERATED_IMBALANCE = 0.02


def assign_ranks(
    samples: Sequence[Sample], num_ranks: int, samples_per_row: int = 1, move: bool = False
) -> list[int]:
    """The rank that trains each sample: its present rank if that is balanced, else by tokens.

    `samples_per_row` consecutive samples stay together. Depends on lengths and present ranks only,
    never on time; with `move` on lengths alone.
    """
    here = [sample.rank for sample in samples]
    loads = [0] * num_ranks
    for sample in samples:
        loads[sample.rank] += sample.tokens
    together = all(
        len(set(here[i : i + samples_per_row])) == 1 for i in range(0, len(here), samples_per_row)
    )
    if not move and together and max(loads) <= (1 + _TOLERATED_IMBALANCE) * sum(loads) / num_ranks:
        return here
    return deal(samples, num_ranks, samples_per_row)


def deal(samples: Sequence[Sample], num_ranks: int, samples_per_row: int = 1) -> list[int]:
    """The rank that gets each sample, by tokens; `samples_per_row` in a row stay together."""
    rows = [samples[i : i + samples_per_row] for i in range(0, len(samples), samples_per_row)]
    rows_by_rank = balance([sum(s.tokens for s in group) for group in rows], num_ranks)
    ranks = [0] * len(samples)
    for rank, indices in enumerate(rows_by_rank):
        for index in indices:
            for i in range(
                index * samples_per_row, min((index + 1) * samples_per_row, len(samples))
            ):
                ranks[i] = rank
    return ranks
