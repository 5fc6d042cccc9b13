"""Sparse pushes: an array of weights as its changes since the version before.

A delta names the version that it begins with and the checksum of its result. So whoever applies it
knows whether the outcome is what was trained, and else takes the whole array.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hybridrl.layout.push import WeightArray
from hybridrl.layout.sparse_bytes import apply, encode


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """What makes the array of `version` of that of version `base`, for one place.

    `data` is the code of `sparse_bytes`; `checksum` is that of the resulting array.
    """

    version: int
    base: int
    sender: int
    data: np.ndarray
    checksum: int


def deltas(
    before: Mapping[int, WeightArray], after: Mapping[int, WeightArray]
) -> dict[int, WeightDelta]:
    """The deltas between two pushes of a training rank, by place, in a format of 16 bits.

    A place is left out where the array was not pushed before, or is smaller whole.
    """
    changes = {}
    for place in before.keys() & after.keys():
        old, new = before[place], after[place]
        data = encode(old.data.view(np.uint16), new.data.view(np.uint16))
        if data is not None:
            own = new.version, old.version, new.sender, data, new.checksum
            changes[place] = WeightDelta(*own)
    return changes


class KeptArrays:
    """The arrays that a rank has loaded last, in host memory: what deltas change, in place.

    Example: after `keep` of version 3, `apply` of a delta from 3 to 4 gives the array of version 4.
    A second time it gives None, as does one from 4 to 5 without the one before.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, WeightArray] = {}  # by training rank

    @property
    def nbytes(self) -> int:
        """What it holds, in bytes."""
        return sum(array.data.nbytes for array in self._arrays.values())

    def keep(self, array: WeightArray) -> WeightArray:
        """Take a whole array; answers with a copy, which is valid until the next change."""
        kept = self._arrays.pop(array.sender, None)
        if kept is None or kept.data.size != array.data.size:
            data = array.data.copy()
        else:
            data = kept.data
            np.copyto(data, array.data)
        own = WeightArray(array.version, array.sender, data, array.checksum)
        self._arrays[array.sender] = own
        return own

    def apply(self, delta: WeightDelta) -> WeightArray | None:
        """The array that a delta makes of the kept one, whose bytes are still to be checked.

        None where another version is kept, or the delta is damaged.
        """
        kept = self._arrays.get(delta.sender)
        if kept is None or kept.version != delta.base:
            return None
        del self._arrays[delta.sender]  # neither version until it is complete
        try:
            apply(delta.data, kept.data.view(np.uint16))
        except ValueError:
            return None
        own = WeightArray(delta.version, delta.sender, kept.data, delta.checksum)
        self._arrays[delta.sender] = own
        return own
