"""Whether keys and values that give way are copied to host memory, or computed again."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_EACH = 32  # decisions for which a choice holds
_LEAST_TOKENS = 64  # of a measurement: a pass of fewer has other costs
_FADES = 0.9  # of what is known, at each measurement


class Rate:
    """Seconds a token, by what was measured lately; None before that."""

    def __init__(self) -> None:
        self._seconds = self._tokens = 0.0

    def saw(self, tokens: int, seconds: float) -> None:
        """So many tokens took so long."""
        if tokens >= _LEAST_TOKENS:
            self._seconds = _FADES * self._seconds + seconds
            self._tokens = _FADES * self._tokens + tokens

    @property
    def seconds(self) -> float | None:
        """Of a token."""
        return self._seconds / self._tokens if self._tokens else None


class KVCosts:
    """Compares a copy to host memory and back with a prefill, by times that were measured.

    Where one of the two is not known yet, a copy is made. A choice holds for some decisions.
    `agree` gives all ranks of an instance the times of one of them; without it they always copy.
    Copies have at most `most_tokens`.

    *Example.* A token's prefill takes 8 us, its copies 1 us each: 100 tokens cost 800 us or 200.
    """

    def __init__(
        self, agree: Callable[[list[float]], list[float]] | None, most_tokens: int
    ) -> None:
        self.prefill, self.copy = Rate(), Rate()
        self._agree, self._most_tokens = agree, most_tokens
        self._decided, self._copies = 0, True

    def copies(self, tokens: int, in_host: int) -> bool:
        """Whether `tokens` that give way are copied; host memory has `in_host` of others."""
        if self._agree is not None and self._decided % _EACH == 0:
            prefill, copy = self.prefill.seconds, self.copy.seconds
            saved = 0.0 if prefill is None or copy is None else prefill - 2 * copy
            self._copies = self._agree([saved])[0] >= 0
        self._decided += 1
        return self._copies and in_host + tokens <= self._most_tokens

    @contextmanager
    def timing(self, rate: Rate, tokens: int, pool: torch.Tensor) -> Iterator[None]:
        """Measure what the body does with `tokens` in the memory of `pool`, to its end."""
        _finish(pool)
        start = time.perf_counter()
        yield
        _finish(pool)
        rate.saw(tokens, time.perf_counter() - start)


def _finish(pool: torch.Tensor) -> None:
    """Wait for what a device still does with its memory: by reading a number of it."""
    pool.view(-1)[0].item()
