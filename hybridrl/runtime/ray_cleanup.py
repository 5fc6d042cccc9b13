"""Removes Ray's remains: processes, and the temporary directory with its logs."""

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MARK = "HYBRIDRL_CLUSTER"  # in the environment of every process of a cluster that we started


@contextmanager
def no_process_stays(mark: str) -> Iterator[None]:
    """On exit, `kill_marked(mark)`."""
    try:
        yield
    finally:
        kill_marked(mark)


def kill_marked(mark: str) -> None:
    """Kill every process whose environment has `MARK=mark`, with its descendants.

    All processes of Ray inherit it, orphans too; Ray's agents overwrite theirs with a title. A
    process may start another while it is being killed, hence several rounds.
    """
    import psutil

    for _ in range(5):
        ours = _marked(mark)
        for process in ours:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(ours, timeout=5)
        if not ours:
            break


def _marked(mark: str) -> list[Any]:
    import psutil

    processes = []
    for process in psutil.process_iter():
        # A zombie has no environment: it has ended, and its parent may never ask for it.
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                processes += [process, *process.children(recursive=True)]
    return list(dict.fromkeys(processes))


def keep_logs(temp: Path, logs: Path) -> None:
    """Copy the workers' output to `logs`, and delete Ray's temporary directory."""
    with contextlib.suppress(OSError):  # a full disk has been reported, or will be
        logs.mkdir(parents=True, exist_ok=True)
        for file in temp.glob("session_2*/logs/worker-*"):
            if file.suffix in (".out", ".err") and file.stat().st_size:
                shutil.copy(file, logs)
    shutil.rmtree(temp, ignore_errors=True)
