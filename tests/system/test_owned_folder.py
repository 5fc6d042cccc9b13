"""A folder has one owner; a killed owner's can be taken, or removed, at once."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridrl.system.owned_folder import FolderInUse, owned, remove_abandoned

OWNER = """
import sys, time
from pathlib import Path
from hybridrl.system.owned_folder import owned
with owned(Path(sys.argv[1])):
    print("owned", flush=True)
    time.sleep(600)
"""


@contextmanager
def owner_of(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns `folder`."""
    command = [sys.executable, "-c", OWNER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        try:
            yield process
        finally:
            process.kill()


def kill(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_another_process_is_named_until_it_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with owner_of(folder) as process:
        with pytest.raises(FolderInUse, match=f"^process {process.pid} on "), owned(folder, 0.0):
            pass
        kill(process)
        with owned(folder, 0.0):
            assert (folder / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    with owned(folder, 0.0):  # again, after an ordinary end
        pass


def test_only_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "hrl-foreign").mkdir()
    with owner_of(tmp_path / "hrl-used") as used, owner_of(tmp_path / "hrl-left") as left:
        kill(left)
        remove_abandoned(tmp_path, "hrl")
        assert (tmp_path / "hrl-left").exists()  # it may be that of an owner about to lock it
        minutes_ago = time.time() - 600
        for folder in tmp_path.iterdir():
            os.utime(folder, (minutes_ago, minutes_ago))
        ended: list[Path] = []
        remove_abandoned(tmp_path, "hrl", ended.append)
        assert ended == [tmp_path / "hrl-left"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["hrl-foreign", "hrl-used"]
        assert used.poll() is None


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    with owned(tmp_path):
        pass
    assert "cannot be locked ([Errno 95] Operation not supported)" in caplog.text
