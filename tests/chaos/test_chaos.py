"""A few seeds of `make test-chaos`, and what a seed draws."""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from chaos.cases import CALLS, CASES, NOTHING, RAY_SEEDS, RAY_WEIGHTS, WEIGHTS, draw, num_ranks
from chaos.differences import TIMED, WHEN_MOVED, record_differences
from chaos.namespace import can_enter
from chaos.strikes import Disk
from chaos.summary import summary

from hybridrl.telemetry.records import dump

SEEDS = [[144], [232], [266]]
"""A driver is killed twice, once amid a line of a record; a rank is, twice; SIGTERM."""
SKIPPED = "this process may make no namespace, with file systems to be full or read-only"


def test_a_seed_draws_the_same_faults_each_time() -> None:
    cases, on_ray = ([draw(seed) for seed in seeds] for seeds in (range(CASES), RAY_SEEDS))
    assert cases == [draw(seed) for seed in range(CASES)]
    faults = Counter(fault.kind for case in cases for fault in case.faults)
    assert faults.keys() == WEIGHTS.keys()
    assert min(faults.values()) > 30
    ray_faults = Counter(fault.kind for case in on_ray for fault in case.faults)
    assert ray_faults.keys() == RAY_WEIGHTS.keys()
    assert ray_faults.total() > 2 * 40
    assert {case.cluster for case in cases} == {"processes"}
    assert {case.cluster for case in on_ray} == {"local"}
    assert len({case.setting for case in cases[:10]}) == 10
    for case in (*cases, *on_ray):
        for fault in case.faults:
            first, last = CALLS[fault.call]
            assert first <= fault.step <= last
            assert fault.rank < num_ranks(case.schedule)


def test_what_was_tried_is_counted() -> None:
    faults = [
        {"fault": "KILL_RANK", "hit": "process 1", "call": "update"},
        {"fault": "FLIP_BIT", "hit": NOTHING, "call": ""},
    ]
    line = {"setting": "serial-ppo", "faults": [1, 2, 3], "struck": faults, "restarted": 1}
    lines = [line | {"ends": [1, 2], "wrong": wrong} for wrong in ([], ["differs"])]
    lines += [line | {"cluster": "local", "ends": [1], "wrong": []}]
    text = summary(lines)
    assert text.startswith("3 runs under 6 faults (3 more were drawn for moments that did not come")
    assert "have 3 restarts; the command was given again 2 times." in text
    assert "1 of the runs, under 2 of the faults, were on Ray." in text
    assert "| a rank is killed | 3 | 3 | 1 |" in text
    assert "| the driver is killed | 3 | 3 | 1 |" in text
    assert "a bit of such a file flipped | 0 | 0 | 0 |" in text
    assert "Runs by schedule and recipe: " in text


@pytest.mark.layouts
@pytest.mark.parametrize(
    "seeds", [*SEEDS[:2], pytest.param(SEEDS[2], marks=pytest.mark.wide)], ids=str
)
def test_whatever_befalls_a_run_it_ends_and_its_parameters_are_those_without(
    tmp_path: Path, seeds: list[int]
) -> None:
    """`make test-chaos` has more seeds: other schedules and recipes, and the other kinds."""
    if not can_enter():
        pytest.skip(SKIPPED)
    file = tmp_path / "chaos.jsonl"
    command = [sys.executable, "-m", "chaos", str(file), "--seeds", *map(str, seeds)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["seed"] for line in lines] == seeds
    assert sum(len(line["struck"]) for line in lines) >= len(seeds)


def test_a_directory_that_is_read_only_twice_is_mended_once() -> None:
    """The second mount would stay, and the last command be refused for it."""
    if not can_enter():
        pytest.skip(SKIPPED)
    code = (
        f"import sys; sys.path += {sys.path}; from chaos.test_chaos import strike_twice as f; f()"
    )
    subprocess.run(["unshare", "--mount", sys.executable, "-c", code], check=True)


def strike_twice() -> None:
    """In a process whose mounts end with it."""
    with tempfile.TemporaryDirectory() as folder, closing(Disk(Path(folder) / "case")) as disk:
        assert disk.make_read_only()
        assert not disk.make_read_only()
        assert not is_writable(disk.run_dir)
        disk.mend()
        assert is_writable(disk.run_dir)


def test_sigterm_ends_what_is_inside_a_namespace() -> None:
    if not can_enter():
        pytest.skip(SKIPPED)
    inside = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "try: print('up', flush=True); time.sleep(60)\n"
        "finally: print('closed')"
    )
    code = (
        f"import sys; sys.path += {sys.path}; from chaos.namespace import enter\n"
        f"enter([sys.executable, '-c', {inside!r}])"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.terminate()
        assert process.communicate(timeout=30)[0] == "closed\n"
    assert process.returncode == 143


def test_where_no_namespace_can_be_made_a_line_says_so(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "chaos", str(tmp_path / "file")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    needed = "chaos: needs root, unshare and setpriv, to make namespaces\n"
    assert (done.returncode, done.stderr) == (1, needed)


def is_writable(folder: Path) -> bool:
    try:
        (folder / "file").touch()
    except OSError:
        return False
    return True


def write_run(folder: Path, **records: list[dict[str, Any]]) -> Path:
    """Write the records of a run; those that are not named are those of an undisturbed one."""
    folder.mkdir()
    default = {"metrics": [PARKED], "samples": SAMPLES, "lengths": [], "digests": [DIGESTS]}
    for name, of_name in {**default, "events": [], **records}.items():
        (folder / f"{name}.jsonl").write_text("".join(dump(line) + "\n" for line in of_name))
    return folder


SAMPLE = {"step": 1, "id": "0.0", "prompt": "1", "response": "2", "reward": 0.5}
SAMPLES = [SAMPLE | {"step": step} for step in range(1, 7)]
LOST = {"prompt": None, "response": None}
FIRST = [SAMPLE | LOST, *SAMPLES[1:]]
BOTH = [SAMPLE | LOST, SAMPLES[1] | LOST, *SAMPLES[2:]]
WRONG = [SAMPLE | LOST | {"reward": 1.0}, *SAMPLES[1:]]
ALL = [sample | LOST for sample in SAMPLES]
KV = "environment/kept_kv_tokens"
PARKED, KEPT = {"step": 1, KV: 300.0}, {"step": 1, KV: 323.0}
DIGESTS = {"step": 1, "samples": {"0.0": {"tokens": ["a", None]}, "0.1": {"tokens": ["b", None]}}}
FEWER = {"step": 1, "samples": {"0.0": {"tokens": ["a", None]}}}
OTHERS = {"step": 1, "samples": {"0.0": {"tokens": ["c", None]}}}
DEATH = [{"kind": "death", "step": 1}]


@pytest.mark.parametrize(
    ("schedule", "records", "wrong"),
    [
        ("fused", {"metrics": [KEPT]}, ""),
        ("serial", {"metrics": [KEPT]}, f"metrics; step 1 {KV}: 300.0, 323.0"),
        ("fused", {"metrics": [{"step": 1}]}, f"metrics; step 1 {KV}: 300.0, None"),
        ("fused", {"metrics": [{"step": 1, KV: -1.0}]}, f"metrics; step 1 {KV}: 300.0, -1.0"),
        ("fused", {"metrics": [{"step": 1, KV: "NaN"}]}, f"metrics; step 1 {KV}: 300.0, NaN"),
        ("fused", {"metrics": [PARKED | {"plan/moved": 1.0}]}, ""),
        ("async", {"samples": FIRST, "events": DEATH}, ""),
        ("async", {"samples": FIRST}, "samples; step 1 0.0 prompt: 1, None, step 1 0.0 response"),
        ("async", {"samples": BOTH, "events": DEATH}, ""),
        ("async", {"samples": ALL, "events": DEATH}, "samples; step 3 0.0 prompt: 1, None"),
        ("async", {"samples": WRONG, "events": DEATH}, "samples; step 1 0.0 reward: 0.5, 1.0"),
        ("async", {"samples": [], "events": DEATH}, "samples; step 1 0.0 step: 1, None"),
        ("async", {"digests": [FEWER], "events": DEATH}, ""),
        ("async", {"digests": [FEWER]}, "digests; step 1 samples"),
        ("async", {"digests": [OTHERS], "events": DEATH}, "digests; step 1 samples"),
    ],
)
def test_what_may_differ(
    schedule: str, records: dict[str, Any], wrong: str, tmp_path: Path
) -> None:
    """Metrics that time decides, and what an instance had not told before it died."""
    whole, other = write_run(tmp_path / "whole"), write_run(tmp_path / "other", **records)
    differing = record_differences(whole, other, TIMED.get(schedule, WHEN_MOVED))
    assert len(differing) == bool(wrong)
    assert "".join(differing).removeprefix("differs: ").startswith(wrong)
