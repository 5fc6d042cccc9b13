"""The memory of pushed weights: on ranks that train, and on ranks that generate alone."""

from dataclasses import dataclass

PUSHED = "pushed weights"
PACKED = "packed weights"
DELTAS = "deltas of pushed weights"
LOADED = "weights being loaded"
KEPT = "weights as loaded"
BASE = "base weights"
ADAPTERS = "adapters"


@dataclass(frozen=True, kw_only=True, slots=True)
class SentSizes:
    """What a training rank sends to instances on ranks of their own.

    A push packs an array for each place on the device and copies it to the host. The data plane
    then has the version's arrays, in host memory, while instances need it.
    """

    version: int
    """Bytes of its arrays of one version."""
    largest: int
    """Bytes of the largest array: what is on the device while it is packed."""
    versions: int
    """Versions in the data plane at once."""
    deltas: int = 0
    """Bytes of the deltas of one version, at most."""

    @property
    def stored(self) -> dict[str, int]:
        """What the data plane has of this rank. Deltas begin with a version that is there."""
        return {PUSHED: self.versions * self.version, DELTAS: self.versions * self.deltas}

    @property
    def packed(self) -> dict[str, int]:
        """Arrays in host memory until the data plane has them."""
        return {PACKED: self.version}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReceivedSizes:
    """What a rank that generates alone takes besides its engine, in bytes."""

    arrays: int
    """Arrays of a load, in host memory: its shard of the weights, or of the adapters."""
    kept: int = 0
    """What it has loaded last, which deltas change; in host memory."""
    base: int = 0
    """Weights below adapters, which the rank has read from the model's files; in host memory."""
    adapters: int = 0
    """Adapters on the device, from which a load computes weights."""

    @property
    def stays(self) -> dict[str, int]:
        """What is in host memory all the time."""
        return {BASE: self.base, KEPT: self.kept}


def versions_held(max_staleness: int) -> int:
    """Versions in the data plane at once, where batch b is made by v_(b - S), S = `max_staleness`.

    When v_(k+1) is pushed, batches k + 1 to k + S still need S older ones. The version before is
    there in any case.
    """
    return max(2, max_staleness + 1)
