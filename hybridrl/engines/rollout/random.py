"""Counter-based random numbers: a sample's draws depend on its key and the position alone.

Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hybridrl.engines.rollout.interface import Request

_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_AHEAD = 256  # positions whose uniforms are made at once

Words = npt.NDArray[np.uint64] | np.uint64
_Ints = npt.NDArray[np.int64]
UniformsOf = Callable[[Sequence[Request], _Ints, _Ints], npt.NDArray[np.float64]]
"""Uniforms of requests in slots, at token numbers: `UniformTable.draw`, `draw_ahead`."""


def stream_key(seed: int, prompt: int, branch: str = "", k: int = 0) -> int:
    """The 64-bit key of a sample's random stream, from the run's seed and the sample's identity."""
    # The last part was of earlier versions: without it their runs would go on with other draws.
    identity = repr((int(seed), int(prompt), str(branch), int(k), 0))
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little")


def philox4x32(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words]
) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10: 32-bit words (held in uint64, broadcast together) of one counter and key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_ in range(_ROUNDS):
        bump0, bump1 = (np.uint64(round_ * weyl & 0xFFFFFFFF) for weyl in _WEYL)
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _SHIFT) ^ c1 ^ ((k0 + bump0) & _LOW),
            product1 & _LOW,
            (product0 >> _SHIFT) ^ c3 ^ ((k1 + bump1) & _LOW),
            product0 & _LOW,
        )
    return c0, c1, c2, c3


def uniforms(
    keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 random bits for 64-bit `keys` at token `positions` (broadcast)."""
    key, at = np.asarray(keys, np.uint64), np.asarray(positions).astype(np.uint64)
    zero = np.uint64(0)
    counter = (at & _LOW, at >> _SHIFT, zero, zero)
    high, low, _, _ = philox4x32(counter, (key & _LOW, key >> _SHIFT))
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))
    return np.asarray(bits * 2.0**-53, np.float64)


class UniformTable:
    """The uniforms of running requests, one row a slot, made `_AHEAD` positions at once."""

    def __init__(self, slots: int) -> None:
        self._rows = np.zeros((slots, _AHEAD))
        self._starts = np.full(slots, -1)  # first position of each row

    def forget(self, slots: Sequence[int]) -> None:
        """Invalidate these slots, which get other requests."""
        self._starts[list(slots)] = -1

    def draw(
        self, requests: Sequence[Request], slots: _Ints, counts: _Ints
    ) -> npt.NDArray[np.float64]:
        """Uniforms [rows] of token number `counts` [rows] of `requests` in `slots` [rows]."""
        starts = counts - counts % _AHEAD
        stale = self._starts[slots] != starts
        for start in np.unique(starts[stale]).tolist() if stale.any() else ():
            rows = np.flatnonzero(stale & (starts == start)).tolist()
            self._fill([(requests[row], int(slots[row])) for row in rows], start)
        return np.asarray(self._rows[slots, counts - starts], np.float64)

    def draw_ahead(
        self, requests: Sequence[Request], slots: _Ints, counts: _Ints
    ) -> npt.NDArray[np.float64]:
        """Uniforms as `draw` gives them, for several tokens of a request in a row.

        The table has one stretch of positions of each slot, and a draft may reach into the next.
        """
        starts = counts - counts % _AHEAD
        if (self._starts[slots] == starts).all():
            return np.asarray(self._rows[slots, counts - starts], np.float64)
        drawn = np.empty(len(counts))
        for start in np.unique(starts).tolist():
            rows = np.flatnonzero(starts == start)
            _, first = np.unique(slots[rows], return_index=True)
            once = rows[first]
            self.draw([requests[row] for row in once.tolist()], slots[once], counts[once])
            drawn[rows] = self._rows[slots[rows], counts[rows] - start]
        return drawn

    def _fill(self, rows: Sequence[tuple[Request, int]], start: int) -> None:
        longest = max(request.sampling.max_new_tokens for request, _ in rows)
        positions = np.arange(start, max(min(start + _AHEAD, longest), start + 1))
        keys = np.array([request.stream for request, _ in rows], np.uint64)
        slots = [slot for _, slot in rows]
        self._rows[slots, : len(positions)] = uniforms(keys[:, None], positions)
        self._starts[slots] = start
