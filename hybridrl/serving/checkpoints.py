"""The checkpoints of clients' models, as files: RUN/models/MODEL/{weights,sampler_weights}/NAME."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hybridrl.serving.requests import Checkpoint, CheckpointPath, Refused

RECORD = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What a checkpoint's folder says of it; times are seconds since 1970."""

    rank: int
    steps: int
    bytes: int
    created: float
    expires: float | None


class CheckpointFiles:
    """The folders of a run's checkpoints. One is there once its record is, which is written last.

    One whose time has passed is none, and its files go where somebody looks for it.
    """

    def __init__(self, run_dir: Path, now: Callable[[], float] = time.time) -> None:
        self._folder, self._now = run_dir / "models", now

    def folder(self, path: CheckpointPath) -> Path:
        """The directory of a checkpoint, which may not be there."""
        return self._folder / path.model / path.kind / path.name

    def begin(self, path: CheckpointPath, overwrite: bool) -> Path:
        """The directory of a checkpoint to be written. Raises Refused for a name that is taken."""
        folder = self.folder(path)
        if self._record(folder) is not None:
            if not overwrite:
                raise Refused(f"{path}: there is a checkpoint of that name")
            (folder / RECORD).unlink()
        folder.parent.mkdir(parents=True, exist_ok=True)
        return folder

    def finish(self, path: CheckpointPath, rank: int, steps: int, ttl_s: float | None) -> None:
        """Say that all other files of a checkpoint are there."""
        folder, now = self.folder(path), self._now()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        self._write(folder, CheckpointRecord(rank, steps, size, now, _end(now, ttl_s)))

    def read(self, path: CheckpointPath) -> CheckpointRecord:
        """The record of a checkpoint. Raises Refused where there is none."""
        if (record := self._record(self.folder(path))) is None:
            raise Refused(f"{path}: there is no such checkpoint")
        return record

    def has(self, path: CheckpointPath) -> bool:
        """Whether there is such a checkpoint."""
        return self._record(self.folder(path)) is not None

    def expire(self, path: CheckpointPath, ttl_s: float | None) -> None:
        """Let a checkpoint go so many seconds from now; None: never."""
        record = asdict(self.read(path))
        self._write(
            self.folder(path), CheckpointRecord(**record | {"expires": _end(self._now(), ttl_s)})
        )

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint. Raises Refused where there is none."""
        self.read(path)
        shutil.rmtree(self.folder(path))

    def all(self, model: str | None) -> tuple[Checkpoint, ...]:
        """The checkpoints of a model, or of all, oldest first."""
        there = [
            Checkpoint(str(path), record.rank, record.bytes, record.created, record.expires)
            for path in self._paths(model or "*")
            if (record := self._record(self.folder(path))) is not None
        ]
        return tuple(sorted(there, key=lambda one: (one.created, one.path)))

    def _paths(self, model: str) -> Iterator[CheckpointPath]:
        for file in self._folder.glob(f"{model}/*weights/*/{RECORD}"):
            owner, kind, name, _ = file.relative_to(self._folder).parts
            yield CheckpointPath.parse(f"tinker://{owner}/{kind}/{name}")

    def _record(self, folder: Path) -> CheckpointRecord | None:
        try:
            record = CheckpointRecord(**json.loads((folder / RECORD).read_text()))
        except FileNotFoundError:
            return None
        if record.expires is not None and record.expires <= self._now():
            shutil.rmtree(folder)
            return None
        return record

    def _write(self, folder: Path, record: CheckpointRecord) -> None:
        partial = folder / f".{RECORD}"
        partial.write_text(json.dumps(asdict(record)))
        partial.replace(folder / RECORD)


def _end(now: float, ttl_s: float | None) -> float | None:
    return None if ttl_s is None else now + ttl_s
