"""Samples are found by text, reward, length, kind, step and status, page by page."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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


def test_one_sample_is_read_from_its_row_group(
    new_sampled_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample is found in two files with several groups of rows."""
    monkeypatch.setattr(sample_files, "_ROW_GROUP", 2)
    with new_sampled_run(tmp_path) as run:
        run.step(2)
    search = SampleSearch(tmp_path, load(tmp_path))
    for key in ("8.0", "8.1", "9.0", "9.1", "10.0", "10.1"):
        sample = search.sample(2, key)
        assert sample is not None
        assert (sample["id"], sample["prompt"]) == (key, f"prompt {key.partition('.')[0]} -> ")


def test_a_damaged_file_is_left_out_and_named(sampled_run: Path, tmp_path: Path) -> None:
    """Cut off by a copy, emptied, deleted since, or of another program."""
    shutil.copytree(sampled_run, tmp_path / "run")
    search = SampleSearch(tmp_path / "run", load(tmp_path / "run"))
    files = sorted((tmp_path / "run" / "samples").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:-100])
    files[2].write_bytes(b"")
    files[3].unlink()
    pq.write_table(pa.table({"id": ["14.0"]}), files[5])
    listed = search.page(SampleQuery())
    assert [row["key"] for row in listed.rows] == ["13.0", "13.1", "14.0", "14.1", "5.0", "5.1",
        "evaluation main 0.0"]  # fmt: skip
    assert set(listed.skipped) == {files[number].name for number in (0, 2, 3, 5)}
    assert search.sample(1, "5.0") is not None
    assert search.sample(1, "3.0") is None
    assert search.sample(3, "15.0") is None


def test_a_row_of_a_line_is_there_once_its_file_is(sampled_run: Path) -> None:
    """A page that has listed the line asks by its key."""
    search = SampleSearch(sampled_run, load(sampled_run))
    sample = search.sample(2, "rl  9.1")
    assert sample is not None
    assert sample["key"] == sample["id"] == "9.1"
    assert search.sample(2, "evaluation main 9.1") is None


def test_lines_have_kind_and_status(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text(
        '{"step": 1, "id": "0.0", "source": "sums", "task": "long", "drop_reason": null}\n'
        '{"step": 1, "id": "0.1", "source": "sums", "task": "", "drop_reason": "filter"}\n'
        '{"step": 1, "id": "0.2"}\n'  # of an older run
        '{"step": 1, "id": "0.3", "response": null}\n'  # lost with its instance
    )
    search = SampleSearch(tmp_path, load(tmp_path))
    assert keys(search, text="lost with its instance") == ["rl  0.3"]
    assert keys(search, kind="task/long") == ["rl  0.0"]
    assert keys(search, kind="source/sums") == ["rl  0.0", "rl  0.1"]
    assert keys(search, status="used") == ["rl  0.0"]
    assert keys(search, status="dropped") == ["rl  0.1"]


def test_a_search_that_is_out_of_time_gives_up_within_a_step(
    sampled_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here within the second; the next search begins there."""
    search, ticks = SampleSearch(sampled_run, load(sampled_run)), iter(range(100))
    monkeypatch.setattr(sample_search.time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(sample_search, "_MOST_SECONDS", 5.0)
    page = search.page(SampleQuery())
    assert [row["at"] for row in page.rows] == [3] * 6
    assert page.more == sample_search.SamplePosition(2)
    monkeypatch.setattr(sample_search.time, "monotonic", lambda: 0.0)
    assert [row["at"] for row in search.page(SampleQuery(), page.more).rows] == [2] * 6 + [1] * 7


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
