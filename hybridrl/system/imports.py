"""Imports of large packages, quicker."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def imports_uncollected() -> Iterator[None]:
    """Within, no garbage is collected.

    What modules make stays. To look at it again and again is a seventh of the CPU time in which
    torch and transformers are imported (5.0 s, then 4.3 s). It is not frozen: libraries would
    report as leaks what no collection at the end has freed.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
