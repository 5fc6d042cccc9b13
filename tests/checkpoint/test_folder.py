"""Checkpoints as folders: whole under their name, or not there."""

import json
from pathlib import Path

import pytest

from hybridrl.checkpoint import folder


def write(path: Path, when: float = 0.0, step: int = 1) -> None:
    """A checkpoint as ranks and driver make one, up to its name."""
    folder.clear(path)
    resume = folder.hidden(path) / folder.RESUME
    resume.mkdir(parents=True)
    (resume / "__0_0.distcp").write_bytes(b"tensors")
    folder.seal(path, {"time": when, "step": step})


def publish(path: Path, when: float = 0.0, step: int = 1) -> None:
    write(path, when, step)
    folder.replace(folder.hidden(path), path)


def test_the_newest_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    """Not the one of the highest step: a run may have gone back and begun again from there."""
    steps = {"checkpoints/step_000009": 5.0, "checkpoints/step_000003": 7.0, "warm_start": 1.0}
    for name, when in steps.items():
        publish(tmp_path / name, when)
    found, wrong = folder.search(tmp_path)
    names = [str(point.folder.relative_to(tmp_path)) for point in found]
    assert names == ["checkpoints/step_000003", "checkpoints/step_000009", "warm_start"]
    assert wrong == []
    assert {point.run_dir for point in found} == {tmp_path}


def test_what_was_cut_short_is_not_there_and_the_earlier_one_is(tmp_path: Path) -> None:
    publish(tmp_path / "final", step=3)
    write(tmp_path / "final", step=6)  # and killed before the rename
    (point,), wrong = folder.search(tmp_path)
    assert (point.state["step"], wrong) == (3, [])
    publish(tmp_path / "final", step=6)
    assert folder.read(tmp_path / "final").state["step"] == 6
    assert [path.name for path in tmp_path.iterdir()] == ["final"]


@pytest.mark.parametrize("damage", ["short", "missing", "state", "format"])
def test_what_is_damaged_is_told(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "checkpoints" / "step_000003"
    publish(path)
    tensors, state = path / "resume" / "__0_0.distcp", path / "resume" / "state.json"
    if damage == "short":
        tensors.write_bytes(b"tens")
        message = f"{tensors}: has 4 bytes of 7"
    elif damage == "missing":
        tensors.unlink()
        message = f"{tensors}: is not there"
    elif damage == "state":
        state.write_text(state.read_text()[:20])
        message = f"{state}: "
    else:
        state.write_text(json.dumps({"format": 99}))
        message = f"{state}: format 99, wanted 1"
    points, (wrong,) = folder.search(tmp_path)
    assert points == []
    assert wrong.startswith(message)
