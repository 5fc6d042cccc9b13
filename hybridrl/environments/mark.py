"""Memory that a process shares with its parent, and says in whose code it is about to run."""

import mmap
import os
import struct
import tempfile

_LAYOUT = struct.Struct("<Qd")


class Mark:
    """The number of the episode whose code runs, 0 for none, and since when.

    Time is `time.monotonic()`, which is the machine's. The time is written before the number, and
    read after it: so it never is that of an earlier step.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """Make it, or with a `descriptor` open that of the parent."""
        if descriptor is None:
            with tempfile.TemporaryFile() as file:
                file.truncate(_LAYOUT.size)
                descriptor = os.dup(file.fileno())
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _LAYOUT.size)

    def tell(self, number: int, since: float) -> None:
        """Say that the code of an episode is about to run, or with 0 that it no longer does."""
        if number:
            struct.pack_into("<d", self._memory, 8, since)
        struct.pack_into("<Q", self._memory, 0, number)

    def read(self) -> tuple[int, float]:
        """The number, and the time that its step has begun."""
        number, _ = _LAYOUT.unpack_from(self._memory)
        (since,) = struct.unpack_from("<d", self._memory, 8)
        return number, since

    def close(self) -> None:
        """Give the memory up."""
        self._memory.close()
        os.close(self.descriptor)
