"""Checkpoints as folders: how one becomes visible, which there are, and whether they are whole.

A checkpoint is a Hugging Face directory with `resume/` in it: what the ranks have written
(`checkpoint.distributed`), and `state.json`, the driver's part, which lists their files with sizes
and checksums (CRC-32, as zlib has it).

Invariant: a folder under its own name was written to its end. It is made under a hidden name
(`.step_000010.new`), and renamed when all of it is there; what was there before stays until then.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESUME, STATE, FORMAT = "resume", "state.json", 1

_SUM = ".crc32"  # beside a file, from the rank that wrote it, until the driver has it in STATE
_CHUNK = 2**24
_NUMBER: tuple[type, ...] = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "files": dict, "sums": dict, "time": _NUMBER, "step": int, "phase": str, "settings": dict,
    "scores": dict, "roles": dict, "records": dict, "prompts": int, "bad_steps": int,
    "evaluated": list, "before": dict, "recipe": dict, "schedule": dict,
}  # fmt: skip


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


def note_sum(file: Path) -> None:
    """Leave the checksum of `file`, which this process has just written, for `seal`."""
    file.with_name(file.name + _SUM).write_text(str(_sum(file)))


def seal(path: Path, state: Mapping[str, Any]) -> None:
    """Write the driver's `state` into `hidden(path)`, with sizes and sums of what ranks wrote."""
    resume, sums = hidden(path) / RESUME, {}
    for note in resume.rglob(f"*{_SUM}"):
        sums[str(note.relative_to(resume)).removesuffix(_SUM)] = int(note.read_text())
        note.unlink()
    files = sorted(file for file in resume.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(resume)): file.stat().st_size for file in files}
    with (resume / STATE).open("w") as file:
        json.dump({**state, "format": FORMAT, "files": sizes, "sums": sums}, file)
        file.flush()
        os.fsync(file.fileno())


def replace(source: Path, target: Path) -> None:
    """Give the directory `source` the name `target`; what has it goes, unless that fails."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)  # a directory that is not empty cannot be renamed over
    try:
        source.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def run_dir_of(folder: Path) -> Path:
    """The run directory that a checkpoint lies in."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent


def read(folder: Path) -> Point:
    """The checkpoint at `folder`; raises ValueError, with the reason, for one that is not whole.

    Of the ranks' files only the sizes are looked at: `changed` reads them.
    """
    file = folder / RESUME / STATE
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{file}: {reason}") from None
    if not isinstance(state, dict):
        raise ValueError(f"{file}: {str(state)[:40]}, wanted an object")
    if state.get("format") != FORMAT:
        raise ValueError(f"{file}: format {state.get('format')}, wanted {FORMAT}")
    wrong = [key for key, kind in _KINDS.items() if not isinstance(state.get(key), kind)]
    if wrong:
        raise ValueError(f"{file}: no {', '.join(wrong)} in it")
    for name, size in state["files"].items():
        found = folder / RESUME / name
        there = found.stat().st_size if found.is_file() else None
        if there != size:
            what = "is not there" if there is None else f"has {there} bytes of {size}"
            raise ValueError(f"{found}: {what}")
    return Point(folder, state)


def changed(point: Point) -> str:
    """Which of the ranks' files has other bytes than were written, if any; all of them are read."""
    sums: dict[str, int] = point.state["sums"]
    with ThreadPoolExecutor() as threads:
        found = threads.map(_sum, [point.tensors / name for name in sums])
        for (name, wanted), there in zip(sums.items(), found, strict=True):
            if there != wanted:
                return f"{point.tensors / name}: not the bytes that were written"
    return ""


def search(run_dir: Path) -> tuple[list[Point], list[str]]:
    """The whole checkpoints of a run, the newest first, and what is wrong with the others."""
    points, wrong = [], []
    for folder in _folders(run_dir):
        try:
            points.append(read(folder))
        except ValueError as error:
            wrong.append(str(error))
    return sorted(points, key=lambda point: -float(point.state["time"])), wrong


def forget_later(point: Point) -> None:
    """Delete what its run has written after `point`: later steps, and what stands at their end.

    The latest go first, so that one of the run's own is the newest at every moment.
    """
    phase, step = point.state["phase"], point.state["step"]
    ends = {"final"} | ({"warm_start"} if phase == "warm_start" else set())
    later = [
        (_step_of(folder) or float("inf"), folder)
        for folder in _folders(point.run_dir)
        if folder != point.folder and (folder.name in ends or (_step_of(folder) or 0) > step)
    ]
    for _, folder in sorted(later, reverse=True):
        shutil.rmtree(folder)


def _folders(run_dir: Path) -> Iterator[Path]:
    """What has the name of a checkpoint, and `resume/` in it: copies under other names are not."""
    for resume in (*run_dir.glob(f"checkpoints/*/{RESUME}"), *run_dir.glob(f"*/{RESUME}")):
        if resume.parent.name in ("final", "warm_start") or _step_of(resume.parent) is not None:
            yield resume.parent


def _step_of(folder: Path) -> int | None:
    found = re.fullmatch(r"step_(\d+)", folder.name)
    return int(found[1]) if found else None


def _sum(file: Path) -> int:
    value = 0
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return value
