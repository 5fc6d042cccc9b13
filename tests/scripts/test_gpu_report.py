"""The GPU report on a CPU: its JSON and table, failing steps, continued calls, wrong input."""

import calendar
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from script_modules import load_script

SCRIPTS = Path(__file__).parents[2] / "scripts"
REPORT = SCRIPTS / "gpu_report.py"
STEP: dict[str, Any] = {
    "status": "done", "reason": "", "seconds": 1.5, "host": "a", "device": "cpu",
    "figures": [
        {"name": "bfloat16", "value": 1.5, "unit": "TFLOP/s", "about": {"n": 8}, "device": "cpu"},
        {"name": "tf32", "skipped": "there is no GPU", "device": "cpu"},
    ],
    "details": {},
}  # fmt: skip
"""A whole step of a report."""
MACHINE: dict[str, Any] = {
    "host": "a", "gpus": [], "cpus": 2, "cpu": "a CPU", "versions": {"torch": "2"},
    "python": "3.11", "cuda": None, "compiler": "",
}  # fmt: skip
SETTINGS: dict[str, Any] = {"device": "cpu", "model": "tiny", "gpus": 0, "gpu_memory": 0}


def run(out: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A call of the script."""
    return subprocess.run(
        [sys.executable, str(REPORT), "--out", str(out), "--scratch", str(out), *options],
        capture_output=True, text=True, timeout=600, check=False, env=os.environ | environment,
    )  # fmt: skip


def steps(out: Path) -> dict[str, Any]:
    """The steps of the JSON, by name, their shape checked."""
    report = json.loads((out / "report.json").read_text())
    assert report.keys() == {
        "source", "commit", "device", "model", "machine", "steps", "estimates", "measured",
    }  # fmt: skip
    measured = calendar.timegm(time.strptime(report["measured"], "%Y-%m-%dT%H:%M:%SZ"))
    assert abs(time.time() - measured) < 3600
    assert report["machine"]["versions"]["torch"]
    for step in report["steps"].values():
        assert step.keys() == {
            "status", "reason", "seconds", "host", "device", "figures", "details",
        }  # fmt: skip
        assert (step["status"] == "done") is not bool(step["reason"])
        for figure in step["figures"]:
            if "skipped" in figure:
                assert figure.keys() == {"name", "skipped", "device"}
            else:
                assert figure.keys() == {"name", "value", "unit", "about", "device"}
            assert figure["device"] == report["device"]
    return report["steps"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    return load_script("gpu_report.py")


@pytest.mark.gpu_dry
def test_a_call_continues_where_a_step_failed(tmp_path: Path) -> None:
    """A step is ended at its time limit; the next call runs it, and not the one that is done."""
    first = run(tmp_path, "--device", "cpu", "--steps", "bandwidth")
    assert first.returncode == 0, first.stderr
    done = steps(tmp_path)["bandwidth"]
    assert done["status"] == "done"
    assert done["figures"][0]["value"] > 0

    late = run(tmp_path, "--device", "cpu", "--steps", "bandwidth,flops", "--limit", "0.3")
    assert late.returncode == 1
    assert "bandwidth: done before" in late.stdout
    failed = steps(tmp_path)["flops"]
    assert (failed["status"], failed["reason"]) == ("failed", "not done after 0.3 s")
    assert re.search(r"^flops +failed +cpu +not done after 0.3 s$", late.stdout, re.MULTILINE)

    again = run(tmp_path, "--device", "cpu", "--steps", "bandwidth,flops,offload")
    assert again.returncode == 0
    assert steps(tmp_path)["bandwidth"] == done
    assert steps(tmp_path)["flops"]["status"] == "done"
    assert steps(tmp_path)["offload"]["status"] == "skipped"
    # Every figure is marked, in the table too, and what does not run here has a reason.
    table = again.stdout[again.stdout.index("step  ") :].splitlines()
    rows = [line for line in table if line.startswith(("bandwidth", "flops", "offload"))]
    assert len(rows) == 9
    assert all(" cpu " in line or line.endswith(" cpu") for line in rows)
    assert sum("there is no GPU" in line for line in rows) == 5
    assert "Figures marked cpu are of a CPU" in again.stdout
    assert (tmp_path / "report.txt").read_text() in again.stdout


def test_fresh_forgets_the_steps_that_are_asked_for(tmp_path: Path, script: ModuleType) -> None:
    settings = script.Settings(**SETTINGS, folder=str(tmp_path), scratch=str(tmp_path))

    def opened(*options: str, **changes: Any) -> dict[str, Any]:
        chosen = script.parse(["--out", str(tmp_path), *options])
        report: dict[str, Any] = script.open_report(chosen, settings, MACHINE | changes)
        return report

    report = opened()
    report["steps"] = dict.fromkeys(("flops", "train"), STEP)
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert opened(host="b")["steps"].keys() == {"flops", "train"}
    assert opened("--steps", "flops", "--fresh")["steps"].keys() == {"train"}
    assert not opened("--fresh")["steps"]
    # Of another machine nothing is taken over, and the old report stays.
    assert not opened(gpus=[{"name": "H100"}])["steps"]
    (kept,) = tmp_path.glob("report-*.json")
    assert json.loads(kept.read_text()) == report


def without(mapping: dict[str, Any], name: str) -> dict[str, Any]:
    """All but one name."""
    return {key: value for key, value in mapping.items() if key != name}


TAKEN, LEFT_OUT = STEP["figures"]
DAMAGED_STEPS: list[Any] = [
    [],
    {"flops": 1},
    {"speed": STEP},
    *({"flops": without(STEP, name)} for name in STEP),
    *({"flops": without(STEP, name) | {name: None}} for name in STEP),
    {"flops": STEP | {"status": "well"}},
    *({"flops": STEP | {"figures": [figure]}} for figure in (1, [], None)),
    *({"flops": STEP | {"figures": [without(TAKEN, name)]}} for name in TAKEN),
    *({"flops": STEP | {"figures": [TAKEN | {name: None}]}} for name in TAKEN),
    *({"flops": STEP | {"figures": [without(LEFT_OUT, name)]}} for name in LEFT_OUT),
    *({"flops": STEP | {"figures": [LEFT_OUT | {name: None}]}} for name in LEFT_OUT),
]


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"\xff\x00",
        b"[" * 100_000,
        lambda report: json.dumps(report)[:-40].encode(),
        b"[]",
        b'{"steps": {"x": 1}}',
        lambda report: json.dumps(without(report, "steps")).encode(),
        *(
            lambda report, steps=steps: json.dumps(report | {"steps": steps}).encode()
            for steps in DAMAGED_STEPS
        ),
    ],
)
def test_a_damaged_report_is_kept_and_begun_anew(
    damage: Any,
    tmp_path: Path,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("source_digest", "commit"):  # they take longer than the rest
        monkeypatch.setattr(script, name, lambda: "a")
    settings = script.Settings(**SETTINGS, folder=str(tmp_path), scratch=str(tmp_path))
    options = script.parse(["--out", str(tmp_path)])

    def opened() -> dict[str, Any]:
        report: dict[str, Any] = script.open_report(options, settings, MACHINE)
        return report

    report = opened() | {"steps": {"flops": STEP}}
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    assert opened() == report
    contents = damage if isinstance(damage, bytes) else damage(report)
    for number in (1, 2):  # the first one is not overwritten by the second
        file.write_bytes(contents)
        os.utime(file, (0, 0))
        anew = opened()
        assert anew["steps"] == {}
        assert "not run" in script.table(anew)
        kept = list(tmp_path.glob("report-*.json"))
        assert [path.read_bytes() for path in kept] == [contents] * number
        assert not file.exists()
    printed = capsys.readouterr().out
    assert re.fullmatch(r"(\S+report-\S+\.json is damaged: the report begins anew\n){2}", printed)


@pytest.mark.parametrize("status", ["done", "failed", "skipped"])
def test_a_report_that_is_read_again_is_in_the_table(
    status: str, tmp_path: Path, script: ModuleType
) -> None:
    """Every value that a figure may have."""
    settings = script.Settings(**SETTINGS, folder=str(tmp_path), scratch=str(tmp_path))
    options = script.parse(["--out", str(tmp_path)])
    report = script.open_report(options, settings, MACHINE)
    values = [TAKEN | {"value": value} for value in (3, 12345.6, "torch")]
    changes = {"status": status, "reason": "no memory", "figures": [*values, LEFT_OUT]}
    report["steps"] = {"flops": STEP | changes}
    (tmp_path / "report.json").write_text(json.dumps(report))
    rows = script.table(script.open_report(options, settings, MACHINE)).splitlines()
    figures = [re.split(" {2,}", row) for row in rows if row.startswith("flops")]
    assert figures[:4] == [
        ["flops", "bfloat16", "3", "TFLOP/s", "cpu", "n 8"],
        ["flops", "bfloat16", "12,346", "TFLOP/s", "cpu", "n 8"],
        ["flops", "bfloat16", "torch", "TFLOP/s", "cpu", "n 8"],
        ["flops", "tf32", "skipped", "cpu", "there is no GPU"],
    ]
    assert figures[4:] == ([] if status == "done" else [["flops", status, "cpu", "no memory"]])


def test_peaks_stand_beside_the_plan(tmp_path: Path, script: ModuleType) -> None:
    from gpu_steps.figures import Figures
    from gpu_steps.memory import report_peaks

    figures = Figures(tmp_path / "step.json", "cuda")
    gib = 2**30
    peaks = {"update": {"allocated": 4 * gib}, "optimizer": {"allocated": gib}}
    report_peaks(peaks, {"update": 3 * gib}, figures)
    update, optimizer = json.loads((tmp_path / "step.json").read_text())["figures"]
    assert (update["value"], update["unit"]) == (4.0, "GiB")
    assert update["about"] == {
        "planned_gib": 3.0,
        "planned_by_measured": 0.75,
        "allocated_gib": 4.0,
    }
    assert optimizer["about"] == {"planned": "part of update", "allocated_gib": 1.0}


def test_a_plan_that_needs_what_is_not_here_is_named(
    monkeypatch: pytest.MonkeyPatch, script: ModuleType
) -> None:
    from gpu_steps.memory import plan_of

    monkeypatch.delitem(sys.modules, "gpu_steps.planned", raising=False)
    monkeypatch.setitem(sys.modules, "hybridrl.preflight.memory_plan", None)
    planned, reason = plan_of(None, None)  # type: ignore[arg-type]
    assert not planned
    assert reason.startswith("the memory plan cannot be computed here: ")
    assert "hybridrl.preflight.memory_plan" in reason


def test_steps_without_time_are_left_for_the_next_call(tmp_path: Path, script: ModuleType) -> None:
    options = script.parse(["--minutes", "0.05", "--out", str(tmp_path)])
    lines = list(script.run_steps(options, None, {"steps": {}}, "a"))
    assert len(lines) == len(script.STEPS)
    assert all("no time left of 0.05 minutes" in line for line in lines)


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules a step's process can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_what_a_step_started_ends_with_it(modules: Path, script: ModuleType) -> None:
    """A step that hangs in its ranks is no burden to the next one."""
    (modules / "hangs.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    pid = modules / "pid"
    assert script.run_limited("hangs", [str(pid)], modules / "log", 3.0) == "not done after 3 s"
    patience = time.monotonic() + 10  # a killed process ends when it is scheduled
    while is_alive(int(pid.read_text())):
        assert time.monotonic() < patience, "it is still there"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('no memory')", "ValueError: no memory"),
        ("import os; os.kill(os.getpid(), 11)", "ended by SIGSEGV"),
        ("raise SystemExit(3)", "exit code 3"),
        ("print('figures')", ""),
    ],
)
def test_the_reason_of_a_failure(code: str, reason: str, modules: Path, script: ModuleType) -> None:
    (modules / "ends.py").write_text(code)
    assert script.run_limited("ends", [], modules / "log", 60.0) == reason


def test_a_step_that_fails_keeps_its_figures(tmp_path: Path, script: ModuleType) -> None:
    from gpu_steps.figures import Figures

    figures = Figures(tmp_path / "step.json", "cpu")
    figures.add("decode_1", 12345.678, "tokens/s", rows=1)
    kept = json.loads((tmp_path / "step.json").read_text())
    assert kept["figures"] == [
        {
            "name": "decode_1",
            "value": 12350.0,
            "unit": "tokens/s",
            "about": {"rows": 1},
            "device": "cpu",
        }
    ]
    figures.skip("decode_64", "no memory")
    kept = json.loads((tmp_path / "step.json").read_text())
    assert kept["figures"][1] == {"name": "decode_64", "skipped": "no memory", "device": "cpu"}


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--device", "gpu"], "--device=gpu: wanted one of auto, cpu, cuda"),
        (["--model", "7b"], "--model=7b: wanted one of tiny, 1.5b"),
        (["--steps", "flops,speed"], "--steps=speed: wanted one of tests, bandwidth, flops, .*"),
        (["--minutes", "0"], "--minutes=0: wanted a finite number above 0"),
        (["--limit", "soon"], "--limit=soon: wanted a finite number above 0"),
        (["--minutes", "inf"], "--minutes=inf: wanted a finite number above 0"),
        (["--limit", "inf"], "--limit=inf: wanted a finite number above 0"),
        (["--out", ""], "--out=: wanted a directory"),
        (["--scratch", ""], "--scratch=: wanted a directory"),
        (["--steps", ""], "--steps=: wanted one of tests, bandwidth, flops, .*"),
        (["--model", ""], "--model=: wanted one of tiny, 1.5b"),
        (["--limit"], "argument --limit: expected one argument"),
        (["--quick"], "unrecognized arguments: --quick"),
        (["--out", "/proc/report"], "--out=/proc/report: wanted a writable directory .*"),
        (["--scratch", "/proc/x"], "--scratch=/proc/x: wanted a writable directory .*"),
    ],
)
def test_wrong_input_is_one_line(
    options: list[str],
    line: str,
    tmp_path: Path,
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = ["--out", str(tmp_path / "out"), "--scratch", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", *folders, *options])
    monkeypatch.setattr(script.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert re.fullmatch(line + r"\n", printed.err)
    assert not printed.out
    assert not (tmp_path / "out" / "report.json").exists()


def test_help_says_what_each_option_takes(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.parse(["--help"])
    options = capsys.readouterr().out.partition("\noptions:\n")[2]
    helps = [" ".join(text.split()) for text in re.split(r"\n {2}(?=-)", f"\n{options}")[1:]]
    assert len(helps) == 9
    assert all("(default " in text for text in helps if "--help" not in text)
    allowed = {
        "--device": ("auto", *script.DEVICES), "--model": script.MODELS, "--steps": script.STEPS,
    }  # fmt: skip
    for key, values in allowed.items():
        (text,) = (text for text in helps if text.startswith(key))
        assert all(value in text for value in values)


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "cuda")
    assert done.returncode == 2
    pattern = r"--device=cuda: wanted auto or cpu: torch \S+ finds no GPU here \(.+\)\n"
    assert re.fullmatch(pattern, done.stderr)
    assert not (tmp_path / "report.json").exists()


@pytest.mark.gpu_dry
def test_the_tests_marked_gpu_are_found(tmp_path: Path) -> None:
    """Here they are skipped, which they are by themselves."""
    folders = {"folder": str(tmp_path), "scratch": str(tmp_path)}
    settings = SETTINGS | {"device": "cuda", "gpus": 1} | folders
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    path = os.pathsep.join(map(str, (SCRIPTS, SCRIPTS.parent)))
    done = subprocess.run(
        [sys.executable, "-m", "gpu_steps", "tests", "settings.json", "step.json"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "step.json").read_text())["figures"]
    counts = {figure["name"]: figure["value"] for figure in figures}
    assert counts["tests_failed"] == 0
    assert counts["tests_passed"] + counts["tests_skipped"] >= 5


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_is_measured_where_it_is_installed(tmp_path: Path) -> None:
    done = run(tmp_path, "--device", "cpu", "--steps", "decode_vllm,mismatch_vllm")
    assert done.returncode == 0, done.stdout + done.stderr
    taken = steps(tmp_path)
    assert {step["status"] for step in taken.values()} == {"done"}
    assert {"decode_1", "decode_256"} <= {f["name"] for f in taken["decode_vllm"]["figures"]}
    gaps = {f["name"]: f["value"] for f in taken["mismatch_vllm"]["figures"]}
    assert 0 < gaps["mismatch_mean"] <= gaps["mismatch_max"] < 0.1
