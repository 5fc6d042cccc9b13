"""A process of `hybridrl serve`, as its users start it, and a process of a client's program."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


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

    @property
    def exported(self) -> dict[str, str]:
        """The environment of a client, as the second line says it."""
        return dict(word.split("=") for word in self.second.split()[1:])


class SdkProgram:
    """A process of one of the programs of `sdk_program.py`, in an environment with Tinker's SDK."""

    def __init__(self, name: str, served: Served, python: str | Path = sys.executable) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name("sdk_program.py")), name],
            env={**os.environ, **served.exported, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=self._errors,  # a pipe that nobody reads may fill
            text=True,
        )

    @property
    def errors(self) -> str:
        """What it has written to standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def line(self) -> str:
        """The next line that it prints. Raises AssertionError where there is none."""
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            self.process.wait()
            raise AssertionError(self.errors)
        return line.strip()

    def ended(self) -> Any:
        """Wait for its end; what the program has ended with."""
        output, _ = self.process.communicate(timeout=600)
        assert self.process.returncode == 0, self.errors
        return json.loads(output.splitlines()[-1])

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
