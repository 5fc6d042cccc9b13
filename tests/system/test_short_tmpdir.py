"""A long TMPDIR gets a short name, below which sockets have room, or is named."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybridrl.config import ConfigError
from hybridrl.system import short_tmpdir

IN_A_PROCESS = """
import multiprocessing, os, socket, tempfile
from multiprocessing.managers import SyncManager
from hybridrl.system.short_tmpdir import shorten_tmpdir

def put(queue):
    queue.put(os.environ["TMPDIR"])

if __name__ == "__main__":
    shorten_tmpdir()
    shorten_tmpdir()  # of a second run, which has it
    queue = multiprocessing.get_context("forkserver").Queue()  # its server listens on a socket
    process = multiprocessing.get_context("forkserver").Process(target=put, args=(queue,))
    process.start()
    print(queue.get())
    process.join()
    with SyncManager() as manager:  # as a judge of the user's may start
        print(len(os.path.dirname(manager.address)))
    with tempfile.NamedTemporaryFile(delete=False) as file:
        print(os.path.realpath(file.name))
"""


@pytest.fixture
def long(tmp_path: Path) -> Path:
    folder = tmp_path / ("a-folder-of-a-cluster-" * 5)
    folder.mkdir()
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        socket.socket(socket.AF_UNIX).bind(str(folder / "socket"))
    return folder


def test_sockets_have_room_and_files_stay_where_the_user_wants_them(long: Path) -> None:
    code = long.parent / "main.py"
    code.write_text(IN_A_PROCESS)
    env = {**os.environ, "TMPDIR": str(long)}
    done = subprocess.run([sys.executable, code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    link, _, file = done.stdout.splitlines()
    assert len(link) <= short_tmpdir.MOST_BYTES
    assert Path(file).parent == long
    assert not Path(link).parent.exists(), "the link goes with its process"
    assert [path.name for path in long.iterdir()] == [Path(file).name], "nothing is left there"
    assert done.stderr == ""


def test_a_short_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_tmpdir.tempfile, "tempdir", "/tmp")
    monkeypatch.setenv("TMPDIR", "/tmp")
    short_tmpdir.shorten_tmpdir()
    assert os.environ["TMPDIR"] == short_tmpdir.tempfile.gettempdir() == "/tmp"


def test_it_is_named_where_no_link_can_be(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_tmpdir.tempfile, "tempdir", str(long))
    monkeypatch.setattr(short_tmpdir, "PLACES", ("/proc/none", "/no/such/folder"))
    with pytest.raises(ConfigError, match=rf"^TMPDIR={long}: wanted at most 30 bytes.* have 107"):
        short_tmpdir.shorten_tmpdir()


def test_rays_longest_socket_has_room_below_the_longest_name() -> None:
    assert short_tmpdir.__doc__ is not None
    name = short_tmpdir.__doc__.split("`")[1]
    assert name.startswith("hrl12345678/session_")
    assert short_tmpdir.MOST_BYTES + len(f"/{name}") <= 107
