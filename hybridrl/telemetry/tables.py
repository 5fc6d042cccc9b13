"""Timelines, switches, samples and events of a run as the report shows them."""

import re
import statistics
from typing import Any

from hybridrl.telemetry.records import with_lost_texts
from hybridrl.telemetry.rundata import RunData, StepKey
from hybridrl.telemetry.trace import TraceSpan, bubble_share, is_rank

_MAX_SLICES = 4000
_MAX_LANES = 66
_MAX_SAMPLE_STEPS = 80
_MAX_TEXT = 6000
_FACTS = ("id", "set", "tokens", "finish", "failure", "advantage")


def timelines(run: RunData) -> list[dict[str, Any]]:
    """The first RL step, one of median duration and the last, with spans relative to its start."""
    ranked = _steps_on_ranks(run)
    chosen = sorted(key for key in ranked if key.phase == "rl") or sorted(ranked)
    if not chosen:
        return []
    by_duration = sorted(chosen, key=lambda key: _bounds(ranked[key])[1] - _bounds(ranked[key])[0])
    picks = {"first": chosen[0], "median": by_duration[len(chosen) // 2], "last": chosen[-1]}
    if len(chosen) < 3:
        picks = {name: key for name, key in picks.items() if name != "median"}
    if len(chosen) < 2:
        picks = {"only": chosen[0]}
    return [
        _timeline(f"{label}: {_step_label(run, key)}", key, ranked[key])
        for label, key in picks.items()
    ]


def last_timelines(run: RunData, count: int) -> list[dict[str, Any]]:
    """The last steps, of any phase, the newest first."""
    ranked = _steps_on_ranks(run)
    return [
        _timeline(_step_label(run, key), key, ranked[key])
        for key in sorted(ranked, reverse=True)[:count]
    ]


def _step_label(run: RunData, key: StepKey) -> str:
    """The step, and the choices for its tail (`plan/CHOICE_chosen`), where the schedule has some.

    Where others happened (`plan/CHOICE_happened`), these too. Examples: `step 12, migrate train
    early`, `step 13, widen to 2 chosen, stay happened`.
    """
    names = [name for name, value in run.metrics.get(key, {}).items() if value == 1.0]
    plans = [name.removeprefix("plan/") for name in names if name.startswith("plan/")]
    chosen, happened = (
        [plan.removesuffix(end).replace("_", " ") for plan in plans if plan.endswith(end)]
        for end in ("_chosen", "_happened")
    )
    if happened and {*happened} != {*chosen}:  # runs of old have no record of it
        chosen = [f"{plan} chosen" for plan in chosen]
        chosen += [f"{plan} happened" for plan in happened]
    return ", ".join([f"step {key.step}", *chosen])


def _steps_on_ranks(run: RunData) -> dict[StepKey, list[TraceSpan]]:
    """The spans of every step in which ranks have worked."""
    steps: dict[StepKey, list[TraceSpan]] = {}
    for span in run.spans:
        key = run.key({"step": span.step, "phase": span.args.get("phase")})
        steps.setdefault(key, []).append(span)
    return {k: spans for k, spans in steps.items() if any(is_rank(span.lane) for span in spans)}


def switches(run: RunData) -> dict[str, Any] | None:
    """Every weight switch: its step, bytes, seconds, and the other fields of its record."""
    rows = [row for row in run.events if row.get("kind") == "switch"]
    if not rows:
        return None
    hidden = {"kind", "time", "phase"}
    leading = ("step", "bytes", "bytes_theory", "seconds")
    first = [name for name in leading if any(name in row for row in rows)]
    names = dict.fromkeys(name for row in rows for name in row if name not in hidden)
    columns = first + [name for name in names if name not in first]
    seconds = [row["seconds"] for row in rows if isinstance(row.get("seconds"), int | float)]
    return {
        "columns": columns,
        "rows": [[row.get(column) for column in columns] for row in rows[-500:]],
        "summary": {
            "count": len(rows),
            "bytes": _total(rows, "bytes"),
            "theory": _total(rows, "bytes_theory") or None,
            "median_s": statistics.median(seconds) if seconds else 0.0,
        },
    }


def _total(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows if isinstance(row.get(name), int | float))


def samples(run: RunData) -> tuple[list[dict[str, Any]], str]:
    """Samples by step, at most 80 steps of them spread evenly, and a line that says so."""
    steps: dict[StepKey, list[dict[str, Any]]] = {}
    for row in run.samples:
        steps.setdefault(run.key(row), []).append(row)
    keys = sorted(steps, key=lambda key: (key.x, key.phase == "evaluation", key.phase))
    note = "Responses as the model wrote them, with the rewards that they got."
    if len(keys) > _MAX_SAMPLE_STEPS:
        last = len(keys) - 1
        picked = {round(i * last / (_MAX_SAMPLE_STEPS - 1)) for i in range(_MAX_SAMPLE_STEPS)}
        note += f" {_MAX_SAMPLE_STEPS} of {len(keys)} steps; all are in samples.jsonl."
        keys = [keys[i] for i in sorted(picked)]
    out = []
    for key in keys:
        # After a resume a step may have been run again; the later record of an id counts.
        rows = {str(row.get("id", number)): row for number, row in enumerate(steps[key])}
        label = f"{key.phase.replace('_', ' ')} step {key.step}"
        out.append({"label": label, "rows": [_sample(row) for row in rows.values()]})
    return out, note


def events(run: RunData) -> list[list[Any]]:
    """Events other than switches: seconds since the start, phase, kind, and the fields."""
    start = run.started or 0.0
    rows = []
    for row in run.events:
        kind = str(row.get("kind", ""))
        if kind == "switch":
            continue
        rest = {k: v for k, v in row.items() if k not in ("kind", "time", "phase")}
        what = ", ".join(f"{name} {_short(value)}" for name, value in rest.items())
        at = row.get("time")
        since = f"{at - start:,.1f} s" if isinstance(at, int | float) else ""
        rows.append([since, str(row.get("phase") or "").replace("_", " "), kind, what])
    return rows[-1000:]


def _timeline(label: str, key: StepKey, spans: list[TraceSpan]) -> dict[str, Any]:
    start, end = _bounds(spans)
    bubbles = bubble_share(spans)
    lanes = sorted({span.lane for span in spans}, key=_lane_order)[:_MAX_LANES]
    # Outer spans first, so that nested ones are drawn over them.
    ordered = sorted(spans, key=lambda span: (span.start, -span.end))[:_MAX_SLICES]
    return {
        "label": label,
        "step": key.step,
        "seconds": end - start,
        "stages": list(dict.fromkeys(_stage_of(span.name) for span in ordered)),
        "lanes": [
            {
                "name": lane,
                "bubble": bubbles[lane] if is_rank(lane) else None,
                "slices": [_slice(span, start) for span in ordered if span.lane == lane],
            }
            for lane in lanes
        ],
    }


def _stage_of(name: str) -> str:
    """The name without its counts: `verify 5/8` is one of many slices that verify."""
    return re.sub(r" \d+/\d+$", "", name)


def _slice(span: TraceSpan, start: float) -> dict[str, Any]:
    args = {name: _short(value) for name, value in span.args.items() if name != "phase"}
    seconds = span.end - span.start
    return {"name": span.name, "start": span.start - start, "seconds": seconds, "args": args}


def _bounds(spans: list[TraceSpan]) -> tuple[float, float]:
    return min(span.start for span in spans), max(span.end for span in spans)


def _lane_order(lane: str) -> tuple[bool, int, str]:
    number = lane.removeprefix("rank ").partition("/")[0]
    return not lane.startswith("driver"), int(number) if number.isdecimal() else 10**9, lane


def _sample(row: dict[str, Any]) -> dict[str, Any]:
    shown = with_lost_texts(row)
    return {
        "prompt": _cut(shown.get("prompt")),
        "response": _cut(shown.get("response")),
        "reward": row.get("reward"),
        "status": row.get("status"),
        "turns": row.get("turns"),
        "facts": {name: row[name] for name in _FACTS if row.get(name) is not None},
    }


def _cut(text: Any) -> str:
    text = "" if text is None else str(text)
    left = len(text) - _MAX_TEXT
    return text if left <= 0 else f"{text[:_MAX_TEXT]}\n[{left:,} more characters]"


def _short(value: Any) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
