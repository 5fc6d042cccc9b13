"""Runs as jobs of a standing Ray cluster with its dashboard, started for the session."""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hybridrl.config import ConfigError
from hybridrl.jobs import commands
from hybridrl.jobs.ray_jobs import RayJob
from hybridrl.runtime.errors import JobError
from hybridrl.telemetry.records import read_lines


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """The address of the dashboard of a Ray cluster with four CPUs."""
    port, shown, agent = free_ports(3)
    ray, mark = Path(sys.executable).with_name("ray"), uuid.uuid4().hex
    env = os.environ | {"HYBRIDRL_TEST_MARK": mark, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="ray") as temp:
        options = ["--num-cpus=4", f"--temp-dir={temp}", f"--port={port}", "--disable-usage-stats"]
        options += [f"--dashboard-port={shown}", f"--dashboard-agent-listen-port={agent}"]
        options += ["--include-dashboard=true", "--object-store-memory=100000000"]
        try:
            subprocess.run(
                [ray, "start", "--head", *options], env=env, check=True, capture_output=True
            )
            yield f"http://127.0.0.1:{shown}"
        finally:
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    if process.environ().get("HYBRIDRL_TEST_MARK") == mark:
                        process.kill()


def wait_for(condition: Callable[[], bool], timeout: float = 200) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_submitted_followed_and_cancelled(
    dashboard: str, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [*small, "cluster=ray", f"cluster.address={dashboard}", "cluster.ranks=1"]

    *lines, record = commands.submit([*arguments, "run.dir=runs/first"])
    job = json.loads(record)["job"]
    assert lines == [
        f"submitted job {job} to {dashboard}",
        "to follow it: hybridrl logs -f runs/first",
    ]
    printed = list(commands.logs(["-f", "runs/first"]))
    assert json.loads(printed[-1])["run"] == str(tmp_path / "runs/first"), printed
    wait_for(lambda: not RayJob(Path("runs/first")).lives())
    assert list(commands.status([])) == [f"{job}  SUCCEEDED (exit 0)  runs/first"]
    assert len(read_lines(Path("runs/first/metrics.jsonl"))) > 2
    assert list(commands.cancel(["runs/first"])) == [f"job {job} has ended before"]
    assert list(commands.logs(["runs/first"])) == printed

    list(commands.submit([*arguments, "run.dir=large", "cluster.ranks=99"]))
    wait_for(lambda: not RayJob(Path("large")).lives())
    assert RayJob(Path("large")).state() == "FAILED (exit 2)"
    assert "cluster.ranks=99: wanted at most the pool's 4 CPU" in "\n".join(
        commands.logs(["large"])
    )  # fmt: skip

    list(
        commands.submit(
            [*arguments, "run.dir=long", "trainer.steps=100000", "eval.sets.main.every=null"]
        )
    )
    metrics = Path("long/metrics.jsonl")
    wait_for(lambda: metrics.is_file() and len(read_lines(metrics)) > 2)
    (cancelled,) = commands.cancel(["long"])
    assert cancelled.startswith("cancelled job ")
    wait_for(lambda: not RayJob(Path("long")).lives())
    assert RayJob(Path("long")).state().startswith("STOPPED")
    wait_for(lambda: json.loads(Path("long/run.json").read_text())["state"] == "interrupted")

    (last,) = (line["step"] for line in read_lines(metrics)[-1:])
    more = [
        "run.dir=long",
        f"trainer.steps={last + 2}",
        "eval.sets.main.every=null",
        "trainer.resume=auto",
    ]
    list(commands.submit([*arguments, *more]))
    wait_for(lambda: not RayJob(Path("long")).lives())
    assert RayJob(Path("long")).state() == "SUCCEEDED (exit 0)"
    RayJob(Path("long"))._client.delete_job(RayJob(Path("long")).id)
    line, *_ = commands.status(["long"])
    assert line.startswith("finished  long  (the cluster at ")
    with pytest.raises(JobError, match="does not know job"):
        list(commands.logs(["long"]))


def test_no_cluster_there(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (port,) = free_ports(1)
    arguments = [
        *small,
        "cluster=ray",
        f"cluster.address=http://127.0.0.1:{port}",
        "run.dir=new/run",
    ]
    with pytest.raises(ConfigError) as raised:
        list(commands.submit(arguments))
    start = f"cluster.address=http://127.0.0.1:{port}: wanted the dashboard of a Ray cluster ("
    assert str(raised.value).startswith(start)
    assert list(tmp_path.iterdir()) == []


def test_what_the_head_runs(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    monkeypatch.chdir(folder)
    arguments = [*small, "cluster=ray", "cluster.address=http://head:8265", "run.dir=x"]
    (line,) = commands.submit(["--dry-run", *arguments])
    place, _, command = line.partition(" && ")
    assert shlex.split(place) == ["cd", str(folder)]
    words = shlex.split(command)
    assert words[:5] == ["exec", sys.executable, "-P", "-m", "hybridrl.cli"]
    assert words[5:] == ["train", *arguments[:-1], f"run.dir='{folder}/x'"]
