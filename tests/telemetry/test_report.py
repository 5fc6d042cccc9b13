"""The report in a real browser: each chart is there with the recorded numbers; nothing fetched."""

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.errors import ConfigError
from hybridrl.config.run import TelemetryConfig
from hybridrl.telemetry.records import read_lines
from hybridrl.telemetry.report import predicted, render
from hybridrl.telemetry.run import Telemetry
from hybridrl.telemetry.rundata import RunData, load
from hybridrl.telemetry.trace import bubble_share, read_timeline

QUIET = TelemetryConfig(progress=False, loggers=[])


@pytest.fixture(scope="session")
def report(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("report") / run_dir.name
    shutil.copytree(run_dir, copy)
    return render(copy)


@pytest.mark.browser
def test_nothing_is_fetched_and_nothing_complains(viewer: Any, report: Path) -> None:
    for dark in (False, True):
        page = viewer.open(report, dark=dark)
        page.mouse.move(600, 400)
    assert viewer.errors == []
    assert set(viewer.requests) == {report.resolve().as_uri()}
    colors = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, colors[4:-1].split(","))) < 40  # the dark page is dark
    assert "http://" not in report.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.fixture(scope="module")
def page(new_viewer: Callable[[], Any], report: Path) -> Any:
    """The report, opened once for the tests that only read it or choose in it."""
    return new_viewer().open(report)


# Chart, metric, and how many of the run's steps have it (one value of two is not finite).
CHARTS = [
    ("accuracy", "eval_accuracy", 9),
    ("reward", "reward_mean", 60),
    ("loss_warm_start", "loss", 60),
    ("loss_rl", "loss", 59),
    ("grad_norm", "grad_norm", 119),
    ("entropy", "entropy", 60),
    ("kl", "approx_kl", 60),
    ("mismatch", "mismatch/mean", 60),
    ("mismatch_kl", "mismatch/kl", 60),
    ("mismatch_ess", "mismatch/ess_token", 60),
    ("response_tokens", "response_tokens_mean", 60),
    ("tokens_per_s", "tokens_per_s", 120),
    ("bubble_share", "bubble_share", 120),
]


@pytest.mark.browser
@pytest.mark.parametrize(("chart", "key", "count"), CHARTS)
def test_a_chart_has_every_point_and_the_recorded_last_value(
    page: Any, report: Path, chart: str, key: str, count: int
) -> None:
    box = page.locator(f'[data-chart="{chart}"]')
    box.scroll_into_view_if_needed()
    paths = box.locator(f'path.raw[data-key="{key}"]')
    drawn = paths.evaluate_all(
        "ps => ps.map(p => [+p.dataset.points, p.getAttribute('d').split(/[ML]/).length - 1])"
    )
    assert sum(points for points, _ in drawn) == count
    # A path has its own points, and one more where it is joined to the phase before.
    assert all(vertices - points in (0, 1) for points, vertices in drawn)
    assert box.locator("path.missing").count() == (1 if chart in ("loss_rl", "grad_norm") else 0)
    phase = "warm_start" if chart.endswith("warm_start") else None
    rows = read_lines(report.parent / "metrics.jsonl")
    values = [r[key] for r in rows if key in r and phase in (None, r["phase"])]
    assert float(box.locator(".last").get_attribute("data-value")) == values[-1]


@pytest.mark.browser
def test_a_point_lies_where_its_axes_say(page: Any, report: Path) -> None:
    svg = page.locator('[data-chart="accuracy"] svg')
    circles = svg.locator("circle").evaluate_all(
        "cs => cs.map(c => [+c.getAttribute('cx'), +c.getAttribute('cy')])"
    )
    marks = svg.locator("text").evaluate_all(
        "ts => ts.map(t => [t.textContent, +t.getAttribute('x'), +t.getAttribute('y'),"
        " t.getAttribute('text-anchor')])"
    )
    x_of = {text: x for text, x, y, anchor in marks if anchor == "middle" and text.isdecimal()}
    y_of = {text: y - 4 for text, x, y, anchor in marks if anchor == "end"}
    rows = read_lines(report.parent / "metrics.jsonl")
    last = next(r["eval_accuracy"] for r in reversed(rows) if "eval_accuracy" in r)
    wanted_y = y_of["0"] + last * (y_of["1.0"] - y_of["0"])
    assert [x_of["120"], wanted_y] in [pytest.approx(c, abs=0.5) for c in circles]
    assert [x_of["20"], y_of["0"] + 0.204 * (y_of["1.0"] - y_of["0"])] in [
        pytest.approx(c, abs=0.5) for c in circles
    ]


@pytest.mark.browser
def test_the_headline_is_the_recorded_accuracy(page: Any, report: Path) -> None:
    rows = [r for r in read_lines(report.parent / "metrics.jsonl") if "eval_accuracy" in r]
    before = [r for r in rows if r["phase"] == "warm_start"][-1]["eval_accuracy"]
    shown = [
        float(page.locator(f"#headline .{name}").get_attribute("data-value"))
        for name in ("before", "after")
    ]
    assert shown == [before, rows[-1]["eval_accuracy"]]
    assert page.locator("#headline .after").inner_text() == f"{shown[1]:.3f}"
    assert page.locator("#state").inner_text() == "finished"


@pytest.mark.browser
def test_the_tooltip_names_step_and_value(page: Any, report: Path) -> None:
    box = page.locator('[data-chart="reward"] .plot')
    box.scroll_into_view_if_needed()
    size = box.bounding_box()
    box.hover(position={"x": size["width"] - 11, "y": 60})
    rows = read_lines(report.parent / "metrics.jsonl")
    last = next(r["reward_mean"] for r in reversed(rows) if "reward_mean" in r)
    assert box.locator(".tip").inner_text().split("\n") == [
        "rl step 120",
        f"mean reward {last:.3f}",
    ]


@pytest.mark.browser
def test_the_timeline_of_the_chosen_step_is_drawn(page: Any, report: Path) -> None:
    box = page.locator("#timeline")
    spans, _ = read_timeline(report.parent / "trace.json")
    for button, wanted in (("first", 61), ("last", 120), ("median", None)):
        box.locator("button", has_text=button).click()
        step = int(box.locator("svg").get_attribute("data-step"))
        assert step == wanted or (wanted is None and 61 < step < 120)
        own = [span for span in spans if span.step == step and span.args["phase"] == "rl"]
        assert box.locator("rect.slice").count() == len(own) == 15
        shares = bubble_share(own)
        for lane in ("rank 0", "rank 1"):
            shown = box.locator(f'text.end[data-lane="{lane}"]').text_content()
            assert shown == f"{100 * shares[lane]:.1f}% idle"
        # Widths are in proportion to durations.
        widths = box.locator("rect.slice").evaluate_all(
            "rs => rs.map(r => [r.dataset.lane, r.dataset.name, +r.getAttribute('width')])"
        )
        by_slice = {(lane, name): width for lane, name, width in widths}
        per_second = [
            by_slice[span.lane, span.name] / (span.end - span.start)
            for span in own
            if span.name in ("generate", "update")
        ]
        assert max(per_second) == pytest.approx(min(per_second), rel=1e-3)
        assert box.locator('button[aria-pressed="true"]').count() == 1


@pytest.mark.browser
def test_memory_of_each_rank_over_time(page: Any, report: Path) -> None:
    """A curve a rank, of what is in use on its device, not smoothed."""
    box = page.locator('[data-chart="memory"]')
    assert box.get_attribute("data-window") == "1"
    for rank in range(2):
        assert box.locator(f'path.raw[data-key="rank {rank}"]').count() == 1
    assert float(box.locator(".last").get_attribute("data-value")) == 40
    paths = [
        [float(pair.split(" ")[1]) for pair in d[1:].split("L")]
        for d in box.locator("path.raw").evaluate_all("ps => ps.map(p => p.getAttribute('d'))")
    ]
    assert [len(ys) for ys in paths] == [180, 180]
    low, high = max(paths[0]), (min(paths[0]), min(paths[1]))
    assert (low - high[1]) / (low - high[0]) == pytest.approx((111 - 40) / (110 - 40), rel=1e-3)
    box.scroll_into_view_if_needed()
    size = box.locator(".plot").bounding_box()
    box.locator(".plot").hover(position={"x": size["width"] / 2, "y": 60})
    title, value = box.locator(".tip").inner_text().split("\n")[:2]
    assert title.startswith("after ")
    assert value in ("rank 0 40.00", "rank 0 110.0")


@pytest.mark.browser
def test_lengths_and_switches_equal_the_records(page: Any, report: Path) -> None:
    rows = read_lines(report.parent / "lengths.jsonl")
    legend = page.locator("#lengths .legend").inner_text()
    for row in (rows[0], rows[-1]):
        mean, longest = statistics.fmean(row["lengths"]), max(row["lengths"])
        shown = f"{mean:.2f}" if mean < 100 else f"{mean:.1f}"
        assert f"step {row['step']}: mean {shown}, longest {longest}" in legend
    assert page.locator("#lengths path.hist").count() == 2
    switched = [r for r in read_lines(report.parent / "events.jsonl") if r["kind"] == "switch"]
    cells = page.locator("#switches tbody tr").evaluate_all(
        "rows => rows.map(r => [...r.cells].map(c => c.textContent))"
    )
    assert len(cells) == len(switched) == 60
    assert cells[0][:3] == ["61", "8.40 MB", "8.00 MB"]
    assert "504 MB in all, 1.050 of theory" in page.locator("#switches .lead").inner_text()
    assert cells[0][3] == f"{switched[0]['seconds'] * 1e3:.1f} ms"


@pytest.mark.browser
def test_what_a_model_wrote_is_shown_as_text(page: Any, report: Path) -> None:
    responses = page.locator("#samples pre.response").all_inner_texts()
    assert "<script>document.title = 'owned'</script><b>7</b>" in responses
    assert page.title() == "sort-three-numbers · hybridrl"
    assert page.locator("#samples pre b").count() == 0


@pytest.mark.browser
def test_samples_can_be_chosen_by_step_and_reward(page: Any, report: Path) -> None:
    rows = [r for r in read_lines(report.parent / "samples.jsonl") if r["step"] == 70]
    page.locator("select").select_option(label="rl step 70")
    assert page.locator("#samples pre.response").all_inner_texts() == [r["response"] for r in rows]
    assert page.locator("#samples pre.prompt").first.inner_text() == rows[0]["prompt"]
    page.locator("button", has_text="not rewarded").click()
    wrong = [r["response"] for r in rows if not r["reward"]]
    shown = page.locator("#samples pre.response").all_inner_texts()
    assert shown == wrong
    assert 0 < len(wrong) < len(rows)
    page.get_by_label("later step").click()
    assert page.locator("select").evaluate("s => s.selectedOptions[0].text") == "rl step 71"


@pytest.mark.browser
@pytest.mark.parametrize(
    "width", [320, *(pytest.param(w, marks=pytest.mark.slow) for w in (375, 768))]
)
def test_no_sideways_scroll_on_a_small_screen(viewer: Any, report: Path, width: int) -> None:
    page = viewer.open(report, width=width)
    page.locator("details").evaluate_all("ds => ds.forEach(d => (d.open = true))")
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Axis text keeps its size, since charts are drawn at the width of their box.
    size = page.locator('[data-chart="accuracy"] svg').evaluate("s => s.getScreenCTM().a")
    assert size == pytest.approx(1, abs=0.01)
    assert viewer.errors == []


@pytest.mark.browser
def test_steps_that_count_anew_in_each_phase_share_one_axis(viewer: Any, tmp_path: Path) -> None:
    with Telemetry(tmp_path, QUIET, 8) as telemetry:
        telemetry.phase("warm_start", 4)
        for step in range(1, 5):
            telemetry.log(step, {"loss": 1 / step})
        telemetry.log(4, {"eval_accuracy": 0.25})
        telemetry.phase("rl", 4)
        telemetry.log(0, {"eval_accuracy": 0.5})
        for step in range(1, 5):
            telemetry.log(step, {"loss": 0.0, "grad_norm": 1.0})
        telemetry.log(4, {"eval_accuracy": 0.75})
    page = viewer.open(render(tmp_path))
    ticks = page.locator(
        '[data-chart="accuracy"] svg text[text-anchor="middle"]'
    ).all_text_contents()
    assert "8" in ticks
    assert page.locator("#headline .before").inner_text() == "0.500"
    assert page.locator("#headline .after").inner_text() == "0.750"
    assert viewer.errors == []


def damage(run: Path, how: str) -> None:
    """Make a run directory as a crash, a full disk or an early look would leave it."""
    files = [*run.glob("*.jsonl"), run / "trace.json"]
    if how == "truncated":
        for path in files:
            path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3 + 7])
    elif how == "empty":
        for path in [*files, run / "run.json"]:
            path.write_text("")
    elif how == "garbage":
        for path in files:
            path.write_bytes(b'{"step": 1, "phase": 3}\n\xff\xfe[1]\n{"lengths": "x"}\n' * 3)
    elif how == "only run.json":
        for path in files:
            path.unlink()
    else:
        (run / how).unlink()


@pytest.mark.browser
@pytest.mark.parametrize(
    "how",
    [
        *("truncated", "garbage", "only run.json", "trace.json"),
        *(
            pytest.param(how, marks=pytest.mark.slow)
            for how in ("empty", "run.json", "metrics.jsonl", "events.jsonl", "samples.jsonl",
                        "lengths.jsonl", "config.yaml")
        ),
    ],
)  # fmt: skip
def test_a_damaged_run_renders_with_what_there_is(
    viewer: Any, run_dir: Path, tmp_path: Path, how: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_dir, run)
    damage(run, how)
    page = viewer.open(render(run))
    assert page.locator("h1").inner_text() == "run"
    assert viewer.errors == []
    if how == "truncated":
        assert (
            page.locator('[data-chart="reward"] path.raw').first.evaluate("p => +p.dataset.points")
            > 10
        )
    has_charts = how not in ("empty", "garbage", "only run.json", "metrics.jsonl")
    metrics = page.locator('[data-chart]:not([data-chart="memory"])')
    assert (metrics.count() > 0) == has_charts


def test_a_directory_that_is_no_run_is_one_clear_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError) as error:
            render(path)
        assert str(error.value) == f"run={path}: wanted a run directory (one that holds run.json)"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.browser
def test_advice_is_shown_where_there_is_some(viewer: Any, report: Path, tmp_path: Path) -> None:
    assert viewer.open(report).query_selector("#advice") is None
    idle = tmp_path / "idle"
    shutil.copytree(report.parent, idle)
    with (idle / "metrics.jsonl").open("a") as file:
        for row in load(idle).metrics:
            if row.phase == "rl":
                file.write(f'{{"step": {row.step}, "phase": "rl", "bubble_share": 0.92}}\n')
    advice = viewer.open(render(idle)).query_selector_all("#advice li")
    assert [item.inner_text() for item in advice] == [
        "ranks wait for 92% of a step: the timeline shows where: rollout.max_running"
    ]


@pytest.mark.browser
def test_replies_are_shaded_and_turns_say_what_they_have_earned(
    viewer: Any, tmp_path: Path
) -> None:
    turns = [
        {"text": "[times(12,34)]", "reply": "408#", "reward": -0.5},
        {"text": "<b>408</b>", "reply": "", "reward": 1.0},
    ]
    whole = "".join(turn["text"] + turn["reply"] for turn in turns)
    record = {"id": "0.0", "prompt": "12*34=", "response": whole, "reward": 0.5, "turns": turns}
    with Telemetry(tmp_path, QUIET, 2) as telemetry:
        telemetry.phase("rl", 1)
        telemetry.log(1, {"loss": 1.0})
        telemetry.samples(1, [record, record | {"id": "0.1", "turns": [turns[1]]}])
    page = viewer.open(render(tmp_path))
    first, second = page.locator("#samples pre.response").all()
    assert first.locator(".reply").all_inner_texts() == ["408#"]
    shades = [
        place.evaluate("e => getComputedStyle(e).backgroundColor")
        for place in (first.locator(".reply"), first)
    ]
    assert shades[0] != shades[1]
    assert first.locator(".earned").all_inner_texts() == ["-0.500", "1.00"]
    assert second.locator(".reply").count() == 0
    assert first.inner_text() == "[times(12,34)]-0.500408#<b>408</b>1.00"
    assert viewer.errors == []


def test_predicted_seconds_stand_beside_measured_ones() -> None:
    """Each kind of work in `costs.json` has a row; a run without scales has no table."""
    run = RunData(name="run", directory="run", kinds=[["decode", 3, 2.0, 5.0], ["kv", 1, 0.0, 1.0]])
    shown = predicted(run)
    assert shown is not None
    assert shown["rows"] == [["decode", 3, 2.0, 5.0, 2.5]]
    assert predicted(RunData(name="run", directory="run")) is None
