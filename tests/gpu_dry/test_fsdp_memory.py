"""Both models of memory against torch's `FSDPMemTracker`: 8 B parameters, 64 ranks, no GPU."""

from typing import Any

import pytest

from gpu_dry.processes import fsdp_memory
from gpu_dry.tables import MOST

pytestmark = [pytest.mark.gpu_dry, pytest.mark.timeout(900)]

CASES = {
    "fsdp 64": 1,
    "fsdp 64, two micro-batches": 2,
    "fsdp 64, recompute": 1,
    "replicas 4, fsdp 16": 1,
    "fsdp 16, tp 4": 1,
    "fsdp 32, pp 2": 4,
    "fsdp 16, pp 2, tp 2, recompute": 4,
    "fsdp 16, tp 4, sequence parallel, recompute": 1,
}
"""Rows of the update under each layout."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return fsdp_memory(tmp_path_factory.mktemp("fsdp_memory") / "bytes.json")


def test_every_layout_is_run(results: dict[str, dict[str, Any]]) -> None:
    assert {name: figures["rows"] for name, figures in results.items()} == CASES


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("plan", ["plan auto", "plan memory"])
def test_a_plan_is_within_five_percent_of_the_peak(
    results: dict[str, dict[str, Any]], case: str, plan: str
) -> None:
    """Of forward, backward and the optimizer's step on the engine's own modules."""
    figures = results[case]
    assert abs(figures[plan] / figures["counted"] - 1) < MOST, figures


@pytest.mark.parametrize("case", CASES)
def test_the_dry_runs_count_as_many_bytes(results: dict[str, dict[str, Any]], case: str) -> None:
    """`PeakMemory` has no accounts by module, and the same peak."""
    assert results[case]["dry run"] == results[case]["counted"]
