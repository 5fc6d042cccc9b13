"""The command of a run as a process, seen from outside: what its ranks are in, how it ends.

It and its ranks are forked by a server that has imported all they need, so that a start takes a
second. What they leave behind becomes a child of this process, the first one of its namespace.
"""

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import psutil
from chaos.cases import ENDED, STARTS

from hybridrl.runtime.process_launcher import FORK_SERVER_IMPORTS
from hybridrl.system import activity
from hybridrl.system.activity import Activity
from hybridrl.telemetry.records import read_lines

POLL_S = 0.002
LEFT_S, LEFT_OF_RAY_S = 15.0, 150.0
"""How long processes may outlive a driver; those of Ray after the death of the raylet, or of the
driver by SIGKILL: Ray's agents try for a minute to tell a server that is gone of the death.
"""
_PRELOAD = [
    *FORK_SERVER_IMPORTS, "hybridrl.cli", "hybridrl.driver.train", "torch.distributed.fsdp",
    "hybridrl.workers.worker_factory", "transformers.models.qwen3.modeling_qwen3", "hydra.main",
]  # fmt: skip


def start_server() -> None:
    """Start the server."""
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


def drive(address: str, folder: Path, log: Path, args: Sequence[str]) -> None:
    """`hybridrl train ...` in this process, whose ranks the server at `address` forks as well."""
    gc.freeze()
    gc.enable()
    os.setsid()
    os.chdir(folder)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    server: Any = forkserver._forkserver
    server._forkserver_address = address
    server.ensure_running = forkserver.ensure_running = lambda: None
    sys.argv = ["hybridrl", "train", *args]
    from hybridrl.cli import main

    main(["train", *args])


@dataclass
class Records:
    """The steps in the records of a run; the file is read again when it has grown or shrunk."""

    run_dir: Path
    _size: int = -1
    _steps: int = 0

    def steps(self) -> int:
        """How many steps have been recorded."""
        file = self.run_dir / "metrics.jsonl"
        with suppress(OSError, ValueError):
            if (size := file.stat().st_size) != self._size:
                rows = read_lines(file)
                self._steps = max((row["step"] for row in rows if row["phase"] == "rl"), default=0)
                self._size = size
        return self._steps


@dataclass
class Attempt:
    """A process of the command, until it has ended. `look` is called at each poll."""

    run_dir: Path
    log: Path
    args: Sequence[str]
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.records = Records(self.run_dir)
        self.up: set[int] = set()
        context: Any = multiprocessing.get_context("forkserver")
        address = forkserver._forkserver._forkserver_address
        arguments = (address, self.run_dir.parent, self.log, self.args)
        self.process = context.Process(target=drive, args=arguments)
        self.process.start()

    def activity(self, rank: int) -> Activity | None:
        """What a rank is in."""
        return activity.read(activity.file_of(self.run_dir, rank))

    def call(self, rank: int) -> str:
        """The call that a rank is in, "" between two of them."""
        activity = self.activity(rank)
        if activity is not None:
            self.up.add(rank)
            return activity.call
        return ENDED if rank in self.up else STARTS

    def watch(self, look: Callable[[], None], within_s: float) -> int | None:
        """Its exit code; None where it has not ended within so many seconds."""
        end = self.begun + within_s
        while time.monotonic() < end:
            look()
            self.process.join(POLL_S)
            if self.process.exitcode is not None:
                return int(self.process.exitcode)
        return None

    def states(self, ranks: int) -> list[str]:
        """What each rank is in, in words."""
        return [f"rank {rank}: {self.activity(rank)}" for rank in range(ranks)]

    @property
    def said(self) -> str:
        """What it has printed."""
        return self.log.read_text() if self.log.exists() else ""


def left_behind(within_s: float) -> list[str]:
    """Commands of processes that a run leaves for so many seconds; they are then killed."""
    end = time.monotonic() + within_s
    while (left := _others()) and time.monotonic() < end:
        time.sleep(0.05)
    commands = []
    for process in left:
        with suppress(psutil.Error):
            commands.append(
                f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:80]}"
            )
            process.kill()
    return commands


def _others() -> list[psutil.Process]:
    """All processes below this one but those of multiprocessing; zombies are reaped."""
    others = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            own = process.ppid() == os.getpid()
            if process.status() == psutil.STATUS_ZOMBIE:  # which has no command line
                if own:
                    with suppress(ChildProcessError):
                        os.waitpid(process.pid, os.WNOHANG)
            elif not (own and "multiprocessing." in " ".join(process.cmdline())):
                others.append(process)
    return others
