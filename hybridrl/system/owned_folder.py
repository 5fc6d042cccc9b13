"""A folder that belongs to one process, as long as it lives.

The owner holds a lock of the operating system on a file in it, which no kill leaves behind. So two
runs do not write to one directory, and what a killed process has left in the temporary folder is
told from what another one uses.
"""

import fcntl
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

logger = logging.getLogger(__name__)

LOCK = ".lock"
"""The file in the folder: its owner's process and host."""
ENDING_S = 10.0
"""How long a new owner waits: what a killed driver has forked holds its lock until it ends."""
_POLL_S, _FRESH_S = 0.05, 60.0


class FolderInUse(Exception):
    """Another process owns the folder; its text says which."""


@contextmanager
def owned(folder: Path, wait_s: float | None = None) -> Iterator[None]:
    """Own `folder`, which is made, until the context ends or this process does.

    A file system without locks gives a warning. Raises FolderInUse where another process owns it
    for `wait_s` (`ENDING_S`) longer, OSError where nothing can be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        _wait_for_lock(file, ENDING_S if wait_s is None else wait_s)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def check_free(folder: Path) -> None:
    """Raise FolderInUse where another process owns `folder` for `ENDING_S` longer."""
    with suppress(OSError), (folder / LOCK).open("r+") as file:
        _wait_for_lock(file, ENDING_S)


@contextmanager
def temporary_folder(place: Path, prefix: str) -> Iterator[Path]:
    """An own folder in `place`, removed on exit; what killed processes have left goes, too."""
    remove_abandoned(place, prefix)
    with TemporaryDirectory(prefix=prefix, dir=place) as name, owned(Path(name)):
        yield Path(name)


def remove_abandoned(
    place: Path, prefix: str, before: Callable[[Path], None] | None = None
) -> None:
    """Remove the folders `prefix`... in `place` whose owner has been killed; each `before` that.

    Those that never had an owner stay, and what is written to at the moment, or another user's.
    """
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError), (folder / LOCK).open("r+") as file:
            if time.time() - folder.stat().st_mtime < _FRESH_S:  # its owner may be about to lock it
                continue
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if before is not None:
                before(folder)
            shutil.rmtree(folder)


def _wait_for_lock(file: IO[str], wait_s: float) -> None:
    end = time.monotonic() + wait_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() >= end:
                file.seek(0)
                raise FolderInUse(file.read() or "another process") from error
            time.sleep(_POLL_S)
        except OSError as error:  # a network file system without locks
            logger.warning("%s cannot be locked (%s): no other run may use it", file.name, error)
            return None
