"""Links between the workers of a cluster, each with its own speed (Pipette, arXiv 2405.18093)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """A link between ranks: `message_s` for a message of any size, and bytes a second each way."""

    bytes_per_s: float
    message_s: float = 0.0

    def send_s(self, nbytes: float) -> float:
        """Seconds of a message from one rank to another."""
        return self.message_s + nbytes / self.bytes_per_s

    def gather_s(self, nbytes: float, ranks: int) -> float:
        """Seconds of an all-gather or a reduce-scatter; `nbytes` counts all ranks together."""
        if ranks == 1:
            return 0.0
        steps = math.ceil(math.log2(ranks))
        return steps * self.message_s + (ranks - 1) / ranks * nbytes / self.bytes_per_s

    def all_reduce_s(self, nbytes: float, ranks: int) -> float:
        """Seconds of an all-reduce, which sends what a reduce-scatter and an all-gather send."""
        return self.gather_s(2 * nbytes, ranks)


LinkMatrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class LinkTable:
    """The link from each worker [row] to each other one [column], measured or given.

    Workers count as they are started: node by node, by their GPUs. What a worker's link to itself
    says does not matter. Example: `LinkTable(((1e9, 1e8), (1e8, 1e9)), ((0, 1e-5), (1e-5, 0)))`.
    """

    bytes_per_s: LinkMatrix
    message_s: LinkMatrix

    @property
    def size(self) -> int:
        """Number of workers."""
        return len(self.bytes_per_s)

    def link(self, source: int, target: int) -> LinkSpeed:
        """Return the link from one worker to another."""
        return LinkSpeed(self.bytes_per_s[source][target], self.message_s[source][target])

    @classmethod
    def from_json(cls, values: Any) -> "LinkTable":
        """Raises ValueError for anything but two square tables, of speeds above 0 and of seconds.

        Without `message_s` messages of any size take no time by themselves.
        """
        if not isinstance(values, Mapping) or "bytes_per_s" not in values:
            raise ValueError("links: wanted bytes_per_s, a row of numbers for each worker")
        size = len(values["bytes_per_s"])
        message_s = values.get("message_s", [[0.0] * size] * size)
        rates = _square(values["bytes_per_s"], "bytes_per_s", size)
        seconds = _square(message_s, "message_s", size)
        for i, (row, own) in enumerate(zip(rates, seconds, strict=True)):
            for j in range(size):
                if i != j and not (0 < row[j] < math.inf and 0 <= own[j] < math.inf):
                    wanted = "wanted bytes_per_s above 0 and message_s of 0 or more"
                    raise ValueError(f"links: from {i} to {j}: {row[j]:g} and {own[j]:g}, {wanted}")
        return cls(rates, seconds)


def _square(rows: Any, name: str, size: int) -> LinkMatrix:
    is_square = (
        isinstance(rows, Sequence)
        and len(rows) == size
        and all(isinstance(row, Sequence) and len(row) == size for row in rows)
    )
    if not is_square:
        raise ValueError(f"links: {name}: wanted {size} rows of {size} numbers each")
    try:
        return tuple(tuple(float(value) for value in row) for row in rows)
    except (TypeError, ValueError):
        raise ValueError(f"links: {name}: wanted numbers") from None
