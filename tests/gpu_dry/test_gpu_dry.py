"""The package's CUDA branches on fake GPUs: every phase runs, and what it costs is in a table."""

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_dry.case import MIXED
from gpu_dry.cases import CASES, OTHER_RANKS, WIDE
from gpu_dry.processes import missed_by_tests, run_processes
from gpu_dry.refused import COMPUTED, REFUSED, refused_by_torchs_page
from gpu_dry.tables import (
    BY_DRIVER,
    BY_SAMPLER,
    COUNTS,
    MEMORY,
    MISSED,
    NOT_RUN,
    RUN_BY,
    WRITE,
    count_changes,
    memory_changes,
)
from gpu_dry.whole import OVER_LIMIT, differences, multiplied

pytestmark = [pytest.mark.gpu_dry, pytest.mark.timeout(1800)]

STATE = "hybridrl/engines/train/state_memory.py"
HALVES = (
    (
        "8b on 8, zero bubble",
        "70b on 64, last stage",
        "70b on 64",
        "1.7b on 8",
        "32b on 64, zero bubble",
        "8b on 8",
        "8b on 8, chunks",
        "30b-a3b on 8",
        "8b on 8, selective",
    ),
    (
        "1.7b on 1",
        "8b on 8, adapters",
        "8b on 1, strict",
        "8b on 1, varlen attention",
        "8b on 1, torch attention",
        "32b on 64, adapters",
        "8b on 8, offload and muon",
        "8b on 8, cp",
        "8b on 8, replicas",
        "30b-a3b on 8, ep",
        "8b on 8, selective and tp",
        "30b-a3b on 8, selective",
    ),
)
"""Every case, in two processes of about equal time."""


@pytest.fixture(scope="module")
def results(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> dict[str, Any]:
    """What the cases did: `cases`, `provoked`, and `missed`, the lines that no process ran."""
    left_out = WIDE if pytestconfig.getoption("narrow") else ()
    halves = [[name for name in half if name not in left_out] for half in HALVES]
    first, second = run_processes(tmp_path_factory.mktemp("gpu_dry"), halves)
    return {
        "cases": {**first["cases"], **second["cases"]},
        "memory": {**first["memory"], **second["memory"]},
        "attention": {**first["attention"], **second["attention"]},
        "all": set(first["all"]),
        "provoked": first["provoked"],
        "host copies": first["host copies"],
        "missed": [line for line in first["missed"] if line in second["missed"]],
    }


def test_every_case_is_run(results: dict[str, Any]) -> None:
    assert {case for half in HALVES for case in half} == results["all"]


def test_kernels_and_syncs_are_those_of_the_table(results: dict[str, Any]) -> None:
    """A change of either is a decision: fewer, or more for a reason that the commit names."""
    changes = count_changes(results["cases"])
    assert not changes, "\n".join([*changes, f"`{WRITE}=1 make gpu-dry` rewrites {COUNTS.name}"])


def test_the_tables_have_the_cases_that_are_cut() -> None:
    """Cases that only train are for the memory plan: their kernels are those of others."""
    cases = CASES | OTHER_RANKS
    assert json.loads(MEMORY.read_text()).keys() == cases.keys()
    counted = {name for name, case in cases.items() if not case.only_trains}
    assert json.loads(COUNTS.read_text()).keys() == counted


def test_no_count_of_the_tables_is_negative() -> None:
    for case, figures in json.loads(COUNTS.read_text()).items():
        for phase, counts in figures["phases"].items():
            numbers = [counts["kernels"], counts["collectives"], *counts["syncs"].values()]
            assert min(numbers) >= 0, (case, phase, counts)


def test_what_only_the_first_model_of_a_process_does_is_no_figure_of_a_whole_one() -> None:
    def figures(uploads: int) -> dict[str, Any]:
        return {"phases": {"decode": {"kernels": 9, "collectives": 0, "syncs": {"f": uploads}}}}

    whole = multiplied(figures(4), figures(4), (2, 3), 28)
    assert whole["phases"]["decode"]["syncs"] == {"f": 4}
    with pytest.raises(AssertionError, match="decode, f: 4 and 0 of two depths give -100"):
        multiplied(figures(4), figures(0), (2, 3), 28)


def test_another_figure_of_a_phase_is_a_difference() -> None:
    def figures(kernels: int, syncs: dict[str, int]) -> dict[str, Any]:
        return {"kernels": kernels, "collectives": 7, "syncs": syncs}

    def differing(phase: str, first: Any, second: Any, case: str = "case") -> int:
        one, other = ({"layers": 10, "phases": {phase: x}} for x in (first, second))
        return len(differences(case, one, other))

    read = {"f: read": 1}
    assert not differing("decode", figures(1000, read), figures(1000, read))
    assert differing("decode", figures(1001, read), figures(1000, read)) == 1
    assert differing("decode", figures(1000, {}), figures(1000, read)) == 1
    assert not differing("switch", figures(1001, read), figures(1000, read))
    assert differing("switch", figures(1200, read), figures(1000, read)) == 1
    assert differing("update", figures(1001, read), figures(1000, read)) == 1
    assert not differing("update", figures(1001, read), figures(1000, read), "8b, muon")


@pytest.mark.parametrize(
    ("case", "phase", "cut", "whole", "differs"),
    [
        ("8b, adapters", "save", 1, 1, False),
        ("8b, adapters", "save", 1, 421, False),
        ("8b, adapters", "save", 1, 422, True),  # ten layers have 420 tensors
        ("8b, adapters", "save", 1, 0, True),
        ("8b, adapters", "save", 2, 421, True),
        ("8b, adapters", "load", 1, 421, True),
        ("8b", "save", 1, 421, True),
        ("8b", "save", 500, 1000, True),
    ],
)
def test_only_saved_adapters_may_wait_for_each_tensor(
    case: str, phase: str, cut: int, whole: int, differs: bool
) -> None:
    """Where a few layers of them wait once."""
    first, second = (
        {
            "layers": 10,
            "phases": {phase: {"kernels": 7, "collectives": 7, "syncs": {OVER_LIMIT: waits}}},
        }
        for waits in (cut, whole)
    )
    assert bool(differences(case, first, second)) is differs


@pytest.mark.parametrize("name", ["8b on 1, torch attention", "8b on 8", "30b-a3b on 8"])
def test_syncs_of_a_decode_step_do_not_grow_with_the_model(
    results: dict[str, Any], name: str
) -> None:
    """A large model waits as often as a small one."""
    cases = results["cases"]
    syncs = cases["1.7b on 1"]["phases"]["decode"]["syncs"]
    assert sum(cases[name]["phases"]["decode"]["syncs"].values()) <= sum(syncs.values())


@pytest.mark.parametrize(
    ("name", "most", "collectives"),
    [
        ("1.7b on 1", 10, 0),
        ("1.7b on 8", 10, 0),
        ("8b on 1, torch attention", 10, 0),
        ("8b on 8", 10, 2),
        ("70b on 64, last stage", 10, 2),
        ("30b-a3b on 8", 14, 2),
    ],
)
def test_a_decode_step_is_the_replay_of_a_graph(
    results: dict[str, Any], name: str, most: int, collectives: int
) -> None:
    """Few kernels a layer, nothing goes in, and the wait is that for the step before."""
    decode = results["cases"][name]["phases"]["decode"]
    assert decode["kernels_per_layer"] <= most
    assert decode["collectives_per_layer"] == collectives
    assert (decode["replays"], decode["replayed"]) == (1, decode["kernels"])
    files = "hybridrl/engines/rollout/device_copies.py"
    assert decode["syncs"] == {f"{files} wait: wait": 1}
    assert decode["copies"] == {f"{files} <listcomp>: out": 2}
    first = results["cases"][name]["phases"]["prefill and first decode"]
    assert not first["syncs"], "there is no step before it"


def test_a_step_copies_the_state_in_few_pieces(results: dict[str, Any]) -> None:
    """Trained weights and moments out and in, with adapters what is frozen in; none is waited for.

    A copy of memory that is not pinned would be waited for. What stays is not copied.
    """
    step, leaves = ("switch after updates", "onload with moments"), 0
    for name, figures in results["cases"].items():
        counted = [figures["phases"][phase] for phase in step]
        copies = sum(n for x in counted for f, n in x.get("copies", {}).items() if STATE in f)
        frozen = "adapters" in name
        assert copies == (0 if CASES[name].staying else 4 + frozen), name
        assert not [f for x in counted for f in x["syncs"] if STATE in f], name
        leaves += copies > 0
    assert leaves > 1


def test_what_is_not_waited_for_is_copied_from_and_to_pinned_memory(
    results: dict[str, Any],
) -> None:
    """Else torch copies while the host waits, whatever the caller asked for."""
    pageable = [
        (name, phase, sync)
        for name, figures in results["cases"].items()
        for phase, counted in figures["phases"].items()
        for sync in counted["syncs"]
        if sync.endswith(": pageable")
    ]
    assert not pageable


@pytest.mark.parametrize(
    ("memory", "is_pinned"),
    [
        ("ordinary", False),
        ("pin_memory()", True),
        ("pin_memory=True", True),
        ("converted", False),
        ("pinned_bytes", True),
        ("pinned_bytes of a CPU", False),
        ("copied out", True),
        ("read", False),
    ],
)
def test_a_fake_gpu_knows_pinned_memory(
    results: dict[str, Any], memory: str, is_pinned: bool
) -> None:
    """Pinned memory is copied in and out by copies that are not to be waited for."""
    wanted = {"in": 1, "out": 1} if is_pinned else {"pageable": 2}
    assert results["host copies"][memory] == wanted


def test_the_adapters_switch_waits_once(results: dict[str, Any]) -> None:
    """When all is launched, besides its proof; weights below adapters come from pinned memory."""
    for name, figures in results["cases"].items():
        syncs = figures["phases"]["switch after updates"]["syncs"]
        waits = {f: n for f, n in syncs.items() if f.startswith("hybridrl/layout/")}
        place = "adapters.py switch" if "adapters" in name else "weight_switch.py _switch"
        proof = {"hybridrl/layout/proof.py compare: read": 1}
        assert waits == {f"hybridrl/layout/{place}: wait": 1} | proof, name


def test_lines_for_a_gpu_that_no_case_runs_are_listed_with_a_reason(
    results: dict[str, Any],
) -> None:
    listed = json.loads(MISSED.read_text())
    missed = results["missed"]
    new = sorted(set(missed) - listed.keys())
    assert not new, "\n".join(["run these, or list them with a reason:", *new])
    run = sorted(listed.keys() - set(missed))
    assert not run, "\n".join(["these are run, or gone: take them off the list", *run])


def test_every_reason_is_checked_or_known() -> None:
    """One that is worded anew would be believed."""
    reasons = set(json.loads(MISSED.read_text()).values())
    others = {reason for reason in reasons if not reason.startswith(RUN_BY)}
    assert others == {BY_DRIVER, BY_SAMPLER, *NOT_RUN}


def test_lines_that_ordinary_tests_run_are_run_by_them(tmp_path: Path) -> None:
    """Each by the one that its reason names, in a process with the same probes."""
    reasons = json.loads(MISSED.read_text()).items()
    tests = {line: why.removeprefix(RUN_BY) for line, why in reasons if why.startswith(RUN_BY)}
    missed = missed_by_tests(tmp_path, sorted(set(tests.values())))
    wrong = [f"{line}: {test}" for line, test in tests.items() if line in missed[test]]
    assert not wrong, "\n".join(["the tests named do not run these:", *wrong])


@pytest.mark.parametrize(
    ("mistake", "error"),
    [
        ("two devices", "FakeTensorDeviceMismatchError"),
        ("two dtypes", "AssertionError"),
        ("if tensor", "HiddenSync"),
        ("index by a mask", "DynamicOutputShapeException"),
        ("numpy", "HiddenSync"),
        ("read in a capture", "HiddenSync"),
        ("upload in a capture", "HiddenSync"),
        ("flash-attn in float32", "AssertionError"),
        ("varlen_attn in float32", "AssertionError"),
        ("varlen_attn without grouped heads", "ValueError"),
        ("a mask of another dtype", "AssertionError"),
        ("bincount with weights", "RuntimeError"),
        ("a histogram of floats", "RuntimeError"),
        ("a median with indices", "RuntimeError"),
        ("a product by index", "RuntimeError"),
    ],
)
def test_a_mistake_raises(results: dict[str, Any], mistake: str, error: str) -> None:
    """Or a dry run would be green whatever the code did."""
    assert results["provoked"][mistake] == error


def test_a_row_of_mixed_lengths_is_one_call_of_attention(results: dict[str, Any]) -> None:
    """Each layer makes one in a forward pass; an update has two of these and a backward pass.

    This is without flash-attn. torch's `scaled_dot_product_attention` makes one for each length.
    """
    calls, lengths = results["attention"], len(set(MIXED))
    for phase, passes in {"reference": 1, "old policy": 1, "judge": 1, "update": 3}.items():
        assert calls["8b on 1, varlen attention"][phase] == passes, phase
        assert calls["8b on 1, torch attention"][phase] == passes * lengths, phase
    assert lengths > 2


def test_torchs_page_names_what_a_fake_gpu_refuses() -> None:
    """Under `deterministic=strict`: a function that a newer torch adds is a decision."""
    assert refused_by_torchs_page() == REFUSED.keys()
    assert COMPUTED.keys() <= REFUSED.keys()


def test_the_memory_plan_is_within_five_percent_of_the_peaks(results: dict[str, Any]) -> None:
    """Bytes that torch's tracker counts in a phase, and those of `hybridrl plan memory`."""
    changes = memory_changes(results["memory"])
    assert not changes, "\n".join([*changes, f"`{WRITE}=1 make gpu-dry` rewrites {MEMORY.name}"])
