"""A process of `hybridrl serve`, as its users start it."""

import select
import signal
import subprocess
import sys
from pathlib import Path


class Served:
    """A process of `hybridrl serve`, with the two lines that it prints once it is up."""

    def __init__(self, folder: Path, *settings: str, cwd: Path | None = None) -> None:
        command = [sys.executable, "-m", "hybridrl.cli", "serve", *settings, f"run.dir={folder}"]
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that its group is its own
        )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 300)
        self.first = self.process.stdout.readline() if ready else ""
        self.second = self.process.stdout.readline() if self.first else ""
        if not self.second:
            self.process.kill()
            raise AssertionError(self.process.communicate())

    def end(self) -> tuple[int, str]:
        """Send SIGTERM; the exit code, and what it has written to standard error."""
        self.process.send_signal(signal.SIGTERM)
        _, errors = self.process.communicate(timeout=120)
        return self.process.returncode, errors

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
