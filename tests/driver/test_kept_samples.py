"""`telemetry.samples=all`: a run's Parquet files have every sample of every step, once."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.driver.checkpoints import Checkpoints
from hybridrl.telemetry import sample_files
from hybridrl.telemetry.records import read_lines

pytestmark = pytest.mark.layouts  # whole runs

ALL = ["telemetry.samples=all", "warm_start.steps=1", "eval.sets.main.every=null"]


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """Every sample, by step."""
    columns = sample_files.schema().names
    return [
        row
        for paths in sample_files.files_by_step(run_dir).values()
        for row in sample_files.read(paths, columns).to_pylist()
    ]


def test_every_dispatched_sample_is_in_the_file_of_its_step(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """On two ranks, where samples move; with a filter and log-probabilities of a reference."""
    settings = ["cluster.ranks=2", "schedule=fused", "trainer.steps=2", "recipe.kl_coef=0.05"]
    run = train_here(tmp_path / "run", *tiny_run, *ALL, *settings)
    written = rows(run.dir)
    dispatched = [(step.step, sample) for step in run.steps for sample in step.dispatched]
    by_id = {(row["step"], row["id"]): row for row in written}
    assert len(by_id) == len(written) == len(dispatched)
    texts = {(x["step"], x["id"]): x for x in read_lines(run.dir / "samples.jsonl")}
    names = set()
    for step, sample in dispatched:
        row = by_id[step, str(sample.id)]
        assert (row["prompt"], row["response"]) == (
            texts[step, row["id"]]["prompt"], texts[step, row["id"]]["response"],
        )  # fmt: skip
        assert row["response_tokens"] == sample.response_tokens == len(row["response_ids"])
        assert row["prompt_tokens"] == sample.prompt_tokens == len(row["prompt_ids"])
        assert row["reward"] == sample.scalars.get("reward")
        assert row["advantage"] == sample.scalars.get("advantage")
        spans = [(s["start"], s["stop"], s["version"]) for s in row["spans"]]
        assert spans == [(s.start, s.stop, s.version) for s in sample.spans]
        assert row["source"] == "spell"
        if row["phase"] == "rl":
            assert len(row["log_probs"]) == sample.response_tokens
            assert all(x <= 0 for x in row["log_probs"])
        names |= {(row["status"], field["name"]) for field in row["fields"]}
    assert ("used", "reference_log_probs") in names
    dropped = {(s.step, str(id)): drop for s in run.steps for id, drop in s.dropped.items()}
    assert {key: row["drop_reason"] for key, row in by_id.items() if row["drop_reason"]} == {
        key: drop.reason.value for key, drop in dropped.items()
    }
    assert {row["rank"] for row in _names(run.dir)} == {0, 1}


def _names(run_dir: Path) -> list[dict[str, int]]:
    names = [path.stem.split("-") for path in (run_dir / "samples").iterdir()]
    return [{"step": int(name[1]), "rank": int(name[3])} for name in names]


def test_a_resumed_run_has_no_sample_twice(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """It has fewer ranks than before, and the killed one left a file half written."""
    settings = [*tiny_run, *ALL, "deterministic=strict", "trainer.save_every=2", "cluster.ranks=2"]
    train_here(tmp_path / "run", *settings, "trainer.steps=3")
    copy = tmp_path / "copy"  # as if killed after the checkpoint of step 3
    shutil.copytree(tmp_path / "run", copy)
    shutil.rmtree(copy / "final")
    half = copy / "samples" / ".step-000004-rank-0001.parquet.77"
    half.write_text("half")
    whole = rows(tmp_path / "run")
    assert [row["step"] for row in rows(copy)] == [row["step"] for row in whole]
    again = [s for s in settings if s != "cluster.ranks=2"]
    train_here(copy, *again, "trainer.steps=3", "cluster.ranks=1", "trainer.resume=auto")
    assert not half.exists()
    assert {(n["step"], n["rank"]) for n in _names(copy)} == {
        (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0),
    }  # fmt: skip
    keys = ("step", "id", "response", "reward", "status")
    assert [[row[key] for key in keys] for row in rows(copy)] == [
        [row[key] for key in keys] for row in whole
    ]


def test_a_checkpoint_has_the_samples_of_its_steps_behind_it(
    train_here: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However slow the disk is: a run that resumes there makes none of them again."""
    write, save, there = sample_files.write, Checkpoints.save, []

    def write_slowly(*args: Any) -> Path:
        time.sleep(0.5)
        return write(*args)

    def save_and_look(self: Checkpoints, step: int, *args: Any) -> None:
        save(self, step, *args)
        there.append((step, list(sample_files.files_by_step(tmp_path / "run"))))

    monkeypatch.setattr(sample_files, "write", write_slowly)  # rank 0 is this process
    monkeypatch.setattr(Checkpoints, "save", save_and_look)
    settings = [*tiny_run, *ALL, "cluster.ranks=1", "trainer.steps=4", "trainer.save_every=3"]
    train_here(tmp_path / "run", *settings)
    assert there == [(4, [1, 2, 3, 4])]
    assert list(sample_files.files_by_step(tmp_path / "run")) == [1, 2, 3, 4, 5]


def test_a_run_keeps_the_first_samples_alone_unless_told(
    train_here: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    train_here(tmp_path / "run", *tiny_run, "cluster.ranks=1", "trainer.steps=1")
    assert not (tmp_path / "run" / "samples").exists()
