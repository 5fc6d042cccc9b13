"""`gpu_first_run.sh` on a bare machine without a GPU: torch 2.11, the newest transformers, no more.

Its environment is that of `make test-bare`, another than that of these tests.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from hybridrl.config.versions import TRIED, release_of

pytestmark = pytest.mark.bare
ROOT = Path(__file__).parents[2]
SCRIPT, PYTHON = ROOT / "scripts/gpu_first_run.sh", ROOT / ".cache/bare/bin/python"
ABSENT = (
    "antlr4", "datasets", "hydra", "hypothesis", "omegaconf", "peft", "psutil", "pyarrow", "ray",
    "reasoning_gym", "tensordict", "triton", "verl", "vllm",
)  # fmt: skip
FILES = {
    "report.json", "report.txt", "first_run.json", "first_run.txt", "demo.jsonl", "large.jsonl",
    "logs.tgz",
}  # fmt: skip
MEASURED = {
    "attention_choice_bfloat16", "packed_torch_alike", "packed_torch_mixed", "train", "score",
    "mfu_of_measured", "switch_1_to_1x1_s", "switch_2_to_2x1_rate", "switch_2_to_1x2_rate",
    "mismatch_mean", "mismatch_max", "decode_1", "decode_64", "decode_256",
}  # fmt: skip
PHASES = {"build", "switch", "decode", "forward_backward", "optimizer", "update", "offloaded"}
NOT_ON_A_CPU = {
    "tests", "activations", "offload", "decode_without_graphs", "decode_vllm", "mismatch_vllm",
}  # fmt: skip


def environment(work: Path) -> dict[str, str]:
    """Variables of a call, whose own files are in `work`."""
    own = {"PYTHON": str(PYTHON), "FIRST_RUN_WORK": str(work), "OMP_NUM_THREADS": "1"}
    return {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "OUT")} | own


def test_the_environment_is_bare() -> None:
    code = (
        "import importlib.util as u, json, torch, transformers\n"
        f"there = [name for name in {ABSENT!r} if u.find_spec(name)]\n"
        "print(json.dumps([there, torch.__version__, transformers.__version__]))"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True, check=True)
    there, torch, transformers = json.loads(done.stdout)
    assert not there
    assert release_of(torch) == release_of(TRIED["torch"][0])
    assert release_of(transformers) == release_of(TRIED["transformers"][1])


@pytest.mark.timeout(900)
def test_the_first_run(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    begun = time.monotonic()
    done = subprocess.run(
        [SCRIPT, "--device", "cpu", str(out)], env=environment(work), cwd=tmp_path,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    logs = "".join(log.read_text()[-2000:] for log in sorted((work / "parts").glob("*.log")))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert time.monotonic() - begun < 600
    # small and flat
    assert {path.name for path in out.iterdir()} == FILES
    assert sum(path.stat().st_size for path in out.iterdir()) < 8 * 2**20
    check_report(json.loads((out / "report.json").read_text()))
    outcomes = json.loads((out / "first_run.json").read_text())
    assert [*outcomes] == ["report", "demo", "large"]
    assert {outcome["state"] for outcome in outcomes.values()} == {"done"}
    for name in ("demo", "large"):
        check_training(outcomes[name]["steps"], work / "runs" / name)
    assert max(step["response_tokens_mean"] for step in outcomes["large"]["steps"]) > 8
    assert "demo: done" in (out / "first_run.txt").read_text()
    with tarfile.open(out / "logs.tgz") as archive:
        names = archive.getnames()
    assert {"parts/report.log", "parts/demo.log", "parts/large.log"} < set(names)
    assert not [name for name in names if name.endswith(".safetensors")]


def check_report(report: dict[str, Any]) -> None:
    """Every step that a CPU can run has its figures."""
    status = {name: step["status"] for name, step in report["steps"].items()}
    assert status == {n: "skipped" if n in NOT_ON_A_CPU else "done" for n in status}
    figures = [f for step in report["steps"].values() for f in step["figures"] if "value" in f]
    assert {figure["name"] for figure in figures} >= MEASURED
    assert {figure["device"] for figure in figures} == {"cpu"}
    assert report["estimates"] == []  # they are of an H100
    # peaks, next to the memory plan
    memory = report["steps"]["memory"]
    peaks = {figure["name"]: figure for figure in memory["figures"]}
    assert peaks.keys() == {f"peak_{phase}" for phase in PHASES}
    for phase, size in memory["details"]["planned"].items():
        ratio = size / memory["details"]["peaks"][phase]["resident"]
        assert peaks[f"peak_{phase}"]["about"]["planned_by_measured"] == round(ratio, 3) > 0
    gaps = {f["name"]: f["value"] for f in report["steps"]["mismatch"]["figures"]}
    assert 0 < gaps["mismatch_mean"] <= gaps["mismatch_max"] < 0.1  # bfloat16 has 8 bits


def check_training(steps: list[dict[str, Any]], run: Path) -> None:
    """Three steps, each with a gradient, have moved the weights."""
    assert len({step["step"] for step in steps}) == len(steps) == 3
    assert all(step["grad_norm"] > 0 and step["tokens_per_s"] > 0 for step in steps)
    before, after = (load_file(run / name / "model.safetensors") for name in ("start", "final"))
    moved = [name for name, tensor in after.items() if not tensor.equal(before[name])]
    assert moved == [*after]


def test_a_run_that_is_cut_off_loses_nothing(tmp_path: Path) -> None:
    """At the end of a reservation the figures so far are there, and no process is left."""
    out, work = tmp_path / "out", tmp_path / "work"
    kept = out / "report.json"
    run = subprocess.Popen(
        [SCRIPT, "--device", "cpu", str(out)], env=environment(work), cwd=tmp_path,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    patience = time.monotonic() + 200
    while not (kept.is_file() and "bandwidth" in json.loads(kept.read_text())["steps"]):
        assert time.monotonic() < patience, "no figure has arrived"
        time.sleep(0.2)
    children = psutil.Process(run.pid).children(recursive=True)
    run.send_signal(signal.SIGTERM)
    assert run.wait(60) == 143
    steps = json.loads(kept.read_text())["steps"]
    assert steps["bandwidth"]["figures"]
    assert "mismatch" not in steps
    assert json.loads((out / "first_run.json").read_text())["demo"] == {"state": "not begun"}
    assert not psutil.wait_procs(children, timeout=20)[1]


def call(arguments: list[str], work: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script, which ends before its first part."""
    return subprocess.run(
        [SCRIPT, *arguments], env=environment(work / "work") | variables, cwd=work,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "gpu"], "--device=gpu: wanted auto, cpu or cuda"),
        (["--device=gpu"], "--device=gpu: wanted auto, cpu or cuda"),
        (["--device"], "--device=: wanted auto, cpu or cuda"),
        (["--device=cpu", "out", "more"], "out more: wanted at most one directory"),
        (["--devices=cpu"], "--devices=cpu: wanted --device auto|cpu|cuda, --help, or a directory"),
    ],
)
def test_wrong_input_is_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    done = call(arguments, tmp_path)
    assert (done.returncode, done.stderr) == (2, f"{line}\n")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_says_what_it_does(option: str, tmp_path: Path) -> None:
    done = call([option], tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("The first quarter hour on a GPU: scripts/gpu_first_run.sh [")
    assert not [*tmp_path.iterdir()]


def test_a_missing_wheel_is_said_before_the_report(tmp_path: Path) -> None:
    """`python -S` of the tests has no packages, and the wheels are hidden from it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nunset PYTHONPATH\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    done = call([str(tmp_path / "out")], tmp_path, PYTHON=str(python))
    assert done.returncode == 2
    wanted = "one with hydra; first, with a network: make gpu-first-run-wheels"
    assert done.stderr == f"{python}: wanted {wanted}\n"
    assert not (tmp_path / "work" / "parts").exists()


def test_its_limits_are_ten_minutes() -> None:
    text = SCRIPT.read_text()
    limits = [int(limit) for limit in re.findall(r"^(?:part|run) \w+ (\d+) ", text, re.MULTILINE)]
    (kill_after,) = map(int, re.findall(r"--kill-after=(\d+)", text))
    (minutes,) = map(float, re.findall(r"--minutes (\S+)", text))
    assert len(limits) == 3
    assert 60 * minutes + 20 <= limits[0]  # imports, and a look at the machine
    assert sum(limits) + 3 * kill_after <= 590


def train(work: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run of the demo for a step, by the packages that a first run has left in `work`."""
    words = work / "words.jsonl"
    companion = ROOT / "scripts" / "gpu_first_run.py"
    subprocess.run([sys.executable, companion, "words", words], check=True)
    return subprocess.run(
        [
            PYTHON, "-m", "hybridrl.cli", "train", "experiment=spell_tiny", "cluster=processes",
            "trainer.steps=1", "warm_start.steps=0", "telemetry.loggers=[]", "data=jsonl",
            f"data.sources.main.name={words}", "data.eval_size=64", "data.max_prompt_tokens=16",
            f"run.dir={work / 'run'}", *overrides,
        ],
        env=environment(work) | {"PYTHONPATH": str(site(work)), "PYTHONSAFEPATH": "1"},
        cwd=work, capture_output=True, text=True, check=False,
    )  # fmt: skip


def site(work: Path) -> Path:
    """What `gpu_first_run.sh` makes: hybridrl by links, and the three wheels."""
    folder = work / "site"
    (folder / "hybridrl").mkdir(parents=True)
    rooms = [*(ROOT / "hybridrl").iterdir(), *(ROOT / n for n in ("conf", "recipes", "kernels"))]
    for room in rooms:
        (folder / "hybridrl" / room.name).symlink_to(room)
    for wheel in (ROOT / ".whl").glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def test_experts_train(tmp_path: Path) -> None:
    """hybridrl is not installed as a package there."""
    done = train(tmp_path, "model=tiny_moe")
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_ranks_say_what_to_install(tmp_path: Path) -> None:
    done = train(tmp_path, "cluster.ranks=2")
    line = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2
    assert line == "hybridrl: cluster.ranks=2: wanted 1, or first: pip install psutil ray"
    assert "Traceback" not in done.stderr
