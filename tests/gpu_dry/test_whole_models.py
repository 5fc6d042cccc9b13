"""Every model at its whole depth does what `counts.json` says of it from two depths."""

import json
from pathlib import Path

import pytest

from gpu_dry.processes import run_processes
from gpu_dry.whole import differences

pytestmark = [pytest.mark.gpu_dry_full, pytest.mark.timeout(7200)]

COUNTS = Path(__file__).with_name("counts.json")

HALVES = (
    (
        "32b on 64, adapters",
        "8b on 8",
        "1.7b on 8",
        "8b on 1, torch attention",
        "1.7b on 1",
        "8b on 8, zero bubble",
    ),
    (
        "32b on 64, zero bubble",
        "70b on 64, last stage",
        "70b on 64",
        "8b on 8, adapters",
        "8b on 1, strict",
        "8b on 8, offload and muon",
    ),
)
"""Every case that is cut in `make gpu-dry`, in two processes of about equal time."""


def test_figures_of_two_depths_give_those_of_whole_models(tmp_path: Path) -> None:
    table = json.loads(COUNTS.read_text())
    differing = run_processes(tmp_path, HALVES, "--full")
    counted = differing[0]["cases"] | differing[1]["cases"]
    assert counted.keys() == set(differing[0]["all"])
    lines = [
        line
        for name, figures in counted.items()
        for line in differences(name, table[name], figures)
    ]
    assert not lines, "\n".join(lines)
