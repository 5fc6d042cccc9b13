"""The models of memory against torch's `FSDPMemTracker`: 8 B parameters, 64 ranks, no GPU."""

from typing import Any

import pytest

from gpu_dry.processes import fsdp_memory
from gpu_dry.tables import MOST

pytestmark = pytest.mark.timeout(900)

ROWS = {
    "fsdp 64": 1,
    "fsdp 64, two micro-batches": 2,
    "fsdp 64, recompute": 1,
    "replicas 4, fsdp 16": 1,
    "replicas 4, fsdp 16, two micro-batches": 2,
    "fsdp 16, tp 4": 1,
    "fsdp 32, pp 2": 4,
    "fsdp 16, pp 2, tp 2, recompute": 4,
    "fsdp 16, tp 4, sequence parallel, recompute": 1,
}
"""Rows of the update under each layout."""
SOME = ("fsdp 64, two micro-batches", "fsdp 16, tp 4", "fsdp 32, pp 2")
"""Run by `make gpu-dry`, the others by `make gpu-dry-full`."""
OTHERS = tuple(name for name in ROWS if name not in SOME)

Figures = dict[str, dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SOME, marks=pytest.mark.gpu_dry),
        pytest.param(OTHERS, marks=pytest.mark.gpu_dry_full),
    ],
    ids=["some", "others"],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Figures:
    """Figures of the whole model; with `--narrow` of eight layers, where embeddings weigh more."""
    out = tmp_path_factory.mktemp("fsdp_memory") / "bytes.json"
    cut = ["--layers=8"] if request.config.getoption("narrow") else []
    figures = fsdp_memory(out, request.param, *cut)
    assert list(figures) == list(request.param)
    return figures


def test_an_update_has_as_many_rows(results: Figures) -> None:
    assert {name: figures["rows"] for name, figures in results.items()} == {
        name: ROWS[name] for name in results
    }


@pytest.mark.parametrize("plan", ["plan auto", "plan memory"])
def test_a_plan_is_within_five_percent_of_the_peak(results: Figures, plan: str) -> None:
    """The peak is that of forward, backward and optimizer step on the engine's own modules."""
    for name, figures in results.items():
        assert abs(figures[plan] / figures["counted"] - 1) < MOST, (name, figures)


def test_the_dry_runs_count_as_many_bytes(results: Figures) -> None:
    """`PeakMemory` has no accounts by module, and the same peak."""
    for name, figures in results.items():
        assert figures["dry run"] == figures["counted"], name
