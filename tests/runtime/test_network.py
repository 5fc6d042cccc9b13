"""Two nodes with addresses of their own on one machine; one is cut off from the other."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

BRIDGE, PORT = "hrlbridge", 6399
PROGRAMS = Path(sys.executable).parent


def address(node: int) -> str:
    return f"10.77.0.{node}"


class TwoNodes:
    """Network namespaces `hrl1` and `hrl2` on a bridge, each with a host name and a Ray node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Nodes whose names resolve to the loopback device want to be told theirs: `doctor` says so.
        self.env = os.environ | {
            "GLOO_SOCKET_IFNAME": "eth0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32,
            "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "HYBRIDRL_TEST": str(folder),
        }  # fmt: skip

    def __enter__(self) -> "TwoNodes":
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for node in (1, 2):
            name, wire = f"hrl{node}", f"hrlwire{node}"
            ip("netns", "add", name)
            ip("link", "add", wire, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", wire, "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{address(node)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", name, "link", "set", device, "up")
        self.temp = tempfile.mkdtemp(prefix="hrlnet")  # short: sockets lie below it
        self.ray(1, "--head", f"--port={PORT}", "--include-dashboard=false",
                 f"--temp-dir={self.temp}")  # fmt: skip
        self.ray(2, f"--address={address(1)}:{PORT}")
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        shutil.rmtree(self.temp, ignore_errors=True)
        ip("link", "del", BRIDGE)
        for node in (1, 2):
            ip("link", "del", f"hrlwire{node}")
            ip("netns", "del", f"hrl{node}")

    def start(self, node: int, command: Sequence[object], log: str) -> subprocess.Popen[bytes]:
        """A process on a node, which has a name of its own."""
        named = f'hostname node{node} && exec "$@"'
        inside = ["ip", "netns", "exec", f"hrl{node}", "unshare", "--uts", "sh", "-c", named, "sh"]
        with (self.folder / log).open("w") as file:
            return subprocess.Popen(
                [*inside, *map(str, command)],
                env=self.env, cwd=self.folder, stdout=file, stderr=file, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip

    def ray(self, node: int, *options: str) -> None:
        """Start a node's Ray, and wait until it is there."""
        common = ["--num-cpus=1", "--object-store-memory=100000000", "--disable-usage-stats"]
        where = [f"--node-ip-address={address(node)}", "--block"]
        log = f"ray{node}.log"
        self.start(node, [PROGRAMS / "ray", "start", *where, *common, *options], log)
        wait_for(lambda: "Ray runtime started" in (self.folder / log).read_text(), 60)

    def end(self, node: int | None = None) -> None:
        """End what runs on a node, or on both."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                environment = process.environ()
                mine = environment.get("HYBRIDRL_TEST") == str(self.folder)
                if mine and (node is None or on(node, process.pid)):
                    process.kill()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def on(node: int, pid: int) -> bool:
    return os.stat(f"/proc/{pid}/ns/net").st_ino == os.stat(f"/run/netns/hrl{node}").st_ino


def wait_for(condition: Callable[[], bool], timeout: float) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "the moment never came"
        time.sleep(0.2)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[TwoNodes]:
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces want root, and iproute2's ip")
    with TwoNodes(tmp_path) as running:
        yield running


def lines(run_dir: Path) -> list[dict[str, Any]]:
    file = run_dir / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_is_cut_off_is_named_and_the_run_goes_on(
    nodes: TwoNodes, small: list[str], tmp_path: Path
) -> None:
    """Nothing is closed when a cable is pulled: what was sent is never answered."""
    run_dir = tmp_path / "run"
    command = [
        PROGRAMS / "hybridrl", "train", *small, f"cluster.address={address(1)}:{PORT}",
        "cluster.ranks=2", f"run.dir={run_dir}", "trainer.resume=auto", "trainer.save_every=1",
        "trainer.optim.schedule=constant", "eval.sets.main.every=null",
    ]  # fmt: skip
    run = nodes.start(1, [*command, "trainer.steps=1000"], "run.log")
    wait_for(lambda: len(lines(run_dir)) > 3 or run.poll() is not None, 240)
    said = (tmp_path / "run.log").read_text()
    assert run.poll() is None, said
    nodes = json.loads((run_dir / "environment.json").read_text())["nodes"]
    assert {node["host"] for node in nodes} == {"node1", "node2"}

    ip("link", "set", "hrlwire2", "down")
    cut = time.monotonic()
    assert run.wait(timeout=180) == 1
    print(f"named {time.monotonic() - cut:.0f} s after the cut")
    said = (tmp_path / "run.log").read_text().splitlines()[-1]
    assert "on node node2" in said, said

    nodes.end(2)
    ip("link", "set", "hrlwire2", "up")
    nodes.ray(2, f"--address={address(1)}:{PORT}")
    done = max(line["step"] for line in lines(run_dir))
    again = nodes.start(1, [*command, f"trainer.steps={done + 3}"], "again.log")
    assert again.wait(timeout=240) == 0, (tmp_path / "again.log").read_text()
    began = re.search(r"continuing after step (\d+)", (tmp_path / "again.log").read_text())
    assert began is not None
    assert done - 1 <= int(began[1]) <= done  # a checkpoint follows its step's record
    steps = [line["step"] for line in lines(run_dir) if "samples/used" in line]
    assert steps == list(range(1, done + 4))
