"""What a rank is in, and since when, for other processes of its node to read while it is in it.

A rank keeps one record in a file that it has mapped: to write it is a copy in memory. So a reader
needs no answer of the rank, which may be stopped, or in a C call that holds the interpreter. For
the same reason the stack comes from a signal handler in C (`faulthandler`), not from a thread.

A call consists of stretches, each with a name: of an update every pass of a micro-batch is one. How
long a stretch has taken before bounds how long it may take (`Activity.longest`).
"""

import faulthandler
import hashlib
import logging
import mmap
import os
import signal
import struct
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FOLDER = ".ranks"
"""In the directory of a run: the record of each rank, and its stacks."""
STACK_SIGNAL = signal.SIGUSR2
_RECORD = struct.Struct("<Q16sqqQddQ40s40sqQ")
_DECAY = 0.999  # of the longest seconds, a stretch: what a first step took is forgotten in time
_NEVER_TORN = 100  # a writer takes a microsecond


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank is in, as another process of its node sees it.

    Times are `time.monotonic` of the node. `times` and `longest` are of this stretch of such calls:
    how often it has ended, and the most seconds it has taken of late. A rank that waits for a call
    has an empty `call`; so has one that runs user code beside its calls. `thread` runs its calls.
    """

    pid: int
    thread: int
    call: str
    stretch: str
    number: int
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
        self.times, self.longest = 0, 0.0


class ActivityRecord:
    """The writer's side: one for the process, whose main work alone is recorded."""

    def __init__(self, path: Path) -> None:
        """Make the file `path`; `STACK_SIGNAL` appends the stacks of all threads to another.

        Raises OSError where it cannot be made or mapped.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, _RECORD.size)  # a full disk raises here, not later
            self._memory = mmap.mmap(file.fileno(), _RECORD.size)
        self._stacks = stacks_of(path).open("wb")
        faulthandler.register(STACK_SIGNAL, self._stacks, all_threads=True, chain=False)
        self._process = _node(), os.getpid(), _start_of(os.getpid())
        self._thread, self._writes = threading.get_ident(), 0
        self._kinds = {("", ""): _Kind("", "")}
        self._call, self._kind = "", self._kinds["", ""]
        self._since = time.monotonic()
        self.begin("")

    def begin(self, call: str) -> None:
        """Enter a call, or wait for one where it is empty."""
        self._thread, self._call = threading.get_ident(), call
        self._enter("", -1, time.monotonic())

    def mark(self, stretch: str, number: int = -1) -> None:
        """Enter a stretch of the present call, number `number` of its kind.

        What runs beside it in another thread has none.
        """
        if self._call and threading.get_ident() == self._thread:
            self._enter(stretch, number, time.monotonic())

    def _enter(self, stretch: str, number: int, now: float) -> None:
        ended = self._kind  # this is on the path of every pass: few calls of Python
        seconds, before = now - self._since, _DECAY * ended.longest
        ended.longest = seconds if seconds > before else before
        ended.times += 1
        key = self._call, stretch
        if key not in self._kinds:
            self._kinds[key] = _Kind(*key)
        kind = self._kind = self._kinds[key]
        self._since, self._writes = now, self._writes + 1
        _RECORD.pack_into(
            self._memory, 0, self._writes, *self._process, self._thread, now,
            kind.longest, kind.times, *kind.names, number, self._writes,
        )  # fmt: skip


_own: ActivityRecord | None = None


def record_to(path: Path) -> None:
    """Record this process's activity in the file `path` from now on, if it can be made."""
    global _own
    try:
        _own = ActivityRecord(path)
    except OSError as error:
        logger.warning("nobody sees what this rank is in: %s", error)


def begin_call(name: str) -> None:
    """From now on this process is in a call, if its activity is recorded; "" is in none."""
    if _own is not None:
        _own.begin(name)


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
    """What the rank with this record is in; None unless its process lives on this node.

    A number of a process is not enough: another node, or a container, has other processes of the
    same numbers, and so has this one later.
    """
    data = _stable(path)
    if data is None:
        return None
    _, node, pid, start, thread, since, longest, times, *names, number, _ = data
    if node != _node() or start != _start_of(pid):
        return None
    call, stretch = map(_text, names)
    return Activity(pid, thread, call, stretch, number, since, times, longest)


def last_call(path: Path) -> str:
    """The call that the rank with this record was in last, also once it has died.

    It is empty where the rank waited for a call, and where the record cannot be read.
    """
    data = _stable(path)
    return "" if data is None else _text(data[8])


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


def _stable(path: Path) -> tuple[Any, ...] | None:
    """The fields of a record, not amid a write; None where there are none."""
    try:
        with path.open("rb", buffering=0) as file:
            for _ in range(_NEVER_TORN):
                data = os.pread(file.fileno(), _RECORD.size, 0)
                if len(data) < _RECORD.size:
                    return None
                fields = _RECORD.unpack(data)
                if fields[0] == fields[-1] and fields[0]:
                    return fields
    except OSError:
        pass
    return None


@cache
def _node() -> bytes:
    """What tells this node, since it was booted, and this container from all others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return bytes(16)
    return hashlib.blake2b(boot + str(space).encode(), digest_size=16).digest()


def _start_of(pid: int) -> int:
    """When a process began, in ticks since the node was booted; -1 where there is none."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return -1
