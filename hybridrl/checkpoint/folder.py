"""Checkpoint folders: atomic publication, search, and checks of completeness.

A checkpoint is a Hugging Face directory with `resume/` in it: the ranks' files
(`checkpoint.distributed`), and `state.json`, the driver's state. It lists these files with sizes
and checksums (zlib's CRC-32), and has one of what is in itself.

Invariant: a folder under its own name is complete. It is written under a hidden name
(`.step_000010.new`), and renamed when it is complete; an earlier folder stays until then.
"""

import contextlib
import ctypes
import errno
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from hybridrl.telemetry.log import logged

logger = logging.getLogger(__name__)

RESUME, STATE, FORMAT = "resume", "state.json", 1

_SUM = ".crc32"  # written with a file by its rank, until the driver copies it to STATE
_STATE_SUM = "sum"  # of all else in STATE; earlier versions wrote none
_WRITTEN = ".written_"  # a rank's mark that its files are there, until `seal`
_READ_BYTES = 2**24
_AT_WORKING_DIR, _EXCHANGE = -100, 2  # of renameat2(2)
_ENDS = ("final", "warm_start")  # of phases; the other checkpoints are named by their step
_NUMBER: tuple[type, ...] = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "files": dict, "sums": dict, "time": _NUMBER, "step": int, "phase": str, "settings": dict,
    "scores": dict, "roles": dict, "records": dict, "prompts": int, "bad_steps": int,
    "evaluated": list, "before": dict, "recipe": dict, "schedule": dict,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a run to resume from: its checkpoint, and the driver's `state` in it."""

    folder: Path
    state: dict[str, Any]

    @property
    def tensors(self) -> Path:
        """The folder of the ranks' files."""
        return self.folder / RESUME

    @property
    def run_dir(self) -> Path:
        """The directory of its run."""
        return run_dir_of(self.folder)


def hidden(path: Path) -> Path:
    """The name under which the checkpoint `path` is written until it is complete."""
    return path.with_name(f".{path.name}.new")


def clear(path: Path) -> None:
    """Delete the incomplete checkpoint that a killed run has left for `path`."""
    shutil.rmtree(hidden(path), ignore_errors=True)


def note_sum(file: Path) -> None:
    """Write the checksum of `file`, which this process has just written, for `seal`."""
    file.with_name(file.name + _SUM).write_text(str(_sum(file)))


def mark_written(folder: Path) -> None:
    """Say that all files of this rank are in `folder`, for `num_written`.

    Where even that finds no room, or the folder is gone with an incomplete checkpoint, the mark is
    missing, and whoever ends the checkpoint waits for the rank.
    """
    with contextlib.suppress(OSError):
        (folder / f"{_WRITTEN}{uuid4().hex}").touch()


def num_written(path: Path) -> int:
    """The ranks that have written all of their files of the incomplete checkpoint for `path`."""
    return sum(1 for _ in (hidden(path) / RESUME).glob(f"{_WRITTEN}*"))


def seal(path: Path, state: Mapping[str, Any]) -> None:
    """Write the driver's `state` into `hidden(path)`, with sizes and sums of the ranks' files."""
    resume, sums = hidden(path) / RESUME, {}
    for mark in resume.glob(f"{_WRITTEN}*"):
        mark.unlink()
    for note in resume.rglob(f"*{_SUM}"):
        sums[str(note.relative_to(resume)).removesuffix(_SUM)] = int(note.read_text())
        note.unlink()
    files = sorted(file for file in resume.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(resume)): file.stat().st_size for file in files}
    state = {**state, "format": FORMAT, "files": sizes, "sums": sums}
    with (resume / STATE).open("w") as file:
        json.dump({**state, _STATE_SUM: _sum_of(state)}, file)
        file.flush()
        os.fsync(file.fileno())


def cause_of(error: BaseException) -> tuple[int, str]:
    """The number and the text of the operating system's error behind that of a library.

    torch's writers fail in their own way once a write has: "unexpected pos 704 vs 598". Those of
    safetensors have it in their text: "No space left on device (os error 28)".
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno, cause.strerror or str(cause)
        if told := re.search(r"\(os error (\d+)\)", str(cause)):
            return int(told[1]), os.strerror(int(told[1]))
        cause = cause.__cause__ or cause.__context__
    return errno.EIO, " ".join(str(error).split())


def write_error(error: BaseException, path: Path) -> OSError:
    """What to raise for an `error` of writing the checkpoint at `path`."""
    code, reason = cause_of(error)
    return OSError(code, f"the checkpoint could not be written: {reason}", str(path))


def replace(source: Path, target: Path) -> None:
    """Rename the directory `source` to `target`; an old `target` is deleted unless that fails.

    At no moment is `target` missing, except on file systems that cannot exchange names (NFS).
    """
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():  # a directory that is not empty cannot be renamed over
        if _exchange(source, target):
            shutil.rmtree(source, ignore_errors=True)
            return
        target.rename(old)
    try:
        source.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two directories at once; False where the file system cannot."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    names = (os.fsencode(one), os.fsencode(other))
    if function(_AT_WORKING_DIR, names[0], _AT_WORKING_DIR, names[1], _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(one))


def run_dir_of(folder: Path) -> Path:
    """The run directory of a checkpoint."""
    return folder.parent.parent if folder.parent.name == "checkpoints" else folder.parent


def read(folder: Path) -> Point:
    """The checkpoint at `folder`; raises ValueError, with the reason, for an incomplete one.

    Only the sizes of the ranks' files are checked: `changed` reads them.
    """
    file = folder / RESUME / STATE
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"{file}: {reason}") from None
    # the driver's state
    if not isinstance(state, dict):
        raise ValueError(f"{file}: {str(state)[:40]}, wanted an object")
    if state.get("format") != FORMAT:
        raise ValueError(f"{file}: format {state.get('format')}, wanted {FORMAT}")
    wrong = [key for key, kind in _KINDS.items() if not isinstance(state.get(key), kind)]
    if wrong:
        raise ValueError(f"{file}: no {', '.join(wrong)} in it")
    # the ranks' files
    for name, size in state["files"].items():
        rank_file = folder / RESUME / name
        actual = rank_file.stat().st_size if rank_file.is_file() else None
        if actual != size:
            problem = "is not there" if actual is None else f"has {actual} bytes of {size}"
            raise ValueError(f"{rank_file}: {problem}")
    return Point(folder, state)


def changed(point: Point) -> str:
    """An error about the first of the files with changed bytes, or ""; reads all files."""
    state = {key: value for key, value in point.state.items() if key != _STATE_SUM}
    if point.state.get(_STATE_SUM, wanted := _sum_of(state)) != wanted:
        return f"{point.tensors / STATE}: not what was written"
    sums: dict[str, int] = point.state["sums"]
    with ThreadPoolExecutor() as threads, logged(logger, f"check of {point.tensors}"):
        actual_sums = threads.map(_sum, [point.tensors / name for name in sums])
        for (name, wanted), actual in zip(sums.items(), actual_sums, strict=True):
            if actual != wanted:
                return f"{point.tensors / name}: not the bytes that were written"
    return ""


def search(run_dir: Path) -> tuple[list[Point], list[str]]:
    """The complete checkpoints of a run, the newest first, and the errors of the others."""
    points, wrong = [], []
    for folder in _folders(run_dir):
        try:
            points.append(read(folder))
        except ValueError as error:
            wrong.append(str(error))
    return sorted(points, key=lambda point: -float(point.state["time"])), wrong


def to_keep(scores: Mapping[int, float | None], keep_last: int) -> set[int]:
    """Steps whose checkpoints stay: the best and the last `keep_last`.

    `scores` maps the step of every checkpoint to its held-out score (higher is better), or None if
    it was not evaluated. Of equal scores the earliest is the best.
    """
    steps = sorted(scores)
    kept = set(steps[max(0, len(steps) - keep_last) :])
    evaluated = [step for step in steps if scores[step] is not None]
    if evaluated:
        kept.add(max(evaluated, key=lambda step: (scores[step], -step)))
    return kept


def forget_later(point: Point) -> None:
    """Delete the run's checkpoints after `point`: later steps, and the final ones.

    The latest are deleted first, so that the newest one is valid at every moment.
    """
    phase, step = point.state["phase"], point.state["step"]
    ends = {"final"} | ({"warm_start"} if phase == "warm_start" else set())
    later = [
        (_step_of(folder) or float("inf"), folder)
        for folder in _folders(point.run_dir)
        if folder != point.folder and (folder.name in ends or (_step_of(folder) or 0) > step)
    ]
    for _, folder in sorted(later, reverse=True):
        logger.info("deleting %s, later than %s", folder, point.folder)
        shutil.rmtree(folder)


def _folders(run_dir: Path) -> Iterator[Path]:
    """Folders with the name of a checkpoint, and `resume/` in them; no copies of other names."""
    for resume in (*run_dir.glob(f"checkpoints/*/{RESUME}"), *run_dir.glob(f"*/{RESUME}")):
        if resume.parent.name in _ENDS or _step_of(resume.parent) is not None:
            yield resume.parent


def _step_of(folder: Path) -> int | None:
    match = re.fullmatch(r"step_(\d+)", folder.name)
    return int(match[1]) if match else None


def _sum_of(state: Mapping[str, Any]) -> int:
    """The checksum of the driver's state, whose text is the same once it has been read."""
    return zlib.crc32(json.dumps(state).encode())


def _sum(file: Path) -> int:
    value = 0
    with file.open("rb") as opened:
        while data := opened.read(_READ_BYTES):
            value = zlib.crc32(data, value)
    return value
