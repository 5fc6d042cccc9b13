"""Samples are found by text, reward, length, kind, step and status, page by page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from hybridrl.telemetry import sample_files, sample_search
from hybridrl.telemetry.rundata import load
from hybridrl.telemetry.sample_search import SampleQuery, SampleSearch


def keys(search: SampleSearch, **settings: Any) -> list[str]:
    """All rows that pass, page after page."""
    listed, begin = [], None
    while True:
        page = search.page(SampleQuery(**settings), begin)
        listed += [row["key"] for row in page.rows]
        if page.more is None:
            return listed
        begin = page.more


@pytest.fixture(scope="module")
def search(sampled_run: Path) -> SampleSearch:
    return SampleSearch(sampled_run, load(sampled_run))


def test_newest_steps_come_first_and_a_prompts_samples_together(search: SampleSearch) -> None:
    assert search.has_files
    assert keys(search)[:6] == ["13.0", "13.1", "14.0", "14.1", "15.0", "15.1"]
    assert keys(search, step=1) == ["3.0", "3.1", "4.0", "4.1", "5.0", "5.1", "evaluation main 0.0"]


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"min_reward": 0.5}, lambda row: (row["reward"] or 0) >= 0.5),
        ({"max_reward": 0.0}, lambda row: row["reward"] == 0.0),
        ({"min_tokens": 4, "max_tokens": 5}, lambda row: row["response_tokens"] in (4, 5)),
        ({"text": "PROMPT 4"}, lambda row: "prompt 4" in row["prompt"]),
        ({"text": "<script>"}, lambda row: "<script>" in row["response"]),
        ({"kind": "task/long"}, lambda row: row.get("task") == "long"),
        ({"kind": "source/sums"}, lambda row: row.get("source") == "sums"),
        ({"status": "dropped"}, lambda row: row.get("status") == "dropped"),
        ({"status": "cut"}, lambda row: row.get("finish") == "length"),
        ({"phase": "evaluation"}, lambda row: row["phase"] == "evaluation"),
        ({"phase": "rl", "status": "used", "min_reward": 1}, lambda row: row["reward"] == 1.0
            and row["phase"] == "rl" and row["status"] == "used"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "rows",
)  # fmt: skip
def test_a_filter_lets_those_pass_that_it_says(
    search: SampleSearch, settings: Mapping[str, Any], passes: Callable[[Any], bool]
) -> None:
    rows = search.page(SampleQuery()).rows
    wanted = [row["key"] for row in rows if passes(row)]
    assert 0 < len(wanted) < len(rows)
    assert keys(search, **settings) == wanted


def test_pages_give_every_sample_once(
    search: SampleSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = keys(search)
    monkeypatch.setattr(sample_search, "PAGE", 4)
    assert keys(search) == whole
    monkeypatch.setattr(sample_search, "_MOST_SECONDS", -1.0)  # each search gives up at once
    page = search.page(SampleQuery())
    assert (page.rows, page.more) == ([], sample_search.SamplePosition(3))


def test_one_sample_has_a_value_for_each_token(search: SampleSearch) -> None:
    sample = search.sample(2, "9.1")
    assert sample is not None
    num = sample["response_tokens"]
    assert len(sample["tokens"]) == num
    assert {name: len(values) for name, values in sample["values"].items()} == {
        "log_probs": num, "reference_log_probs": num,
    }  # fmt: skip
    assert [span["version"] for span in sample["spans"]] == [0, 1]
    evaluated = search.sample(1, "evaluation main 0.0")
    assert evaluated is not None
    assert "tokens" not in evaluated
    assert search.sample(2, "99.0") is search.sample(99, "9.1") is None


def test_a_run_without_files_has_the_samples_of_its_lines(run_dir: Path) -> None:
    search = SampleSearch(run_dir, load(run_dir))
    assert not search.has_files
    page = search.page(SampleQuery(max_reward=0))
    assert {row["reward"] for row in page.rows} == {0.0}
    assert page.more is not None


def test_files_beside_the_samples_are_no_samples(sampled_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / sample_files.FOLDER
    folder.mkdir()
    (folder / ".step-000001-rank-0000.parquet.12").write_text("half of a file")
    (folder / "mine.parquet").write_text("another program's")
    assert sample_files.files_by_step(tmp_path) == {}
