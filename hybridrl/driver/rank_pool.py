"""A pool of ranks, as the driver calls it."""

from dataclasses import dataclass

from hybridrl.workers.rank_calls import RankCalls


@dataclass(slots=True)
class Pool:
    """Ranks that are one process group: `calls` calls all of them. `roles` is for error messages.

    A rank's number is that of the run; inside, ranks count from 0.
    """

    ranks: range
    calls: RankCalls
    roles: list[str]
