"""A limit on what a piece of code computes, which ends a regular expression, too."""

import contextlib
import signal
from collections.abc import Iterator


class TimeLimitReached(Exception):
    """Foreign code took longer than it may."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitReached after `seconds` of this process's computing; in its main thread alone.

    Python looks for signals within a regular expression that backtracks, too. Elsewhere no thread
    could end one, since it holds the interpreter. Waiting does not count, so a loaded machine ends
    none.
    """

    def end(*_: object) -> None:
        raise TimeLimitReached(f"it computes for more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
