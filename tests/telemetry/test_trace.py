"""The trace is what Perfetto reads, at any moment; bubbles are counted right."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from hybridrl.telemetry.trace import (
    Counter,
    ThreadSlice,
    TraceFile,
    TraceSpan,
    bubble_share,
    read_timeline,
)


def span(lane: str, start: float, end: float) -> TraceSpan:
    return TraceSpan("generate", start, end, lane=lane, step=1)


def test_bubbles_of_a_step_by_hand() -> None:
    spans = [
        span("rank 0", 10, 14),
        span("rank 0", 16, 20),  # idle 2 of 10
        span("rank 1", 12, 15),  # idle 2 before, 5 after
        span("rank 1", 13, 14),  # nested: counts once
    ]
    assert bubble_share(spans) == pytest.approx({"rank 0": 0.2, "rank 1": 0.7})
    assert bubble_share([]) == {}
    assert bubble_share([span("rank 0", 5, 5)]) == {"rank 0": 0.0}


def test_bubbles_agree_with_counting_every_unit_of_time() -> None:
    rng = random.Random(0)
    for _ in range(50):
        spans = []
        for _ in range(rng.randint(1, 12)):
            start = rng.randint(0, 40)
            spans.append(span(f"rank {rng.randint(0, 2)}", start, start + rng.randint(0, 15)))
        first, last = min(s.start for s in spans), max(s.end for s in spans)
        units = range(int(first), int(last))
        for lane, share in bubble_share(spans).items():
            own = [s for s in spans if s.lane == lane]
            idle = sum(not any(s.start <= unit < s.end for s in own) for unit in units)
            assert share == pytest.approx(idle / len(units) if units else 0.0)


def test_the_file_is_valid_json_after_every_call(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    assert json.loads(path.read_text()) == []
    for step in range(4):
        trace.span(TraceSpan("generate", step, step + 0.5, lane="rank 0", step=step))
        trace.counter(Counter("driver", "tokens/s", step, {"tokens/s": 10.0}))
        events = json.loads(path.read_text())
        assert sum(event["ph"] == "X" for event in events) == step + 1
    trace.close()


@pytest.mark.parametrize("cut", [0, 3, 40])
def test_a_trace_that_was_cut_is_continued_on_the_same_lanes(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    for lane in ("driver", "rank 1", "rank 0", "rank 0/reward"):
        trace.span(span(lane, 1, 2))
    trace.close()
    text = path.read_text()
    path.write_text(text[: len(text) - cut])
    trace = TraceFile(path)
    trace.span(span("rank 0/reward", 3, 4))
    trace.close()
    names = [e["args"]["name"] for e in json.loads(path.read_text()) if e["name"] == "thread_name"]
    assert sorted(names) == sorted(["driver", "rank 1", "rank 0", "reward"])
    kept = 4 if cut < 40 else 3  # the last slice is lost with its line
    assert [s.lane for s in read_timeline(path)[0]][kept:] == ["rank 0/reward"]


def test_a_whole_trace_is_continued_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(path)
    trace.span(TraceSpan("naïve", 1, 2, lane="rank 0", step=1, args={"text": '",'}))
    slices = [ThreadSlice(f"aten::{i}", 1 + i, 2 + i, thread="thread 7") for i in range(3)]
    trace.profile("rank 0", slices, 1)
    trace.close()
    whole = path.read_bytes()
    assert len(json.loads(whole)) == 3 + 1 + 1 + 3  # names, the span, the thread's name, slices
    TraceFile(path).close()
    assert path.read_bytes() == whole


def test_spans_come_back_as_they_were(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "trace.json")
    spans = [
        TraceSpan(
            "generate", 1.7e9 + 0.25, 1.7e9 + 0.75, lane="rank 0", step=3, args={"tokens": 5}
        ),
        TraceSpan("log_probs", 1.7e9, 1.7e9 + 1e-6, lane="worker", step=4),
    ]
    for one in spans:
        trace.span(one)
    counters = [
        Counter("rank 1", "memory", 1.7e9 + 0.5, {"resident": 3e9, "free": 2, "total": 5}),
        Counter("driver", "tokens/s", 1.7e9 + 1, {"tokens/s": 10.5}),
    ]
    for counter in counters:
        trace.counter(counter)
    assert read_timeline(tmp_path / "trace.json") == (spans, counters)
    with pytest.raises(ValueError, match="ends before it starts"):
        trace.span(span("rank 0", 2, 1))
    trace.close()


def test_a_real_run_follows_the_trace_event_format(run_dir: Path) -> None:
    events = json.loads((run_dir / "trace.json").read_text())
    assert isinstance(events, list)
    processes, threads, lanes = {}, {}, {}
    for event in events:
        assert event["ph"] in {"M", "X", "C"}
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        if event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
        if event["ph"] == "X":
            assert isinstance(event["ts"], int)  # whole microseconds
            assert isinstance(event["dur"], int)
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in threads  # named before its first slice
            lane = lanes.setdefault((event["pid"], event["tid"]), [])
            lane.append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
    assert processes == {1: "driver", 2: "rank 0", 3: "rank 1"}
    assert set(threads.values()) == {"driver", "rank 0", "rank 1"}
    assert sum(event["name"] == "tokens/s" for event in events) == 120
    memory = [event for event in events if event["name"] == "memory"]
    assert {event["pid"] for event in memory} == {2, 3}  # under the slices of its rank
    assert len(memory) == 60 * 2 * 3
    for slices in lanes.values():
        assert len(slices) == 60 * 1 + 60 * 5
        slices.sort()
        assert all(end <= start for (_, end), (start, _) in pairwise(slices))


def test_neighbors_do_not_overlap_after_rounding(tmp_path: Path) -> None:
    rng = random.Random(1)
    trace = TraceFile(tmp_path / "trace.json")
    now = 1.79e9
    for _ in range(300):
        end = now + rng.random() * 1e-5
        trace.span(span("rank 0", now, end))
        now = end
    trace.close()
    events = json.loads((tmp_path / "trace.json").read_text())
    slices = [event for event in events if event["ph"] == "X"]
    assert all(a["ts"] + a["dur"] == b["ts"] for a, b in pairwise(slices))
