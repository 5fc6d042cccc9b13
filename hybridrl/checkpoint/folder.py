"""Checkpoints as folders: how one becomes visible, which there are, and whether they are whole.

A checkpoint is a Hugging Face directory with `resume/` in it: what the ranks have written
(`checkpoint.distributed`), and `state.json`, the driver's part, which lists their files.

Invariant: a folder under its own name was written to its end. It is made under a hidden name
(`.step_000010.new`), and renamed when all of it is there; what was there before stays until then.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESUME, STATE, FORMAT = "resume", "state.json", 1


@dataclass(frozen=True, slots=True)
class Point:
    """A moment of a run to go on from: its checkpoint, and the driver's `state` of then."""

    folder: Path
    state: dict[str, Any]

    @property
    def tensors(self) -> Path:
        """Where the ranks' part lies."""
        return self.folder / RESUME

    @property
    def run_dir(self) -> Path:
        """The directory of the run that it is of."""
        return run_dir_of(self.folder)


def hidden(path: Path) -> Path:
    """The name under which the checkpoint `path` is written until it is whole."""
    return path.with_name(f".{path.name}.new")


def clear(path: Path) -> None:
    """Make room to write `path`: what a run that was killed while it wrote has left goes."""
    shutil.rmtree(hidden(path), ignore_errors=True)


def seal(path: Path, state: Mapping[str, Any]) -> None:
    """Write the driver's `state` into `hidden(path)`, with the sizes of what the ranks wrote."""
    resume = hidden(path) / RESUME
    files = sorted(file for file in resume.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(resume)): file.stat().st_size for file in files}
    with (resume / STATE).open("w") as file:
        json.dump({"format": FORMAT, "files": sizes, **state}, file)
        file.flush()
        os.fsync(file.fileno())


def replace(source: Path, target: Path) -> None:
    """Give the directory `source` the name `target`, whatever has it."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)  # a directory that is not empty cannot be renamed over
    source.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def run_dir_of(folder: Path) -> Path:
    """The run directory that a checkpoint lies in."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent


def read(folder: Path) -> Point:
    """The checkpoint at `folder`; raises ValueError, with the reason, for one that is not whole."""
    file = folder / RESUME / STATE
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{file}: {reason}") from None
    if state.get("format") != FORMAT:
        raise ValueError(f"{file}: format {state.get('format')}, wanted {FORMAT}")
    for name, size in state["files"].items():
        found = folder / RESUME / name
        there = found.stat().st_size if found.is_file() else None
        if there != size:
            what = "is not there" if there is None else f"has {there} bytes of {size}"
            raise ValueError(f"{found}: {what}")
    return Point(folder, state)


def search(run_dir: Path) -> tuple[list[Point], list[str]]:
    """The whole checkpoints of a run, the newest first, and what is wrong with the others."""
    points, wrong = [], []
    for resume in (*run_dir.glob(f"checkpoints/*/{RESUME}"), *run_dir.glob(f"*/{RESUME}")):
        if not resume.parent.name.startswith("."):
            try:
                points.append(read(resume.parent))
            except ValueError as error:
                wrong.append(str(error))
    return sorted(points, key=lambda point: -float(point.state["time"])), wrong
