"""The figure of memory: what counts as in use, which ranks, which points. Steps, and models."""

from hybridrl.telemetry.figures import charts, memory, tiles
from hybridrl.telemetry.rundata import RunData, StepKey
from hybridrl.telemetry.trace import Counter


def run(*counters: Counter) -> RunData:
    return RunData(name="run", directory="run", counters=list(counters))


def point(rank: int, when: float, **held: float) -> Counter:
    return Counter(f"rank {rank}", "memory", 1.7e9 + when, held)


def test_in_use_on_a_device_and_on_a_cpu() -> None:
    tokens = Counter("driver", "tokens/s", 1.7e9 - 5, {"tokens/s": 1.0})
    device = {"resident": 5e9, "allocated": 1e9, "reserved": 2e9, "free": 60e9, "total": 140e9}
    figure = memory(run(tokens, point(0, 0, **device), point(1, 2.5, resident=3e9)))
    assert figure is not None
    curves = {s["label"]: [(p["x"], p["y"]) for p in s["points"]] for s in figure["series"]}
    assert curves == {"rank 0": [(0.0, 80.0)], "rank 1": [(2.5, 3.0)]}
    assert memory(run(tokens)) is None
    assert memory(run(point(0, 0))) is None


def test_the_ranks_with_the_most() -> None:
    counters = [point(rank, t, resident=(rank + t) * 1e9) for t in (0, 1) for rank in range(20)]
    figure = memory(run(*counters))
    assert figure is not None
    assert [s["label"] for s in figure["series"]] == [f"rank {rank}" for rank in range(4, 20)]


def test_a_long_curve_keeps_its_peaks() -> None:
    """20,000 points that go up and down: every hundredth peak is higher, and all of those stay."""
    high = [90e9 if i % 200 == 1 else 80e9 for i in range(20_000)]
    counters = [point(0, i, resident=high[i] if i % 2 else 10e9) for i in range(20_000)]
    figure = memory(run(*counters))
    assert figure is not None
    kept = [(p["x"], p["y"]) for p in figure["series"][0]["points"]]
    assert len(kept) <= 1001
    assert kept == sorted(kept)
    assert sum(y == 90 for _, y in kept) == 100
    assert sum(y == 10 for _, y in kept) >= 499
    assert kept[-1][0] == 19_999


def test_a_step_without_an_update_counts_and_an_evaluation_does_not() -> None:
    rows = [
        {"eval_accuracy": 0.1},
        {"step_s": 1.0, "loss": 0.5},
        {"step_s": 1.0, "samples/filtered": 8.0},
    ]
    of_step = {StepKey(step, "rl", step): row for step, row in enumerate(rows)}
    steps = tiles(RunData(name="run", directory="run", metrics=of_step, offsets={"rl": 0}))[0]
    assert (steps["label"], steps["text"], steps["note"]) == ("Steps", "2", "rl 2")


def test_the_problems_of_a_run_are_counted() -> None:
    """By the names that `hybridrl.driver.run_records` and the ranks give their metrics."""
    rows = [{"samples/aborted": 1.0}, {"samples/aborted": 1.0, "reward_error": 1.0}]
    of_step = {StepKey(step, "rl", step): row for step, row in enumerate(rows)}
    restarts = [{"kind": "restart"}]
    (problems,) = tiles(RunData(name="run", directory="run", metrics=of_step, events=restarts))
    assert (problems["label"], problems["text"]) == ("Problems", "4")
    assert problems["note"] == "1 restart, 2 samples aborted, 1 reward error"


def test_the_last_models_that_have_stepped_have_curves() -> None:
    """Newer models without a step take no curve away."""
    events = [{"kind": "model", "model": f"m{i}", "what": "created"} for i in range(40)]
    rows = {StepKey(i, "rl", i): {f"loss/m{i}": 1.0} for i in range(20)}
    shown = charts(RunData(name="run", directory="run", metrics=rows, events=events))
    (chart,) = [chart for chart in shown if chart["id"] == "model/loss"]
    assert [curve["label"] for curve in chart["series"]] == [f"m{i}" for i in range(4, 20)]
