"""Which rank gets which samples, and the references to the parcels that hold them."""

from collections.abc import Iterable
from typing import Any

from hybridrl.flow.sample import Sample


def by_rank(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """Samples by the rank that has them, in their order."""
    ranks: dict[int, list[Sample]] = {}
    for sample in samples:
        ranks.setdefault(sample.rank, []).append(sample)
    return ranks


def once(references: Iterable[Any]) -> tuple[Any, ...]:
    """Each reference once: a parcel has many samples."""
    return tuple({id(reference): reference for reference in references}.values())
