"""On real ranks, a cycle of the packed schedule trains on the samples of serial, each once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS, WANTED, GROUP, CYCLE = 6, 4, 4, 4
# Weights stay nearly what they are, so that a response is the same in whichever step it is made.
STILL = [
    "deterministic=strict", "cluster.ranks=2", f"trainer.steps={STEPS}", "trainer.optim.lr=1e-20",
]  # fmt: skip
PACKED = ["schedule=packed", "schedule.limit_tokens=24", "trainer.save_every=3"]


@pytest.mark.layouts
def test_a_cycle_is_that_of_serial_in_another_order(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    """Tokens and log-probabilities bit for bit; also in a run that resumes within a cycle."""
    ours = tuple(setting.partition("=")[0] for setting in STILL)
    settings = [s for s in long_tail if not s.startswith(ours)] + STILL
    serial = train_here(tmp_path / "serial", *settings)
    packed = train_here(tmp_path / "run", *settings, *PACKED)
    told = {
        name: {s.id: s.scalars["told"] for step in run.steps for s in step.samples}
        for name, run in (("serial", serial), ("packed", packed))
    }
    assert len(told["serial"]) == STEPS * WANTED * GROUP
    assert told["packed"] == told["serial"]
    check_order(packed)
    # It ends after step 3, where prompts wait.
    copy = tmp_path / "copy"
    shutil.copytree(packed.dir, copy)
    shutil.rmtree(copy / "final")
    shutil.rmtree(copy / "checkpoints" / "step_000006", ignore_errors=True)
    state = json.loads((copy / "checkpoints/step_000003/resume/state.json").read_text())
    assert len(state["schedule"]["waiting"]) == WANTED
    rest = train_here(copy, *settings, *PACKED, "trainer.resume=auto")
    assert [[(s.id, s.scalars) for s in step.samples] for step in rest.steps] == [
        [(s.id, s.scalars) for s in step.samples] for step in packed.steps[3:]
    ]


def check_order(run: Any) -> None:
    """Short responses first in a cycle, in training order; some were put off; nothing is left."""
    for number, (step, line) in enumerate(zip(run.steps, run.metrics, strict=True)):
        assert [s.id for s in step.samples] == sorted(s.id for s in step.samples)
        assert {span.version for s in step.samples for span in s.spans} == {number}
        begin, end = (i * CYCLE * WANTED for i in (number // CYCLE, number // CYCLE + 1))
        assert all(begin <= s.id.prompt < end for s in step.samples)
        assert line["samples/limit_tokens"] == (0 if number in (CYCLE - 1, STEPS - 1) else 24)
    assert sum(line["samples/put_off"] for line in run.metrics) > 0
    assert sum(line["samples/discarded_tokens"] for line in run.metrics) > 0
    longest = [max(s.response_tokens for s in step.samples) for step in run.steps]
    assert longest[0] <= 24 < longest[CYCLE - 1]
    assert run.stored == [0] * len(run.stored)
