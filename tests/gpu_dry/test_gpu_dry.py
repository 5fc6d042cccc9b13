"""The package's CUDA branches on fake GPUs: every phase runs, and what it costs is in a table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.gpu_dry, pytest.mark.timeout(1800)]

HERE = Path(__file__).parent
COUNTS = HERE / "counts.json"
MEMORY = HERE / "memory.json"
MISSED = HERE / "missed.json"
WRITE = "GPU_DRY_WRITE"
"""Set this variable to rewrite `counts.json`."""

HALVES = (
    (
        "1.7b on 1, 2 layers",
        "1.7b on 1, 3 layers",
        "1.7b on 8, adapters",
        "8b on 1, torch attention",
        "1.7b on 1",
    ),
    ("8b on 8", "70b on 64", "70b on 64, last stage", "32b on 64, adapters", "1.7b on 8"),
)
"""Every case, in two processes of about equal time."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the cases did: `cases`, `provoked`, and `missed`, the lines that no process ran."""
    folder = tmp_path_factory.mktemp("gpu_dry")
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    started = []
    for number, names in enumerate(HALVES):
        out = folder / f"{number}.json"
        command = [sys.executable, "-m", "gpu_dry", "--out", str(out)]
        command += [word for name in names for word in ("--case", name)]
        started.append((subprocess.Popen(command, env=environment), out))
    for process, _ in started:
        assert process.wait() == 0, "a dry run failed: its error is above"
    first, second = (json.loads(out.read_text()) for _, out in started)
    return {
        "cases": {**first["cases"], **second["cases"]},
        "memory": {**first["memory"], **second["memory"]},
        "all": set(first["all"]),
        "provoked": first["provoked"],
        "missed": [line for line in first["missed"] if line in second["missed"]],
    }


def test_every_case_is_run(results: dict[str, Any]) -> None:
    assert {case for half in HALVES for case in half} == results["all"]


def test_kernels_and_syncs_are_those_of_the_table(results: dict[str, Any]) -> None:
    """A change of either is a decision: fewer, or more for a reason that the commit names."""
    counted = results["cases"]
    if WRITE in os.environ:
        COUNTS.write_text(json.dumps(counted, indent=1) + "\n")
    table = json.loads(COUNTS.read_text())
    assert counted.keys() == table.keys()
    changes = [
        f"{case}, {phase}: {table[case]['phases'].get(phase)} -> {counts}"
        for case, figures in counted.items()
        for phase, counts in figures["phases"].items()
        if counts != table[case]["phases"].get(phase)
    ]
    changes += [
        f"{case}: no phase {phase}"
        for case, figures in counted.items()
        for phase in table[case]["phases"].keys() - figures["phases"].keys()
    ]
    assert not changes, "\n".join([*changes, f"`{WRITE}=1 make gpu-dry` rewrites {COUNTS.name}"])


@pytest.mark.parametrize("phase", ["prefill and first decode", "decode", "switch", "old policy"])
def test_figures_of_a_few_layers_give_those_of_all(results: dict[str, Any], phase: str) -> None:
    """So the models that are cut to a few layers say what their whole depth does."""
    two, three, whole = (
        results["cases"][name]["phases"][phase]["kernels"]
        for name in ("1.7b on 1, 2 layers", "1.7b on 1, 3 layers", "1.7b on 1")
    )
    layers = results["cases"]["1.7b on 1"]["layers"]
    assert whole == two + (layers - 2) * (three - two)


def test_syncs_of_a_decode_step_do_not_grow_with_the_model(results: dict[str, Any]) -> None:
    syncs = {
        json.dumps(results["cases"][name]["phases"]["decode"]["syncs"])
        for name in ("1.7b on 1, 2 layers", "1.7b on 1, 3 layers", "1.7b on 1")
    }
    assert len(syncs) == 1


def test_lines_for_a_gpu_that_no_case_runs_are_listed_with_a_reason(
    results: dict[str, Any],
) -> None:
    listed = json.loads(MISSED.read_text())
    missed = results["missed"]
    assert all(listed.values()), "every line has a reason"
    new = sorted(set(missed) - listed.keys())
    assert not new, "\n".join(["run these, or list them with a reason:", *new])
    run = sorted(listed.keys() - set(missed))
    assert not run, "\n".join(["these are run, or gone: take them off the list", *run])


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("two devices", "FakeTensorDeviceMismatchError"),
        ("two dtypes", "AssertionError"),
        ("if tensor", "HiddenSync"),
        ("index by a mask", "DynamicOutputShapeException"),
        ("numpy", "HiddenSync"),
        ("flash-attn in float32", "AssertionError"),
        ("a mask of another dtype", "AssertionError"),
    ],
)
def test_a_mistake_raises(results: dict[str, Any], mistake: str, error: str) -> None:
    """Or a dry run would be green whatever the code did."""
    assert results["provoked"][mistake] == error


# Two layers, so that what a layer's backward pass holds for a moment weighs a tenth.
LESS_CLOSE = {("32b on 64, adapters", "update"): 0.12}


def test_the_memory_plan_is_within_five_percent_of_the_peaks(results: dict[str, Any]) -> None:
    """Bytes that torch's tracker counts in a phase, and those of `hybridrl plan memory`."""
    memory = results["memory"]
    if WRITE in os.environ:
        MEMORY.write_text(json.dumps(memory, indent=1) + "\n")
    assert json.loads(MEMORY.read_text()) == memory, f"`{WRITE}=1 make gpu-dry` rewrites it"
    for case, phases in memory.items():
        for phase, (peak, planned) in phases.items():
            most = LESS_CLOSE.get((case, phase), 0.05)
            assert abs(planned / peak - 1) < most, f"{case}, {phase}: {peak} counted, {planned}"
