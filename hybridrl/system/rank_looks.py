"""Looks at the ranks of this node from outside: what each is in, and where its code stands."""

import linecache
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hybridrl.system import activity
from hybridrl.system.activity import Activity

_STACK_S = 2.0  # for a signal handler in C
_POLL_S = 0.02
_INNER = 4  # functions of torch between its collectives and C
_DUMP = re.compile(r"^(?:Current thread|Thread) ", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_STATES = {"T": "is stopped by a signal", "t": "is stopped by a debugger", "Z": "has ended"}
_DISTRIBUTED = "torch/distributed/"
_WAITS = (".wait(", "dist.", ".item()", ".tolist()", ".cpu()", "synchronize(")
"""What a line of code has that waits for other ranks, or for the GPU, which waits for them."""
_OWN = str(Path(__file__).parents[1])


@dataclass(frozen=True, slots=True)
class Frame:
    """A function in a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        path = Path(self.file)
        own = self.file.startswith(_OWN)
        short = path.relative_to(Path(_OWN).parent) if own else Path(*path.parts[-2:])
        return f"{self.name} ({short}:{self.line})"


@dataclass(frozen=True, slots=True)
class RankLook:
    """A rank, what it is in, and its stack with the innermost function first.

    `state` is that of its process where it does not run. A stack is empty where none was asked for,
    or none came.
    """

    rank: int
    activity: Activity
    state: str = ""
    stack: tuple[Frame, ...] = ()

    @property
    def collective(self) -> str:
        """The collective that it waits in; empty where it is in none."""
        if not self.stack:
            return ""
        first = self.stack[0]
        if first.file.startswith(_OWN):
            code = linecache.getline(first.file, first.line).strip()
            return code if any(word in code for word in _WAITS) else ""
        inner = [frame for frame in self.stack[:_INNER] if _DISTRIBUTED in frame.file]
        named = [frame.name for frame in inner if not frame.name.startswith(("_", "wrapper"))]
        return (named or [inner[0].name])[0] if inner else ""

    @property
    def place(self) -> str:
        """Where its code stands."""
        if self.state:
            return self.state
        own = next((frame for frame in self.stack if frame.file.startswith(_OWN)), None)
        at = str(own or (self.stack[0] if self.stack else ""))
        if name := self.collective:
            return f"waits for others in {name}, called by {at}"
        inner = self.stack[0] if self.stack and self.stack[0] is not own else None
        within = f", within {inner}" if inner is not None else ""
        return f"is at {at}{within}" if at else "gives no stack"

    def __str__(self) -> str:
        seconds = f"for {self.activity.seconds:.1f} s" if self.activity.call else ""
        fields = (
            f"rank {self.rank}, pid {self.activity.pid}: {self.activity}",
            seconds,
            self.place,
        )
        return "; ".join(field for field in fields if field)


def look(run_dir: Path, ranks: Iterable[int], stacks: bool = True) -> list[RankLook]:
    """Look at the ranks that have a record on this node; with `stacks` each is asked for one."""
    activities = {rank: activity.read(activity.file_of(run_dir, rank)) for rank in ranks}
    known = {rank: one for rank, one in activities.items() if one is not None}
    states = {rank: process_state(one.pid) for rank, one in known.items()}
    asked = {rank: one for rank, one in known.items() if stacks and not states[rank]}
    stacks_by_rank = _stacks(run_dir, asked)
    return [
        RankLook(rank, one, states[rank], stacks_by_rank.get(rank, ()))
        for rank, one in known.items()
    ]


def recorded_ranks(run_dir: Path) -> list[int]:
    """The ranks of the run that have records on this node."""
    names = (path.name for path in (run_dir / activity.FOLDER).glob("*"))
    return sorted(int(name) for name in names if name.isdigit())


def process_state(pid: int) -> str:
    """Why a process does not run; empty where it does."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return _STATES["Z"]
    return _STATES.get(text.rpartition(")")[2].split()[0], "")


def _stacks(run_dir: Path, ranks: Mapping[int, Activity]) -> dict[int, tuple[Frame, ...]]:
    """Ask these ranks for their stacks, all at once, and read those that come."""
    files = {rank: activity.stacks_of(activity.file_of(run_dir, rank)) for rank in ranks}
    before = {}
    for rank, one in ranks.items():
        with suppress(OSError):
            before[rank] = files[rank].stat().st_size
            os.kill(one.pid, activity.STACK_SIGNAL)
    stacks_by_rank: dict[int, tuple[Frame, ...]] = {}
    read: dict[int, str] = {}
    until = time.monotonic() + _STACK_S
    while len(stacks_by_rank) < len(before) and time.monotonic() < until:
        time.sleep(_POLL_S)
        for rank in before.keys() - stacks_by_rank.keys():
            with suppress(OSError):
                with files[rank].open("rb") as file:
                    file.seek(before[rank])
                    text = file.read().decode(errors="replace")
                if text and text == read.get(rank):  # all of it is there
                    stacks_by_rank[rank] = stack_of(text, ranks[rank].thread)
                read[rank] = text
    return stacks_by_rank


def stack_of(text: str, thread: int) -> tuple[Frame, ...]:
    """The stack of a thread in what `faulthandler` wrote; empty where it is not there."""
    for dump in _DUMP.split(text)[1:]:
        number = dump.partition(" ")[0]
        if int(number, 16) == thread:
            return tuple(Frame(m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(dump))
    return ()
