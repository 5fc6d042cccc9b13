"""The timeline of a run: spans on lanes, as a file that ui.perfetto.dev opens.

The file is a JSON array of Chrome trace events, one a line. Each append overwrites the closing
bracket with the next events and a new bracket in a single write. So the array is valid JSON between
any two calls, however the run ends. Times are whole microseconds since the epoch; Perfetto shows
them relative to the first event.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.telemetry.records import dump, named, parse, write_all

_CLOSE = b"\n]\n"
_PROFILE = "torch"  # category of a profile's operations


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """Work of one process from `start` to `end`, in seconds since the epoch."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan(TimeSpan):
    """A time span on its lane in the trace.

    A lane is `driver`, `rank 0`, ... or, where one process does several things at once, `rank
    0/concurrent`. Spans of one lane nest or do not overlap.
    """

    lane: str
    step: int
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadSlice(TimeSpan):
    """An operation of a profile, on a thread or a GPU stream of its process."""

    thread: str


@dataclass(frozen=True, slots=True)
class Counter:
    """A point of one or more curves of a lane's process, at `when` seconds since the epoch."""

    lane: str
    name: str
    when: float
    values: Mapping[str, float]


def rank_lane(rank: int, concurrent: bool = False) -> str:
    """The lane of a rank, or of its concurrent work."""
    return f"rank {rank}/concurrent" if concurrent else f"rank {rank}"


def is_rank(lane: str) -> bool:
    """Whether a lane is a rank's own; concurrent work (`rank 0/concurrent`) keeps no rank busy."""
    return lane.startswith("rank ") and "/" not in lane


def bubble_share(
    spans: Iterable[TraceSpan], window: tuple[float, float] | None = None
) -> dict[str, float]:
    """Share of the time in which each lane was idle, between 0 and 1.

    The time is the `window`, where lanes work across the ends of a step. Else it runs from the
    first start to the last end over all `spans`, which should be those of one step. So waiting for
    another lane counts at both ends too. Nested spans count once. A step without duration has no
    bubbles.
    """
    spans = sorted(spans, key=lambda span: span.start)
    if not spans:
        return {}
    first, last = window or (spans[0].start, max(span.end for span in spans))
    busy: dict[str, float] = {}
    until: dict[str, float] = {}
    for span in spans:
        begin, end = max(span.start, until.get(span.lane, first)), min(span.end, last)
        busy[span.lane] = busy.get(span.lane, 0.0) + max(0.0, end - begin)
        until[span.lane] = max(end, until.get(span.lane, first))
    if last <= first:
        return dict.fromkeys(busy, 0.0)
    return {lane: 1.0 - seconds / (last - first) for lane, seconds in busy.items()}


class TraceFile:
    """Appends spans and counters to `trace.json`; a file that is there already is continued.

    Invariant: after every call the file is one valid JSON array.
    """

    def __init__(self, path: Path, label: str = "") -> None:
        """Viewers show `label` with the name of every process."""
        self.path, self._label = path, label
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._pids: dict[str, int] = {}
        self._tids: dict[str, int] = {}
        lines = []
        for line, event in _whole_lines(path):
            self._remember(event)
            lines.append(line)
        # Rewritten from the whole lines: a full disk may have cut the last write short.
        os.ftruncate(self._fd, 0)
        with named(path):
            write_all(self._fd, b"[" + _CLOSE, 0)
        self._end = 1
        self._append(lines)

    def span(self, span: TraceSpan) -> None:
        """Add one slice. Raises `ValueError` if it ends before it starts."""
        if span.end < span.start:
            raise ValueError(f"span {span.name} on {span.lane} ends before it starts")
        events, pid, tid = self._track(span.lane)
        args = {"step": span.step, **span.args}
        self._append(map(dump, [*events, _slice(span, "stage", pid, tid, args)]))

    def profile(self, lane: str, slices: Iterable[ThreadSlice], step: int) -> None:
        """Add the operations of a lane's process, on lanes of its threads, in one write."""
        events: list[Mapping[str, Any]] = []
        for one in slices:
            names, pid, tid = self._track(f"{lane}/{one.thread}")
            events += [*names, _slice(one, _PROFILE, pid, tid, {"step": step})]
        self._append(map(dump, events))

    def counter(self, counter: Counter) -> None:
        """Add one point to each of the curves that `counter.values` names."""
        events, pid, _ = self._track(counter.lane)
        point = {
            "ph": "C", "name": counter.name, "pid": pid, "tid": 0, "ts": _micros(counter.when),
            "args": dict(counter.values),
        }  # fmt: skip
        self._append(map(dump, [*events, point]))

    def close(self) -> None:
        """Close the file, which is already whole."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _track(self, lane: str) -> tuple[list[dict[str, Any]], int, int]:
        """Process and thread of a lane, with the metadata events that name them if they are new."""
        events: list[dict[str, Any]] = []
        process, _, thread = lane.partition("/")
        if process not in self._pids:
            # The driver is 1 and rank r is r + 2, so the lanes of two runs compare.
            rank = process.removeprefix("rank ")
            free = max(self._pids.values(), default=1) + 1
            pid = 1 if process == "driver" else int(rank) + 2 if rank.isdecimal() else free + 1000
            self._pids[process] = pid
            events.append(_metadata("process_name", pid, 0, name=process))
            events.append(_metadata("process_sort_index", pid, 0, sort_index=pid))
            if self._label:
                events.append(_metadata("process_labels", pid, 0, labels=self._label))
        pid = self._pids[process]
        if lane not in self._tids:
            tid = 1 + sum(other.partition("/")[0] == process for other in self._tids)
            self._tids[lane] = tid
            events.append(_metadata("thread_name", pid, tid, name=thread or process))
        return events, pid, self._tids[lane]

    def _remember(self, event: Mapping[str, Any]) -> None:
        if event.get("ph") != "M" or "name" not in event.get("args", {}):
            return
        name = event["args"]["name"]
        if event["name"] == "process_name":
            self._pids[name] = event["pid"]
        elif event["name"] == "thread_name":
            process = next(p for p, pid in self._pids.items() if pid == event["pid"])
            self._tids[process if name == process else f"{process}/{name}"] = event["tid"]

    def _append(self, lines: Iterable[str]) -> None:
        """Add events, each as its JSON text, in one write."""
        text = ",\n".join(lines)
        if not text:
            return
        data = ((",\n" if self._end > 1 else "\n") + text).encode("utf-8", "replace")
        with named(self.path):
            write_all(self._fd, data + _CLOSE, self._end)
        self._end += len(data)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The whole events of a trace file in order; none if it is missing."""
    return [event for _, event in _whole_lines(path)]


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The JSON text of each whole event of a trace file, and the event."""
    for line in path.read_text("utf-8", "replace").split("\n") if path.is_file() else ():
        text = line.strip().rstrip(",")
        event = parse(text)
        if isinstance(event, dict):
            yield text, event


def read_timeline(path: Path) -> tuple[list[TraceSpan], list[Counter]]:
    """The slices of stages and the counters of a trace file, each in file order."""
    processes: dict[int, str] = {}
    lanes: dict[tuple[int, int], str] = {}
    spans, counters = [], []
    for event in read_trace(path):
        pid, tid, args = event.get("pid", 0), event.get("tid", 0), event.get("args", {})
        if event.get("name") == "process_name":
            processes[pid] = args["name"]
        elif event.get("name") == "thread_name":
            process = processes.get(pid, str(pid))
            lanes[pid, tid] = process if args["name"] == process else f"{process}/{args['name']}"
        elif event.get("ph") == "X" and event.get("cat") != _PROFILE:
            start = event["ts"] / 1e6
            rest = {key: value for key, value in args.items() if key != "step"}
            lane = lanes.get((pid, tid), f"{pid}/{tid}")
            end = start + event["dur"] / 1e6
            step = args.get("step", 0)
            spans.append(TraceSpan(event["name"], start, end, lane=lane, step=step, args=rest))
        elif event.get("ph") == "C":
            lane = processes.get(pid, str(pid))
            counters.append(Counter(lane, event["name"], event["ts"] / 1e6, args))
    return spans, counters


def _metadata(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _slice(
    span: TimeSpan, category: str, pid: int, tid: int, args: Mapping[str, Any]
) -> dict[str, Any]:
    # The two ends are rounded, never the duration: neighbors stay neighbors.
    start, end = _micros(span.start), _micros(span.end)
    return {
        "ph": "X", "name": span.name, "cat": category, "pid": pid, "tid": tid,
        "ts": start, "dur": end - start, "args": args,
    }  # fmt: skip


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
