"""What a rank is in, and since when, for other processes to read while it is in it.

A rank keeps one record in a file that it has mapped: to write it is a copy in memory. So a reader
needs no answer of the rank, which may be stopped, or in a C call that holds the interpreter. For
the same reason the stack comes from a signal handler in C (`faulthandler`), not from a thread.

A call consists of stretches, each with a name: of an update every pass of a micro-batch is one. How
long a stretch has taken before bounds how long it may take (`Activity.longest`).
"""

import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = ".ranks"
"""In the directory of a run: the record of each rank, and its stacks."""
STACK_SIGNAL = signal.SIGUSR2
_RECORD = struct.Struct("<QqdddQ40s40sqQ")
_KEPT = 32  # seconds of a stretch that are kept
_NEVER_TORN = 100  # a writer takes a microsecond


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank is in, as another process of its node sees it.

    Times are `time.monotonic` of the node. `times` and `longest` are of this stretch of such calls:
    how often it has ended, and the most seconds it has taken of late. A rank that waits for a call
    has an empty `call`.
    """

    pid: int
    call: str
    stretch: str
    number: int
    call_since: float
    since: float
    times: int
    longest: float

    @property
    def seconds(self) -> float:
        """How long the stretch has lasted."""
        return time.monotonic() - self.since

    def __str__(self) -> str:
        if not self.call:
            return "waits for a call"
        stretch = f", {self.stretch}" if self.stretch else ""
        return f"{self.call}{stretch}{f' {self.number}' if self.number >= 0 else ''}"


class _Kind:
    """Stretches of one name in calls of one name, and the most seconds that one took of late."""

    def __init__(self, call: str, stretch: str) -> None:
        self.names = call.encode()[:40], stretch.encode()[:40]
        self.seconds: deque[float] = deque(maxlen=_KEPT)
        self.times, self.longest = 0, 0.0


class ActivityRecord:
    """The writer's side: one for the process, whose main work alone is recorded."""

    def __init__(self, path: Path) -> None:
        """Make the file `path`, and have `STACK_SIGNAL` append the stacks of all threads to it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            file.truncate(_RECORD.size)
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._stacks = stacks_of(path).open("wb")
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True, chain=False)
        self._pid, self._thread, self._writes = os.getpid(), threading.get_ident(), 0
        self._kinds = {("", ""): _Kind("", "")}
        self._call, self._kind = "", self._kinds["", ""]
        self._call_since = self._since = time.monotonic()
        self.begin("")

    def begin(self, call: str) -> None:
        """Enter a call, or wait for one where it is empty."""
        self._thread, self._call = threading.get_ident(), call
        self._call_since = time.monotonic()
        self._enter("", -1, self._call_since)

    def mark(self, stretch: str, number: int = -1) -> None:
        """Enter a stretch of the present call, number `number` of its kind.

        What runs beside it in another thread has none.
        """
        if self._call and threading.get_ident() == self._thread:
            self._enter(stretch, number, time.monotonic())

    def _enter(self, stretch: str, number: int, now: float) -> None:
        ended = self._kind  # this is on the path of every pass: few calls of Python
        ended.seconds.append(now - self._since)
        ended.longest = max(ended.seconds)
        ended.times += 1
        key = self._call, stretch
        if key not in self._kinds:
            self._kinds[key] = _Kind(*key)
        kind = self._kind = self._kinds[key]
        self._since, self._writes = now, self._writes + 1
        _RECORD.pack_into(
            self._memory, 0, self._writes, self._pid, self._call_since, now, kind.longest,
            kind.times, *kind.names, number, self._writes,
        )  # fmt: skip


_own: ActivityRecord | None = None


def record_to(path: Path) -> None:
    """Record this process's activity in the file `path` from now on."""
    global _own
    _own = ActivityRecord(path)


@contextmanager
def in_call(name: str) -> Iterator[None]:
    """Within, this process is in the call `name`; an empty one is not recorded."""
    recorded = _own if name else None  # what a rank does beside its calls is user code
    if recorded is not None:
        recorded.begin(name)
    try:
        yield
    finally:
        if recorded is not None:
            recorded.begin("")


def mark(stretch: str, number: int = -1) -> None:
    """From now on this process is in this stretch of its call, if its activity is recorded."""
    if _own is not None:
        _own.mark(stretch, number)


def file_of(run_dir: Path, rank: int) -> Path:
    """The record of a rank."""
    return run_dir / FOLDER / f"{rank:05d}"


def stacks_of(path: Path) -> Path:
    """The file that `STACK_SIGNAL` has a rank append its stacks to, by that of its record."""
    return path.with_suffix(".stacks")


def read(path: Path) -> Activity | None:
    """What the rank with this record is in; None where there is none that can be read."""
    try:
        with path.open("rb", buffering=0) as file:
            for _ in range(_NEVER_TORN):
                data = os.pread(file.fileno(), _RECORD.size, 0)
                if len(data) < _RECORD.size:
                    return None
                first, pid, call_since, since, longest, times, call, stretch, number, last = (
                    _RECORD.unpack(data)
                )
                if first == last:
                    names = _text(call), _text(stretch)
                    return Activity(pid, *names, number, call_since, since, times, longest)
    except OSError:
        pass
    return None


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")
