"""Checkpoints as folders: whole under their name, or not there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.checkpoint import folder

STATE: dict[str, Any] = {
    "phase": "rl", "settings": {}, "scores": {}, "roles": {}, "records": {}, "prompts": 0,
    "bad_steps": 0, "evaluated": [-1, {}], "before": {}, "recipe": {}, "schedule": {},
}  # fmt: skip


def write(path: Path, when: float = 0.0, step: int = 1, phase: str = "rl") -> None:
    """A checkpoint as ranks and driver make one, up to its name."""
    folder.clear(path)
    resume = folder.hidden(path) / folder.RESUME
    resume.mkdir(parents=True)
    (resume / "__0_0.distcp").write_bytes(b"tensors")
    folder.note_sum(resume / "__0_0.distcp")
    folder.seal(path, {**STATE, "time": when, "step": step, "phase": phase})


def publish(path: Path, when: float = 0.0, step: int = 1, phase: str = "rl") -> None:
    write(path, when, step, phase)
    folder.replace(folder.hidden(path), path)


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    """Not the one of the highest step: a run may have gone back and begun again from there."""
    steps = {"checkpoints/step_000009": 5.0, "checkpoints/step_000003": 7.0, "warm_start": 1.0}
    for name, when in steps.items():
        publish(tmp_path / name, when)
    points, wrong = folder.search(tmp_path)
    names = [str(point.folder.relative_to(tmp_path)) for point in points]
    assert names == ["checkpoints/step_000003", "checkpoints/step_000009", "warm_start"]
    assert wrong == []
    assert {point.run_dir for point in points} == {tmp_path}


def test_what_was_cut_short_is_not_there_and_the_earlier_one_is(tmp_path: Path) -> None:
    publish(tmp_path / "final", step=3)
    write(tmp_path / "final", step=6)  # and killed before the rename
    (point,), wrong = folder.search(tmp_path)
    assert (point.state["step"], wrong) == (3, [])
    publish(tmp_path / "final", step=6)
    assert folder.read(tmp_path / "final").state["step"] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_what_is_replaced_stays_when_that_fails(tmp_path: Path) -> None:
    """It may go once the other has its name, not before."""
    publish(tmp_path / "final", step=3)
    with pytest.raises(FileNotFoundError):
        folder.replace(tmp_path / "nowhere", tmp_path / "final")
    assert folder.read(tmp_path / "final").state["step"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_what_is_replaced_is_never_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before the earlier one is deleted: each has a name, and the name has the new one."""
    publish(tmp_path / "final", step=3)
    write(tmp_path / "final", step=6)
    present = []
    rename = Path.rename

    def watched(source: Path, target: Path) -> Path:
        renamed = rename(source, target)
        present.append((tmp_path / "final").exists())
        return renamed

    monkeypatch.setattr(Path, "rename", watched)
    monkeypatch.setattr(folder.shutil, "rmtree", lambda *_, **__: None)
    folder.replace(folder.hidden(tmp_path / "final"), tmp_path / "final")
    assert all(present)
    assert folder.read(tmp_path / "final").state["step"] == 6


def test_a_file_system_that_exchanges_no_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    publish(tmp_path / "final", step=3)
    publish(tmp_path / "final", step=6)
    assert folder.read(tmp_path / "final").state["step"] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


def test_other_bytes_are_found(tmp_path: Path) -> None:
    publish(tmp_path / "final")
    point = folder.read(tmp_path / "final")
    file = point.tensors / "__0_0.distcp"
    assert sorted(path.name for path in point.tensors.iterdir()) == [file.name, "state.json"]
    assert folder.changed(point) == ""
    file.write_bytes(b"tensorz")
    assert folder.changed(folder.read(tmp_path / "final")) == (
        f"{file}: not the bytes that were written"
    )


def test_another_digit_in_the_state_is_found(tmp_path: Path) -> None:
    """What is still a state; one of an earlier version has no checksum, and is taken."""
    publish(tmp_path / "final", step=6)
    file = tmp_path / "final" / "resume" / "state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"prompts": state["prompts"] + 1}))
    assert folder.changed(folder.read(tmp_path / "final")) == f"{file}: not what was written"
    del state["sum"]
    file.write_text(json.dumps(state))
    assert folder.changed(folder.read(tmp_path / "final")) == ""


@pytest.mark.parametrize(
    ("back", "left"),
    [
        ("checkpoints/step_000004", ["step_000002", "step_000004", "warm_start"]),
        ("final", ["final", "step_000002", "step_000004", "step_000006", "warm_start"]),
        ("checkpoints/step_000001", ["step_000001"]),
    ],
)
def test_what_came_later_is_forgotten(tmp_path: Path, back: str, left: list[str]) -> None:
    """Whole or not; a copy that a user has made is neither deleted nor taken."""
    for step in (2, 4, 6, 8):
        publish(tmp_path / "checkpoints" / f"step_{step:06d}", when=step, step=step)
    (tmp_path / "checkpoints/step_000008/resume/state.json").write_text("{")
    publish(tmp_path / "final", when=7, step=6)
    publish(tmp_path / "warm_start", when=1, step=1)
    publish(tmp_path / "checkpoints" / "mine", when=6, step=6)
    if back.endswith("1"):
        publish(tmp_path / back, when=0.5, step=1, phase="warm_start")
    folder.forget_later(folder.read(tmp_path / back))
    points, wrong = folder.search(tmp_path)
    assert sorted(point.folder.name for point in points) == left
    assert (points[0].folder, wrong) == (tmp_path / back, [])
    assert (tmp_path / "checkpoints" / "mine").is_dir()


def lacks(*keys: str) -> Callable[[str], str]:
    return lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k not in keys})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda text: text[:20], ""),
        (lambda text: "[1, 2]", "[1, 2], wanted an object"),
        (lambda text: '{"format": 99}', "format 99, wanted 1"),
        (lacks("files", "recipe"), "no files, recipe in it"),
        (lambda text: text.replace('"time": 0.0', '"time": "0"'), "no time in it"),
    ],
)
def test_a_state_that_is_damaged_is_told(
    tmp_path: Path, damage: Callable[[str], str], told: str
) -> None:
    publish(tmp_path / "final")
    state = tmp_path / "final" / "resume" / "state.json"
    state.write_text(damage(state.read_text()))
    points, (wrong,) = folder.search(tmp_path)
    assert points == []
    assert wrong.startswith(f"{state}: {told}")


@pytest.mark.parametrize("damage", ["short", "missing"])
def test_what_is_damaged_is_told(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "checkpoints" / "step_000003"
    publish(path)
    tensors = path / "resume" / "__0_0.distcp"
    if damage == "short":
        tensors.write_bytes(b"tens")
        message = f"{tensors}: has 4 bytes of 7"
    else:
        tensors.unlink()
        message = f"{tensors}: is not there"
    assert folder.search(tmp_path) == ([], [message])


@pytest.mark.parametrize(
    ("scores", "keep_last", "kept"),
    [
        ({}, 2, set()),
        ({10: 0.5, 20: 0.9, 30: 0.7, 40: 0.8}, 2, {20, 30, 40}),
        ({10: 0.5, 20: 0.9, 30: 0.7, 40: 0.8}, 0, {20}),
        ({10: 0.9, 20: 0.9}, 0, {10}),
        ({10: None, 20: None, 30: None}, 1, {30}),
        ({10: None, 20: 0.1, 30: None}, 1, {20, 30}),
    ],
)
def test_the_best_and_the_last_stay(
    scores: dict[int, float | None], keep_last: int, kept: set[int]
) -> None:
    assert folder.to_keep(scores, keep_last) == kept
