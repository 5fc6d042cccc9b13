"""Runs side by side: groups, seeds joined, curves, and the page in a real browser."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from scipy import stats

from hybridrl import cli
from hybridrl.config import ConfigError, TelemetryConfig
from hybridrl.telemetry.compare import estimate, find_runs, gather, grouped, render, table
from hybridrl.telemetry.run import Telemetry
from hybridrl.telemetry.rundata import load


def write(folder: Path, lr: float, seed: int, offset: float, steps: int = 6) -> Path:
    """A run whose reward at step s is s / 10 + `offset`; each step trains 100 tokens."""
    config = TelemetryConfig(progress=False, loggers=[])
    with Telemetry(folder, config, steps) as telemetry:
        telemetry.phase("rl", steps)
        for step in range(1, steps + 1):
            reward = {"reward_mean": step / 10 + offset, "samples/tokens": 100.0}
            telemetry.log(step, reward)
            answer = {"set": "main", "prompt": f"{step % 2}?", "response": f"<b>{lr} {step}</b>"}
            lost = {"id": "lost with its instance", "reward": 0.0, "set": "main", "prompt": None}
            lines = [{"id": str(step), "reward": 1.0, **answer}, {**lost, "response": None}]
            telemetry.samples(step, lines, "evaluation")
        telemetry.log(steps, {"eval_accuracy": 0.5 + offset, "eval/own/pass@4": 0.25})
    settings = {"run": {"dir": str(folder), "seed": seed}, "trainer": {"optim": {"lr": lr}}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | {"model": {"path": None}}))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two learning rates with three and two seeds; one run has a step more."""
    at = tmp_path_factory.mktemp("compare")
    return [
        write(at / "a0", 1e-4, 0, 0.0),
        write(at / "b0", 4e-4, 0, 0.3),
        write(at / "a1", 1e-4, 1, 0.1),
        write(at / "b1", 4e-4, 1, 0.3),
        write(at / "a2", 1e-4, 2, 0.05, steps=7),
    ]


def test_seeds_are_one_group_and_settings_that_differ_its_label(runs: list[Path]) -> None:
    groups = grouped([load(run) for run in runs])
    assert [group.label for group in groups] == ["lr=0.0001", "lr=0.0004"]
    assert [[run.name for run in g.runs] for g in groups] == [["a0", "a1", "a2"], ["b0", "b1"]]
    assert [dict(group.differs) for group in groups] == [
        {"trainer.optim.lr": 1e-4}, {"trainer.optim.lr": 4e-4},
    ]  # fmt: skip


def test_runs_of_the_same_settings_have_the_directorys_name(runs: list[Path]) -> None:
    (group,) = grouped([load(runs[1]), load(runs[3])])
    assert group.label == "b0"


def test_intervals_are_scipys(runs: list[Path]) -> None:
    values = [0.5, 0.6, 0.55]
    got = estimate(values)
    low, high = stats.t.interval(0.95, 2, loc=got.mean, scale=stats.sem(values))
    assert (got.low, got.high) == pytest.approx((low, high))
    assert str(estimate([0.5])) == "0.5"
    header, first, second = table(grouped([load(run) for run in runs]))
    column = header.index("eval_accuracy")
    assert first[column] == f"0.55 ± {(high - low) / 2:.2g}"
    assert second[column] == "0.8 ± 0"
    assert header[-1] == "eval/own/pass@4"
    assert first[:3] == ["lr=0.0001", "3", "7"]


def test_a_curve_has_the_steps_that_all_runs_have(runs: list[Path]) -> None:
    first, second = grouped([load(run) for run in runs])
    curve = first.curve("reward_mean")
    assert [point["step"] for point in curve] == [1, 2, 3, 4, 5, 6]
    assert [point["tokens"] for point in curve] == [100, 200, 300, 400, 500, 600]
    assert [point["y"] for point in curve] == pytest.approx([0.05 + s / 10 for s in range(1, 7)])
    assert all(point["low"] < point["y"] < point["high"] for point in curve)
    assert len(second.curve("reward_mean")) == 6
    assert second.curve("nothing") == []


def test_responses_to_the_same_prompt_are_beside_each_other(runs: list[Path]) -> None:
    shown = gather(grouped([load(run) for run in runs]))["samples"]
    assert [sample["prompt"] for sample in shown] == ["1?", "0?"]
    assert [r["response"] for r in shown[1]["responses"]] == ["<b>0.0001 6</b>", "<b>0.0004 6</b>"]


def test_a_sweeps_directory_gives_its_runs(runs: list[Path], tmp_path: Path) -> None:
    assert find_runs([runs[0].parent]) == sorted(runs)
    assert find_runs([runs[1], runs[0]]) == [runs[1], runs[0]]
    for paths, message in (
        ([runs[0]], r"^run=.*a0: wanted two runs or more"),
        ([tmp_path], r"^run=.*: wanted a run directory, or one with runs in it"),
    ):
        with pytest.raises(ConfigError, match=message):
            find_runs(paths)


def test_the_command_prints_a_table_and_one_line(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["compare", *map(str, runs), "--out", str(tmp_path / "page.html")])
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["group", "lr=0.0001", "lr=0.0004"]
    shown = [line.split()[0] for line in lines[1:]]
    assert shown == ["runs", "steps", "seconds", "eval_accuracy", "reward_mean", "eval/own/pass@4"]
    record = json.loads(last)
    assert record["page"] == str(tmp_path / "page.html")
    assert record["groups"][1]["metrics"]["eval_accuracy"]["mean"] == pytest.approx(0.8)


@pytest.mark.browser
def test_the_page_in_a_browser(viewer: Any, runs: list[Path], tmp_path: Path) -> None:
    page = viewer.open(render(grouped([load(run) for run in runs]), tmp_path / "page.html"))
    assert viewer.errors == []
    curve = page.query_selector_all('[data-curve="reward_mean"] path.raw')
    assert [line.get_attribute("data-points") for line in curve] == ["6", "6"]
    assert len(page.query_selector_all('[data-curve="reward_mean"] path.band')) == 2
    assert page.inner_text("#results").count("lr=0.0001") == 1
    assert "trainer.optim.lr" in page.inner_text("#settings")
    assert "<b>0.0001 6</b>" in page.inner_text("#samples")
    before = curve[0].get_attribute("d")
    page.click("#axis button:nth-child(3)")
    assert page.query_selector('[data-curve="reward_mean"] path.raw').get_attribute("d") != before
    assert "seconds since the start" in page.inner_text('[data-curve="reward_mean"]')
