"""The checkpoints of clients' models, as files: RUN/models/MODEL/{weights,sampler_weights}/NAME."""

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hybridrl.checkpoint import folder as folders
from hybridrl.serving.requests import Checkpoint, CheckpointPath, Refused

logger = logging.getLogger(__name__)

RECORD = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """What a checkpoint's folder says of it; times are seconds since 1970.

    `base` is the name of the base model, and `trained` says which of its weights were trained, as
    `ServedModel` has them. `bytes` is the size of its files.
    """

    base: str
    trained: str
    rank: int
    steps: int
    created: float
    expires: float | None
    bytes: int = 0


class CheckpointFiles:
    """The folders of a run's checkpoints. Invariant: one under its own name is whole.

    It is written under a hidden name and then renamed (`checkpoint.folder`). One whose time has
    passed is none, and its files go where somebody looks for it.
    """

    def __init__(self, run_dir: Path, now: Callable[[], float] = time.time) -> None:
        self._folder, self._now = run_dir / "models", now

    def folder(self, path: CheckpointPath) -> Path:
        """The directory of a checkpoint, which may not be there."""
        return self._folder / path.model / path.kind / path.name

    def record(
        self, base: str, trained: str, rank: int, steps: int, ttl_s: float | None
    ) -> CheckpointRecord:
        """The record of a checkpoint of this moment, which may go after `ttl_s` seconds."""
        now = self._now()
        return CheckpointRecord(base, trained, rank, steps, now, _end(now, ttl_s))

    @contextmanager
    def writing(
        self, path: CheckpointPath, record: CheckpointRecord, overwrite: bool
    ) -> Iterator[Path]:
        """Within, a checkpoint is written to this directory, and then it is there with `record`.

        After an error nothing of it is left, and an older one of that name stays. Raises Refused
        for a name that is taken, and where files cannot be written.
        """
        folder = self.folder(path)
        if not overwrite and (self.has(path) or folder.exists()):
            raise Refused(f"{path}: there is a checkpoint of that name")
        hidden = folders.hidden(folder)
        try:
            with _writes(path):
                folders.clear(folder)
                folder.parent.mkdir(parents=True, exist_ok=True)
            yield hidden
            with _writes(path):
                size = sum(file.stat().st_size for file in hidden.rglob("*") if file.is_file())
                self._write(hidden, replace(record, bytes=size))
                folders.replace(hidden, folder)
        finally:
            folders.clear(folder)

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
        record = replace(self.read(path), expires=_end(self._now(), ttl_s))
        self._write(self.folder(path), record)

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
            if not name.startswith("."):  # one that is being written, or replaced
                yield CheckpointPath.parse(f"tinker://{owner}/{kind}/{name}")

    def _record(self, folder: Path) -> CheckpointRecord | None:
        try:
            record = CheckpointRecord(**json.loads((folder / RECORD).read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is passed over: its %s cannot be read: %s", folder, RECORD, error)
            return None
        if record.expires is not None and record.expires <= self._now():
            shutil.rmtree(folder, ignore_errors=True)
            return None
        return record

    def _write(self, folder: Path, record: CheckpointRecord) -> None:
        partial = folder / f".{RECORD}"
        partial.write_text(json.dumps(asdict(record)))
        partial.replace(folder / RECORD)


@contextmanager
def _writes(path: CheckpointPath) -> Iterator[None]:
    """Within, an error of the file system refuses the checkpoint."""
    try:
        yield
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error}") from error


def _end(now: float, ttl_s: float | None) -> float | None:
    return None if ttl_s is None else now + ttl_s
