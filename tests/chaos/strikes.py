"""How each fault strikes a run that is under way. Needs root for what befalls its disk."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from chaos.cases import Fault, Kind

from hybridrl.checkpoint import folder
from hybridrl.system import activity

DISK_MB = 48  # a run takes 3
STOPPED_S = 3.0
_SPARE_BYTES = 300_000


class Disk:
    """The small file system of a run directory; what befell it can be undone."""

    def __init__(self, place: Path) -> None:
        place.mkdir(parents=True)
        self.place, self.run_dir = place, place / "run"
        self.filler = place / "filler"
        _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", place)
        self._read_only = False

    def fill(self, spare: int) -> None:
        """Leave so many bytes free, rounded to pages, at most."""
        with self.filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(65536))
            except OSError:
                file.truncate(max(0, file.tell() - spare))

    def make_read_only(self) -> bool:
        """What is open for writing stays so; nothing in the run directory can be made or opened.

        Gives False where it is so already: a second mount would outlive `mend`.
        """
        if self._read_only:
            return False
        self.run_dir.mkdir(exist_ok=True)
        _run("mount", "--bind", self.run_dir, self.run_dir)
        _run("mount", "-o", "remount,bind,ro", self.run_dir)
        self._read_only = True
        return True

    def mend(self) -> None:
        """Undo it."""
        self.filler.unlink(missing_ok=True)
        if self._read_only:
            _run("umount", "-l", self.run_dir)
            self._read_only = False

    def close(self) -> None:
        self.mend()
        _run("umount", "-l", self.place)
        self.place.rmdir()


def strike(fault: Fault, driver: int, disk: Disk) -> str:
    """Let a fault befall the run; gives what it struck, or "" where that is not there (any more).

    The files of a checkpoint are `damage`d once the driver has ended.
    """
    kind, run_dir = fault.kind, disk.run_dir
    if kind is Kind.FULL_DISK:
        disk.fill(spare := int(fault.share * _SPARE_BYTES))
        return f"{spare} bytes are free"
    if kind is Kind.READ_ONLY:
        return run_dir.name if disk.make_read_only() else ""
    if kind is Kind.KILL_SANDBOX:
        pids = sandboxes(driver, run_dir)
        return _signal(pids[int(fault.share * len(pids))], signal.SIGKILL) if pids else ""
    if kind is Kind.KILL_RAYLET:
        pids = raylets(driver)
        return _signal(pids[0], signal.SIGKILL) if pids else ""
    if kind in (Kind.KILL_RANK, Kind.STOP_RANK):
        rank = activity.read(activity.file_of(run_dir, fault.rank))
        number = signal.SIGKILL if kind is Kind.KILL_RANK else signal.SIGSTOP
        return "" if rank is None else _signal(rank.pid, number)
    if kind is Kind.STOP_DRIVER:
        stopped = _signal(driver, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        return stopped and _signal(driver, signal.SIGCONT)
    return _signal(driver, signal.SIGTERM if kind is Kind.TERMINATE else signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Damage:
    """A damaged file, its bytes before, and whether it is in the only checkpoint."""

    file: Path
    before: bytes
    at: int
    is_only: bool

    def undo(self) -> None:
        """Write what was there."""
        self.file.write_bytes(self.before)


def damage(fault: Fault, run_dir: Path) -> Damage | None:
    """Damage a file that the run resumes from: of its newest checkpoint, or a record.

    Gives None where there is none.
    """
    points, _ = folder.search(run_dir)
    if fault.kind is Kind.TEAR_RECORD:
        kept = points[0].state["records"] if points else {}
        files = sorted(x for x in run_dir.glob("*.jsonl") if x.stat().st_size > kept.get(x.name, 0))
    else:
        files = sorted(x for x in points[0].tensors.rglob("*") if x.is_file()) if points else []
    if not files:
        return None
    place = fault.share * len(files)
    file, share = files[int(place)], place % 1
    before = file.read_bytes()
    data, at = bytearray(before), int(share * len(before))
    if fault.kind is Kind.TEAR_RECORD:  # a line that came after the checkpoint, as each write is
        start = data.rindex(b"\n", 0, -1) + 1 if data.count(b"\n") > 1 else 0
        at = start + int(share * (len(data) - start))
    if fault.kind is Kind.FLIP_BIT:
        data[at] ^= 1 << int(share * 1e6) % 8
    else:
        del data[at:]
    file.write_bytes(data)
    return Damage(file, before, at, fault.kind is not Kind.TEAR_RECORD and len(points) == 1)


def sandboxes(driver: int, run_dir: Path) -> list[int]:
    """Processes that run judges or environments for a run."""
    ranks = (activity.read(file) for file in sorted((run_dir / activity.FOLDER).glob("?????")))
    pids = set()
    for parent in (driver, *(rank.pid for rank in ranks if rank is not None)):
        with suppress(psutil.Error):
            children = psutil.Process(parent).children()
            pids |= {child.pid for child in children if "hybridrl.sandbox" in child.cmdline()}
    return sorted(pids)


def raylets(driver: int) -> list[int]:
    """The raylet of the cluster that a driver has started, if it is there."""
    with suppress(psutil.Error):
        children = psutil.Process(driver).children()
        return [child.pid for child in children if child.name() == "raylet"]
    return []


def is_stopped(pid: int) -> bool:
    """Whether a process is there, and stopped."""
    with suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _signal(pid: int, number: signal.Signals) -> str:
    """Send it; gives whom it has reached."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return ""
    return f"process {pid}"


def _run(*command: object) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, check=False, text=True)
    if done.returncode:
        raise OSError(0, f"{' '.join(words)}: {done.stderr.strip()}")
