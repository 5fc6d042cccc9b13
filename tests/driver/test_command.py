"""`hybridrl train` as a process: what it prints, how it ends, that nothing of it stays."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from hybridrl.telemetry.records import read_lines

TIMES = ("time", "_s", "bubble_share")  # of keys that time decides


def curve(run_dir: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in line.items() if not key.endswith(TIMES)}
        for line in read_lines(run_dir / "metrics.jsonl")
    ]


def state(run_dir: Path) -> str:
    return json.loads((run_dir / "run.json").read_text())["state"]


def offline() -> tuple[str, ...]:
    """What runs a command in a network of its own that has the loopback device alone."""
    if not shutil.which("unshare"):
        pytest.skip("no unshare(1) on this machine")
    prefix = ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    done = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no network namespace can be made here: {done.stderr}")
    return prefix


@pytest.mark.slow
def test_two_runs_are_equal_bit_for_bit_and_need_no_network(
    command: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    curves = []
    for name, prefix in (("a", ()), ("b", offline())):
        settings = [
            "trainer.steps=3",
            "warm_start.steps=2",
            "eval.sets.main.every=2",
            f"run.dir={name}",
        ]
        run = command(*tiny_run, *settings, prefix=prefix)
        code, out, err = run.end(timeout=150)
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["run"] == str(tmp_path / name)
        shown = "starting ", "schedule=auto ", "warm start", "rl ", "step "  # and no warnings
        rest = [line for line in err.splitlines() if not line.startswith(shown)]
        # Without a network Ray's C++ says so, before anything could turn its log down.
        assert [x for x in rest if not (prefix and "Failed to determine local IP" in x)] == []
        assert run.left == []
        assert state(tmp_path / name) == "finished"
        curves.append(curve(tmp_path / name))
    assert len(curves[0]) == 8
    assert sum(line.get("grad_norm", 0) > 0 for line in curves[0]) == 5
    assert curves[0] == curves[1]


@pytest.mark.wide
@pytest.mark.ray
def test_ray_starts_below_a_long_tmpdir(
    command: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """Its sockets have room, and nothing is left there."""
    folder = tmp_path / ("a-folder-of-a-cluster-" * 5)
    folder.mkdir()
    settings = ["trainer.steps=1", "eval.sets.main.every=null", "run.dir=long"]
    run = command(*tiny_run, *settings, prefix=("env", f"TMPDIR={folder}"))
    code, out, err = run.end(timeout=150)
    assert (code, run.left) == (0, []), err
    assert json.loads(out.splitlines()[-1])["run"] == str(tmp_path / "long")
    assert state(tmp_path / "long") == "finished"
    assert list(folder.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_killed_rank_is_named_with_its_log(
    ranks: int, command: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    settings = ["trainer.steps=2000", "eval.sets.main.every=null", "run.dir=killed"]
    run = command(*tiny_run, f"cluster.ranks={ranks}", *settings)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    run.wait_for(lambda: len(read_lines(metrics)) > 2)
    victim = next(p for p in run.alive() if p.name().startswith("ray::ClusterWorker"))
    victim.send_signal(signal.SIGKILL)
    code, out, err = run.end(timeout=20)
    assert (code, out, run.left) == (1, "", [])
    line = err.splitlines()[-1]
    assert line.startswith("hybridrl: rank ")
    assert f"(actor, reward) on node {os.uname().nodename} (pid {victim.pid}) failed: " in line
    log = Path(line.partition("its log is ")[2].partition(";")[0])
    assert log.parent == tmp_path / "killed" / "logs"
    assert log.is_file()
    assert str(victim.pid) in log.name
    assert "Traceback" not in err
    assert state(tmp_path / "killed") == "failed"


def children(run: Any, name: str) -> Callable[[], bool]:
    def there() -> bool:
        names = []
        for process in run.alive():
            try:
                names.append(process.name())
            except psutil.NoSuchProcess:
                continue
        return any(imported.startswith(name) for imported in names)

    return there


MOMENTS = {
    "start": lambda run, _: children(run, "gcs_server"),
    "warm_start": lambda run, d: lambda: len(read_lines(d / "metrics.jsonl")) > 0,
    "generation": lambda run, d: (
        lambda: (
            "reward_mean" in (d / "metrics.jsonl").read_text()
            if (d / "metrics.jsonl").is_file()
            else False
        )
    ),
    "evaluation": lambda run, d: (
        lambda: (
            "evaluation" in (d / "events.jsonl").read_text()
            if (d / "events.jsonl").is_file()
            else False
        )
    ),
}
STEPS = {
    "start": ["trainer.steps=1"],
    "warm_start": ["warm_start.steps=2000"],
    "generation": ["trainer.steps=2000", "eval.sets.main.every=null", "rollout.max_new_tokens=200"],
    "evaluation": [
        "trainer.steps=2000",
        "eval.sets.main.every=1",
        "data.eval_size=400",
        "data.size=400",
    ],
}


@pytest.mark.parametrize(
    ("moment", "number", "whole_group"),
    [
        pytest.param("start", signal.SIGTERM, False, marks=pytest.mark.ray),
        pytest.param("start", signal.SIGINT, True, marks=pytest.mark.slow),
        pytest.param("warm_start", signal.SIGINT, False, marks=pytest.mark.slow),
        pytest.param("generation", signal.SIGINT, True, marks=pytest.mark.slow),
        pytest.param("evaluation", signal.SIGTERM, False, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_everything(
    moment: str,
    number: signal.Signals,
    whole_group: bool,
    command: Callable[..., Any],
    tiny_run: list[str],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "stopped"
    run = command(*tiny_run, *STEPS[moment], "run.dir=stopped")
    run.wait_for(MOMENTS[moment](run, run_dir))
    (os.killpg if whole_group else os.kill)(run.popen.pid, number)
    code, out, err = run.end(timeout=20)
    assert (code, out, run.left) == (128 + number, "", [])
    assert err.splitlines()[-1] == f"hybridrl: interrupted; the run directory is {run_dir}"
    assert "Traceback" not in err
    assert state(run_dir) == "interrupted"
    for file in run_dir.glob("*.jsonl"):
        assert len(read_lines(file)) == file.read_text().count("\n") > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_before_its_first_step_a_run_that_goes_on_ends_at_once(
    number: signal.Signals, command: Callable[..., Any], tiny_run: list[str], tmp_path: Path
) -> None:
    """There is nothing to save; the evaluation would take minutes."""
    run = command(
        *tiny_run, "cluster=processes", "trainer.resume=auto", "data.size=4000", "run.dir=run",
        "data.eval_size=3000", "eval.sets.main.num_prompts=0", "rollout.max_new_tokens=200",
    )  # fmt: skip
    events = tmp_path / "run" / "events.jsonl"
    run.wait_for(lambda: "switch" in [event["kind"] for event in read_lines(events)])
    run.popen.send_signal(number)
    code, out, err = run.end(timeout=20)
    assert (code, out, run.left) == (128 + number, "", [])
    line = err.splitlines()[-1]
    assert line == f"hybridrl: interrupted; the run directory is {tmp_path / 'run'}"
    assert state(tmp_path / "run") == "interrupted"
