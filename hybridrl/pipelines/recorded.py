"""Passes that a run has timed, micro-batch by micro-batch: what later plans are priced by."""

from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.pipelines.problem import PassKind


class RecordedPass(NamedTuple):
    """A pass of a micro-batch over a chunk of a model on one rank, with the traffic within it."""

    kind: PassKind
    chunk: int
    tokens: int
    scored: int
    pairs: int
    """Pairs of a query and a key in attention."""
    seconds: float


@dataclass(frozen=True, slots=True)
class RolePasses:
    """Passes of a role's model in one call, an update or a forward-only stage."""

    role: str
    passes: tuple[RecordedPass, ...]
