"""What of a run under faults is not as in the undisturbed one, and what may not be."""

import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from chaos.cases import Case
from resumed_runs import RECORDS, WHEN_MADE, check_same_state, lines

from hybridrl.telemetry.records import read_lines

Line = dict[str, Any]

WHEN_MOVED = (
    "samples/migrated",
    "samples/restarted",
    "samples/preempted",
    "plan/",
    "environment/replays",
)
"""Metrics that time or a death decides; the samples themselves are those of the undisturbed run.

Programs run again where a process of an environment has died, or where its sample has moved to.
"""
WHEN_PARKED = tuple(f"environment/{x}_kv_tokens" for x in ("kept", "moved", "recomputed"))
"""Metrics of samples that wait for a reply: whether they leave their instance meanwhile, for its
passes or as they migrate, follows from how long replies, calls and passes have taken.
"""
TIMED = {"fused": (*WHEN_MOVED, *WHEN_PARKED), "async": (*WHEN_MOVED, *WHEN_MADE)}
"""Metrics that time decides, by schedule; those of the others are `WHEN_MOVED`."""
_SOMETIMES = ("mismatch/", "plan/")
"""Timed metrics whose names time decides too: what new weights have made, plans that were taken."""
_TEXTS = ("prompt", "response", "turns")
_SHOWN = 20


def differences(whole: Path, run_dir: Path, case: Case, folder: Path) -> list[str]:
    """What of a run that has ended is not as in the undisturbed one."""
    wrong = []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            check_same_state(whole, run_dir, Path(temporary))
        except AssertionError as error:
            wrong.append(f"differs: {' '.join(str(error).split())[:600]}")
    wrong += record_differences(whole, run_dir, TIMED.get(case.schedule, WHEN_MOVED))
    samples = [x for x in read_lines(run_dir / "samples.jsonl") if x["phase"] == "rl"]
    twice = [id for id, count in Counter(x["id"] for x in samples).items() if count > 1]
    if twice:
        wrong.append(f"samples that are there twice: {twice}")
    for line in read_lines(run_dir / "metrics.jsonl"):
        if line.get("samples/staleness", 0) > 2:
            wrong.append(f"a staleness of {line['samples/staleness']} in step {line['step']}")
    for name in ("", "checkpoints", "final"):
        left = _hidden(run_dir / name) - _hidden(whole / name)
        wrong += [f"left in the run directory: {name}/{hidden}" for hidden in sorted(left)]
    return wrong


def record_differences(whole: Path, run_dir: Path, timed: tuple[str, ...]) -> list[str]:
    """Each record that differs, but for the values of metrics that begin as one of `timed`.

    Texts and digests that an instance took with it may be missing in the step of its death and in
    the next, whose samples may have been made already. No record says how many it had.
    """
    wrong = []
    deaths = [x["step"] for x in read_lines(run_dir / "events.jsonl") if x["kind"] == "death"]
    lossy = {step + later for step in deaths for later in (0, 1)}
    for name in RECORDS:
        ones, others = lines(whole, name, timed), lines(run_dir, name, timed)
        if lossy:
            pairs = list(zip_longest(ones, others, fillvalue=Line()))
            ones = [_without_lost(x, y) if y.get("step") in lossy else x for x, y in pairs]
            others = [_without_lost(y, y) if y.get("step") in lossy else y for _, y in pairs]
        if ones != others:
            wrong.append(f"differs: {name}; {_differing(ones, others)}")
    if odd := _odd_metrics(lines(whole, "metrics"), lines(run_dir, "metrics"), timed):
        wrong.append(f"differs: metrics; {', '.join(odd[:_SHOWN])}")
    return wrong


def _odd_metrics(ones: Sequence[Line], others: Sequence[Line], timed: tuple[str, ...]) -> list[str]:
    """Metrics of `timed` that one run alone has, or whose value is no finite number from 0 on."""
    odd = []
    for one, other in zip(ones, others, strict=False):  # their number is compared elsewhere
        for name in sorted(name for name in {**one, **other} if name.startswith(timed)):
            value, may_miss = float(other.get(name, 0.0)), name.startswith(_SOMETIMES)
            is_odd = not math.isfinite(value) or (value < 0 and not may_miss)
            if is_odd or ((name in one) != (name in other) and not may_miss):
                odd.append(f"step {other['step']} {name}: {one.get(name)}, {other.get(name)}")
    return odd


def _without_lost(line: Line, other: Line) -> Line:
    """A line of a record without what its `other`, of the run with a death, has lost."""
    if other.get("response", "") is None:
        return {key: value for key, value in line.items() if key not in _TEXTS}
    if isinstance(digests := line.get("samples"), dict):
        there = other.get("samples", {})
        return line | {"samples": {id: x for id, x in digests.items() if id in there}}
    return line


def _differing(ones: Sequence[Line], others: Sequence[Line]) -> str:
    """The keys that differ, in words."""
    shown = [f"{len(ones)} and {len(others)} lines"] * (len(ones) != len(others))
    for one, other in zip_longest(ones, others, fillvalue=Line()):
        place = f"step {(one or other)['step']} {(one or other).get('id', '')}".strip()
        keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
        shown += [f"{place} {x}: {str(one.get(x))[:60]}, {str(other.get(x))[:60]}" for x in keys]
    return ", ".join(shown[:_SHOWN])


def _hidden(folder: Path) -> set[str]:
    """Names of what is being written in a folder, and of what stays so."""
    return {path.name for path in folder.iterdir() if path.name.startswith(".")}
