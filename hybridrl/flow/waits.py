"""How long environments take to reply: learned from the replies of a run."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hybridrl.costs.instance import Costs

_KEPT = 1024  # waits
_ENOUGH = 16
_GRID = 64


class WaitModel:
    """Waits of the last replies, in seconds, as a sample of those to come.

    Example: waits of 1, 2, 3 and 4 seconds are known. One reply is due in 2.5 seconds, and after 2
    seconds of waiting in 1.5. The first of two is due in less.
    """

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_KEPT)

    def saw(self, seconds: Sequence[float]) -> None:
        """Replies have come after these waits."""
        self._seen.extend(seconds)

    def first(self, waited: Sequence[float]) -> float:
        """Seconds until the first of several replies comes, the median; 0 for too few waits seen.

        `waited` are the seconds that each has taken so far.
        """
        if len(self._seen) < _ENOUGH or not waited:
            return 0.0
        known = np.sort(self._seen)
        times = np.linspace(0.0, known[-1], _GRID)
        none_yet = np.ones(_GRID)
        for seconds in waited:
            longer = len(known) - np.searchsorted(known, seconds + times, "right")
            none_yet *= longer / max(1, longer[0])
        return float(times[none_yet >= 0.5].max(initial=0.0))

    @property
    def mean(self) -> float:
        """The mean of the waits; 0 for too few."""
        return sum(self._seen) / len(self._seen) if len(self._seen) >= _ENOUGH else 0.0

    def left(self, waited: Sequence[float]) -> list[float]:
        """Seconds until each of several replies comes, the median; 0 for too few waits seen.

        `waited` are the seconds that each has taken so far. One that has taken longer than any is
        expected to take a quarter more.
        """
        if len(self._seen) < _ENOUGH or not waited:
            return [0.0] * len(waited)
        known, so_far = np.sort(self._seen), np.asarray(waited)
        first = np.searchsorted(known, so_far, "right")
        median = known[np.minimum((first + len(known)) // 2, len(known) - 1)]
        left: list[float] = np.where(first < len(known), median - so_far, so_far / 4).tolist()
        return left

    def state_dict(self) -> dict[str, Any]:
        """The waits, in plain JSON types."""
        return {"seen": [*self._seen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`."""
        self._seen.clear()
        self._seen.extend(state["seen"])


def worth_parking(costs: Costs, seconds: float, num_samples: int, tokens: int) -> bool:
    """Whether `seconds` without work pay for parking samples of so many tokens, and resuming them.

    Each takes a call; keys and values are moved, or computed again.
    """
    calls = 2 * costs.between_s + num_samples * costs.admit_s
    return bool(seconds > calls + num_samples * costs.move(tokens))
