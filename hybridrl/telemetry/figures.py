"""Numbers of a run as the report's charts and tiles show them: pure functions on `RunData`."""

import statistics
from typing import Any

from hybridrl.telemetry.rundata import RunData, StepKey

_PHASES = {"warm_start": "warm start", "rl": "reinforcement learning", "evaluation": "evaluation"}
_MAX_POINTS = 4000  # a series beyond it is thinned evenly, its ends kept
_LENGTH_BINS = 40

# Title, unit, keys with their labels. The first key gives the value next to the title.
_CHARTS: dict[str, tuple[str, str, dict[str, str]]] = {
    "accuracy": ("Held-out accuracy", "", {"eval_accuracy": "accuracy"}),
    "reward": ("Reward", "", {"reward_mean": "mean reward"}),
    "loss": ("Loss", "", {"loss": "loss"}),
    "grad_norm": ("Gradient norm", "", {"grad_norm": "gradient norm"}),
    "entropy": ("Entropy", "nats", {"entropy": "entropy"}),
    "kl": ("KL from the rollout policy", "nats", {"approx_kl": "KL"}),
    "reference_kl": ("KL from the reference", "nats a response", {"kl_mean": "KL"}),
    "mismatch": (
        "Mismatch of log-probabilities",
        "nats",
        {"mismatch/mean": "mean", "mismatch/max": "max"},
    ),
    "mismatch_kl": ("Mismatch: KL", "nats", {"mismatch/kl": "KL"}),
    "mismatch_ess": (
        "Mismatch: effective samples",
        "",
        {"mismatch/ess_token": "per token", "mismatch/ess_sequence": "per sequence"},
    ),
    "value_loss": (
        "Value loss",
        "",
        {"critic/loss": "critic", "cost_critic/loss": "cost critic", "reward/loss": "reward"},
    ),
    "explained_variance": (
        "Explained variance of returns",
        "",
        {"critic/explained_variance": "critic", "cost_critic/explained_variance": "cost critic"},
    ),
    "response_tokens": ("Response length", "tokens", {"response_tokens_mean": "mean"}),
    "tokens_per_s": ("Throughput", "tokens/s", {"tokens_per_s": "tokens/s"}),
    "bubble_share": ("Bubbles (idle share)", "", {"bubble_share": "idle share"}),
}
# Metrics that a server records for each client's model as `KEY/MODEL`: title and unit by key.
_OF_MODELS = {
    "loss": ("Loss", ""),
    "grad_norm": ("Gradient norm", ""),
    "response_tokens_mean": ("Response length", "tokens"),
    "wait_s": ("Wait for training", "s"),
    "sample_wait_s": ("Wait for samples", "s"),
    "switches": ("Switches", ""),
}
_MAX_MODELS = 16  # with curves; the last that were made, of those that have stepped
_BAND = ("response_tokens_p10", "response_tokens_p90")
_MAX_RANKS = 16  # curves of memory; those with the most
_MAX_TURNS = 500  # of a curve of memory
_TROUBLE = {
    "samples/aborted": ("sample aborted", "samples aborted"),
    "reward_error": ("reward error", "reward errors"),
    "reward_timeout": ("reward timeout", "reward timeouts"),
}


def phases(run: RunData) -> list[dict[str, Any]]:
    """The phases with their range on the common axis and their wall seconds."""
    out: list[dict[str, Any]] = []
    for name in run.offsets:
        keys = [key for key in run.metrics if key.phase == name]
        times = [run.metrics[key]["time"] for key in keys if "time" in run.metrics[key]]
        # A phase begins where the one before it ended, in steps and in time.
        first = out[-1]["last"] if out else min(key.x for key in keys)
        start = out[-1]["end"] if out else run.started
        end = max(times, default=start)
        out.append(
            {
                "name": name,
                "label": _PHASES.get(name, name.replace("_", " ")),
                "short": name.replace("_", " "),
                "first": first,
                "last": max(key.x for key in keys),
                "end": end,
                "seconds": None if end is None or start is None else max(0.0, end - start),
            }
        )
    return out


def headline(run: RunData) -> dict[str, Any] | None:
    """Accuracy before and after: the last evaluation of the warm start and the last of all.

    Without a warm start, before is the first evaluation. None if there were fewer than one.
    """
    points = [(key, value) for key, value in run.series("eval_accuracy") if value is not None]
    if not points:
        return None
    warm_end = max((key.x for key in run.metrics if key.phase == "warm_start"), default=None)
    early = [p for p in points if warm_end is not None and p[0].x <= warm_end]
    before, after = (early[-1] if early else points[0]), points[-1]
    return {
        "before": before[1],
        "after": after[1],
        "num_before": "after the warm start" if early else f"step {before[0].step}",
        "num_after": f"step {after[0].step}",
    }


def tiles(run: RunData) -> list[dict[str, Any]]:
    """The few numbers at the top, besides accuracy and duration; problems if there were any."""
    out: list[dict[str, Any]] = []
    counted = {phase: len(run.steps(phase)) for phase in run.offsets}
    steps = {phase: count for phase, count in counted.items() if count}
    if steps:
        note = ", ".join(f"{p.replace('_', ' ')} {n:,}" for p, n in steps.items())
        out.append({"label": "Steps", "text": f"{sum(steps.values()):,}", "note": note})
    speed = [v for key, v in run.series("tokens_per_s") if v is not None and key.phase == "rl"]
    if speed:
        text = f"{statistics.median(speed):,.0f}"
        out.append({"label": "Tokens/s", "text": text, "note": "median of the steps"})
    moved = [row.get("bytes") for row in run.events if row.get("kind") == "switch"]
    numbers = [count for count in moved if isinstance(count, int | float)]
    if numbers:
        note = f"{len(numbers):,} weight switches"
        out.append({"label": "Weights moved", "bytes": sum(numbers), "note": note})
    bad = sum(row.get("kind") == "bad_step" for row in run.events)
    restarts = sum(row.get("kind") == "restart" for row in run.events)
    counts = {("step skipped", "steps skipped"): bad, ("restart", "restarts"): restarts}
    for key, names in _TROUBLE.items():
        counts[names] = int(sum(value or 0 for _, value in run.series(key)))
    problems = [f"{count:,} {names[count > 1]}" for names, count in counts.items() if count]
    if problems:
        text = f"{sum(counts.values()):,}"
        out.append({"label": "Problems", "text": text, "note": ", ".join(problems)})
    return out


def charts(run: RunData) -> list[dict[str, Any]]:
    """Every metric as a chart: accuracy first, then the known ones, then all others."""
    out = []
    shown: set[str] = {*_BAND}
    # known metrics
    for id_, (title, unit, keys) in _CHARTS.items():
        shown |= keys.keys()
        series = [_series(run, key, label) for key, label in keys.items() if run.series(key)]
        if not series:
            continue
        chart = _chart(id_, title, series, unit, "hero" if id_ == "accuracy" else "main")
        if id_ in ("accuracy", "reward"):
            chart["range"] = _unit_range(series)
        if id_ == "response_tokens":
            chart |= {"band": _band(run, _BAND), "band_label": "p10 to p90"}
        if id_ == "loss":
            out += _split(chart)
        else:
            out.append(chart)
    # a server's models
    models = _models(run)
    shown |= {f"{key}/{model}" for key in _OF_MODELS for model in models}
    trained = [one for one in models if any(run.series(f"{key}/{one}") for key in _OF_MODELS)]
    out += _by_model(run, trained[-_MAX_MODELS:])
    # evaluation sets
    for name in dict.fromkeys(k.split("/")[1] for k in run.metric_names if k.startswith("eval/")):
        shown |= {key for key in run.metric_names if key.startswith(f"eval/{name}/") and "@" in key}
        chart = _evaluation(run, name)
        if name == "main" and len(chart["series"]) == 1:
            out[0] |= {key: chart[key] for key in ("band", "band_label")}  # that of accuracy
        else:
            out.append(chart)
    # all others
    for key in run.metric_names:
        if key not in shown:
            title = key.replace("_", " ")
            out.append(_chart(key, title, [_series(run, key, title)], group="more"))
    return out


def _models(run: RunData) -> list[str]:
    """The models of a server's clients, in the order in which they were made."""
    created = (event for event in run.events if event.get("kind") == "model")
    return list(dict.fromkeys(str(event.get("model")) for event in created))


def _by_model(run: RunData, models: list[str]) -> list[dict[str, Any]]:
    """A chart for each key of `_OF_MODELS`, with a curve for each of the models that have it.

    A model has the same color in all charts.
    """
    out = []
    for key, (title, unit) in _OF_MODELS.items():
        curves = [
            _series(run, f"{key}/{model}", model) | {"color": color}
            for color, model in enumerate(models)
        ]
        if curves := [curve for curve in curves if curve["points"]]:
            out.append(_chart(f"model/{key}", f"{title} by model", curves, unit))
    return out


def lengths(run: RunData) -> dict[str, Any] | None:
    """Response lengths of the first and the last RL step in common bins, as shares of the step."""
    steps: dict[StepKey, list[int]] = {}
    for row in run.lengths:
        values = row.get("lengths")
        if isinstance(values, list) and values:
            steps[run.key(row)] = [int(v) for v in values]
    chosen = sorted(key for key in steps if key.phase == "rl") or sorted(steps)
    if not chosen:
        return None
    # common bins
    ends = list(dict.fromkeys([chosen[0], chosen[-1]]))
    low = min(min(steps[key]) for key in ends)
    high = max(max(steps[key]) for key in ends)
    width = max(1, -(-(high - low + 1) // _LENGTH_BINS))
    starts = range(low - low % width, high + 1, width)
    sets = []
    for key, color in zip(ends, ("first", "rl") if len(ends) > 1 else ("rl",), strict=True):
        values = steps[key]
        counts = dict.fromkeys(starts, 0)
        for value in values:
            counts[value - value % width] += 1
        sets.append(
            {
                "label": f"step {key.step}",
                "color": color,
                "mean": statistics.fmean(values),
                "longest": max(values),
                "shares": [[start, count / len(values)] for start, count in counts.items()],
            }
        )
    return {"width": width, "sets": sets}


def memory(run: RunData) -> dict[str, Any] | None:
    """The memory of each rank, in GB, over the seconds since the run's first record of it.

    Of an accelerator all that is in use on it, by whomever; on a CPU the process's resident set.
    """
    points: dict[str, list[dict[str, Any]]] = {}
    start = min((c.when for c in run.counters if c.name == "memory"), default=0.0)
    for counter in run.counters:
        held = counter.values
        if counter.name == "memory" and {"total", "free"} <= held.keys():
            used = held["total"] - held["free"]
        elif counter.name == "memory" and "resident" in held:
            used = held["resident"]
        else:
            continue
        point = {"x": counter.when - start, "y": used / 1e9, "phase": "rl", "step": 0}
        points.setdefault(counter.lane, []).append(point)
    if not points:
        return None
    most = sorted(points, key=lambda lane: -max(point["y"] for point in points[lane]))[:_MAX_RANKS]
    series = [
        {"key": lane, "label": lane, "points": _extremes(points[lane])}
        for lane in points
        if lane in most
    ]
    return {"id": "memory", "title": "In use", "unit": "GB", "time": True, "series": series}


def _extremes(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lowest and the highest point of each stretch, so that a curve keeps its turns."""
    stride = -(-len(points) // _MAX_TURNS)
    if stride < 3:
        return points
    kept = []
    for start in range(0, len(points), stride):
        stretch = points[start : start + stride]
        ends = (f(stretch, key=lambda point: point["y"]) for f in (min, max))
        kept += sorted(ends, key=lambda point: point["x"])
    return kept if kept[-1] is points[-1] else [*kept, points[-1]]


def _series(run: RunData, key: str, label: str) -> dict[str, Any]:
    points = [
        {"x": at.x, "y": value, "phase": at.phase, "step": at.step} for at, value in run.series(key)
    ]
    return {"key": key, "label": label, "points": _thin(points)}


def _chart(
    id_: str, title: str, series: list[dict[str, Any]], unit: str = "", group: str = "main"
) -> dict[str, Any]:
    return {"id": id_, "title": title, "unit": unit, "group": group, "series": series}


def _evaluation(run: RunData, name: str) -> dict[str, Any]:
    """The estimates of an evaluation set, with the interval of the first."""
    prefix = f"eval/{name}/"
    keys = [key for key in run.metric_names if key.startswith(prefix)]
    estimates = [key for key in keys if "@" in key.removeprefix(prefix) and key.count("/") == 2]
    series = [_series(run, key, key.removeprefix(prefix)) for key in estimates]
    return _chart(f"eval/{name}", f"Held out: {name}", series) | {
        "range": _unit_range(series),
        "band": _band(run, (f"{estimates[0]}/low", f"{estimates[0]}/high")),
        "band_label": "95 % interval",
    }


def _band(run: RunData, keys: tuple[str, str]) -> list[dict[str, Any]]:
    low, high = (dict(run.series(key)) for key in keys)
    points = []
    for at in low:
        if low[at] is not None and high.get(at) is not None:
            points.append({"x": at.x, "low": low[at], "high": high[at], "phase": at.phase})
    return _thin(points)


def _split(chart: dict[str, Any]) -> list[dict[str, Any]]:
    """One chart per phase: a supervised loss and a policy loss are different quantities."""
    out = []
    series = chart["series"][0]
    for phase in dict.fromkeys(point["phase"] for point in series["points"]):
        points = [point for point in series["points"] if point["phase"] == phase]
        title = {"warm_start": "Supervised loss", "rl": "Policy loss"}.get(phase, chart["title"])
        id_ = f"{chart['id']}_{phase}"
        out.append(chart | {"id": id_, "title": title, "series": [series | {"points": points}]})
    return out


def _unit_range(series: list[dict[str, Any]]) -> list[float] | None:
    values = [point["y"] for one in series for point in one["points"] if point["y"] is not None]
    return [0.0, 1.0] if values and min(values) >= 0 and max(values) <= 1 else None


def _thin(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(points) <= _MAX_POINTS:
        return points
    stride = -(-len(points) // _MAX_POINTS)
    return [*points[:-1:stride], points[-1]]
