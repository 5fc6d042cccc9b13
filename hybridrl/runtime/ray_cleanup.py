"""Removes Ray's remains: processes, and the temporary directory with its logs."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MARK = "HYBRIDRL_CLUSTER"  # in the environment of every process of a cluster that we started

_EXEC_S = 0.05  # a program that is just being loaded has no environment to read yet


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
    """The processes with `MARK=mark` and their descendants."""
    import psutil

    environments = {process: _environment(process) for process in psutil.process_iter()}
    if {} in environments.values():
        time.sleep(_EXEC_S)
        environments |= {p: _environment(p) for p, known in environments.items() if not known}
    processes = []
    for process, environment in environments.items():
        if environment.get(MARK) == mark:
            with contextlib.suppress(psutil.Error):
                processes += [process, *process.children(recursive=True)]
    return list(dict.fromkeys(processes))


def _environment(process: Any) -> dict[str, str]:
    """The environment of a process; nothing for a zombie, for a foreign one, and during exec."""
    import psutil

    # A zombie has ended, and its parent may never ask for it.
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return dict(process.environ())
    return {}


def keep_logs(temp: Path, logs: Path) -> None:
    """Copy the workers' output to `logs`, and delete Ray's temporary directory."""
    with contextlib.suppress(OSError):  # a full disk has been reported, or will be
        logs.mkdir(parents=True, exist_ok=True)
        for file in temp.glob("session_2*/logs/worker-*"):
            if file.suffix in (".out", ".err") and file.stat().st_size:
                shutil.copy(file, logs)
    shutil.rmtree(temp, ignore_errors=True)
