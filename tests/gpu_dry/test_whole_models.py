"""What takes too long for `make gpu-dry`.

Every model at its whole depth does what `counts.json` says of it from two depths. What is
in `OTHER_RANKS` is cut, as in `make gpu-dry`.
"""

import json
from typing import Any

import pytest

from gpu_dry.cases import FULL, OTHER_RANKS
from gpu_dry.processes import run_processes
from gpu_dry.tables import COUNTS, count_changes, memory_changes
from gpu_dry.whole import differences

pytestmark = [pytest.mark.gpu_dry_full, pytest.mark.timeout(7200)]

HALVES = (
    (
        "32b on 64, adapters",
        "8b on 8",
        "1.7b on 8",
        "8b on 1, torch attention",
        "8b on 1, varlen attention",
        "8b on 8, replicas",
        "1.7b on 1",
        "8b on 8, zero bubble",
        "32b on 8",
        "1.7b on 64",
        "70b on 1",
        "30b-a3b on 8",
    ),
    (
        "32b on 64, zero bubble",
        "70b on 64, last stage",
        "70b on 64",
        "8b on 8, adapters",
        "8b on 1, strict",
        "8b on 8, offload and muon",
        "70b on 8",
        "8b on 64",
        "32b on 1",
    ),
)
"""Every case that is cut in `make gpu-dry`, and those of `OTHER_RANKS`, in two processes of about
equal time."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What every case did, by `cases` and `memory`."""
    first, second = run_processes(tmp_path_factory.mktemp("gpu_dry"), HALVES, "--full")
    both = {key: first[key] | second[key] for key in ("cases", "memory")}
    assert both["cases"].keys() == set(first["all"])
    return both


def test_figures_of_two_depths_give_those_of_whole_models(results: dict[str, Any]) -> None:
    table = json.loads(COUNTS.read_text())
    lines = [
        line for name in FULL for line in differences(name, table[name], results["cases"][name])
    ]
    assert not lines, "\n".join(lines)


def test_models_on_other_ranks_do_what_the_tables_say(results: dict[str, Any]) -> None:
    cases, memory = ({name: results[key][name] for name in OTHER_RANKS} for key in results)
    changes = count_changes(cases) + memory_changes(memory)
    assert not changes, "\n".join(changes)
