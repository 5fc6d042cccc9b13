"""A few seeds of `make test-chaos`, and what a seed draws."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from chaos.cases import CALLS, NOTHING, Kind, draw, num_ranks
from chaos.summary import summary

SEEDS = [[144], [232, 266]]
"""A driver that is killed twice, once amid a line of a record; ranks that are, and SIGTERM."""


def test_a_seed_draws_the_same_faults_each_time() -> None:
    cases = [draw(seed) for seed in range(300)]
    assert cases == [draw(seed) for seed in range(300)]
    faults = Counter(fault.kind for case in cases for fault in case.faults)
    assert faults.keys() == {*Kind}
    assert min(faults.values()) > 30
    assert len({case.setting for case in cases[:10]}) == 10
    for case in cases:
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
    text = summary(lines)
    assert text.startswith("2 runs under 4 faults (2 more were drawn for moments that did not come")
    assert "have 2 restarts; the command was given again 2 times." in text
    assert "| a rank is killed | 2 | 2 | 1 |" in text
    assert "| the driver is killed | 2 | 2 | 1 |" in text
    assert "a bit of such a file flipped | 0 | 0 | 0 |" in text
    assert text.endswith("The call that the drawn rank was in: update 2, none 2.")


@pytest.mark.layouts
@pytest.mark.parametrize(
    "seeds", [SEEDS[0], pytest.param(SEEDS[1], marks=pytest.mark.wide)], ids=str
)
def test_whatever_befalls_a_run_it_ends_and_its_parameters_are_those_without(
    tmp_path: Path, seeds: list[int]
) -> None:
    """`make test-chaos` has more seeds: other schedules and recipes, and the other kinds."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("file systems cannot be mounted here, to be full or read-only")
    file = tmp_path / "chaos.jsonl"
    command = [sys.executable, "-m", "chaos", str(file), "--seeds", *map(str, seeds)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["seed"] for line in lines] == seeds
    assert sum(len(line["struck"]) for line in lines) >= len(seeds)
