"""What tests of resumed runs share: a run as if it had been killed, and when runs are the same."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hybridrl.telemetry.records import read_lines

TIMES = (
    *("time", "_s", "tokens_per_s/actor", "tokens_per_s/rollout", "mfu"),
    *("bubble_share", "bubble_share/actor", "bubble_share/rollout"),
)
"""Ends of keys that time decides."""
WHEN_MADE = ("mismatch/", "samples/generated_tokens")
"""Metrics that say how far instances of their own are ahead of training."""

RECORDS = ("metrics", "samples", "lengths", "digests")


def tensors(checkpoint: Path, folder: Path) -> dict[str, torch.Tensor]:
    """All that a checkpoint has to go on from, whole: parameters, moments, averages."""
    file, tensors = folder / "whole.pt", {}
    for role in state(checkpoint)["roles"]:
        dcp_to_torch_save(checkpoint / "resume" / role, file)
        tensors |= {f"{role}/{name}": tensor for name, tensor in torch.load(file).items()}
    return tensors


def lines(run_dir: Path, name: str, timed: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The lines of a record, without what time decides and keys that begin as one of `timed`."""
    return [
        {
            key: value
            for key, value in line.items()
            if not key.endswith(TIMES) and not key.startswith(timed)
        }
        for line in read_lines(run_dir / f"{name}.jsonl")
    ]


def state(checkpoint: Path) -> dict[str, Any]:
    driver_state: dict[str, Any] = json.loads((checkpoint / "resume" / "state.json").read_text())
    return driver_state


def check_same(one: Path, other: Path, folder: Path, timed: tuple[str, ...] = ()) -> None:
    """Two runs that are over: every tensor, the driver's state, the records but `timed` metrics."""
    check_same_state(one, other, folder)
    for name in RECORDS:
        assert lines(one, name, timed) == lines(other, name, timed), name


def check_same_state(one: Path, other: Path, folder: Path) -> None:
    """Two runs that are over: every tensor, and the driver's state."""
    a, b = tensors(one / "final", folder), tensors(other / "final", folder)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    before, after = state(one / "final"), state(other / "final")
    for key in ("step", "phase", "prompts", "roles", "recipe", "bad_steps", "evaluated", "before"):
        assert before[key] == after[key], key


def ended(run_dir: Path, copy: Path, step: int) -> Path:
    """A copy of a run, as if it had been killed some time after the checkpoint of `step`."""
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "final")
    for path in (copy / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    return copy
