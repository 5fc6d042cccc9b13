"""Digests of a step: whether two runs computed the same bits, without keeping the tensors.

`digests.jsonl` has a line for each step: the scalars of every sample, digests of its tensors and of
the trained weights. `compare_steps` finds what differs between two lines, in the order of the
stages.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridrl.telemetry.records import TEXTS, read_lines

FILE = "digests.jsonl"


@dataclass(frozen=True, slots=True)
class ShardDigest:
    """A rank's part of a tensor: a hash of its bytes, the sum of its squares, its elements.

    `square` is None for numbers that stand for something else, token ids say.
    """

    hash: str
    square: float | None
    size: int


def joined(shards: Sequence[ShardDigest]) -> list[str | float | None]:
    """The digest of a whole tensor from its shards in rank order: hash, and root mean square."""
    text = shards[0].hash
    if len(shards) > 1:
        parts = "".join(shard.hash for shard in shards)
        text = hashlib.blake2b(parts.encode(), digest_size=8).hexdigest()
    squares = [shard.square for shard in shards if shard.square is not None]
    size = sum(shard.size for shard in shards)
    return [text, math.sqrt(sum(squares) / size) if squares and size else None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What a run has recorded of a step, or of as much of it as was computed.

    `fields` maps each field of a sample to the stage that made it, in the recipe's order, and
    `updates` each trained role to its stage. A value is a scalar, or the digest of a tensor.
    `dropped` has the samples that no update read, with the reason. `numbers` are those of an
    update by role: `loss`, `grad_norm`. `weights` are digests by role and parameter. `exact` says
    whether all samples and weights are there; else a few samples' texts stand for them.
    """

    fields: dict[str, str]
    updates: dict[str, str]
    samples: dict[str, dict[str, Any]]
    dropped: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    exact: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One field of a step's samples, one number or the weights of a role, in two runs.

    `compared` counts values, `differing` those that are not the same bits. `first` names the first
    of them (a sample, a parameter), with both `values`. `most` is the largest difference, relative
    to values above 1; infinite where the values are no numbers. `role` is that of an update.
    """

    stage: str
    name: str
    role: str = ""
    compared: int = 0
    differing: int = 0
    first: str = ""
    values: tuple[str, str] = ("", "")
    most: float = 0.0

    def within(self, tolerance: float) -> bool:
        """Whether nothing differs by more than `tolerance`; 0 asks for the same bits."""
        return not self.differing or (tolerance > 0 and self.most <= tolerance)

    @property
    def verdict(self) -> str:
        """`equal`, or how many differ, by how much, and which first."""
        if not self.differing:
            return "equal"
        amount = "" if math.isinf(self.most) else f" by up to {self.most:.2g}"
        shown = f": {self.values[0]} and {self.values[1]}" if all(self.values) else ""
        return f"{self.differing} of {self.compared} differ{amount}, first {self.first}{shown}"


def read_steps(run_dir: Path) -> dict[int, StepRecord]:
    """The recorded steps of a run by number; of a step that was run again, the later record."""
    steps = {}
    for line in read_lines(run_dir / FILE):
        values = {name: line[name] for name in StepRecord.__dataclass_fields__ if name in line}
        steps[int(line["step"])] = StepRecord(**values)
    return steps


def step_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are about steps, without evaluations."""
    return [line for line in read_lines(run_dir / "metrics.jsonl") if "step_s" in line]


def coarse_steps(run_dir: Path) -> dict[int, StepRecord]:
    """The steps of a run from its metrics and the few samples that every run keeps.

    A sample whose texts were lost with their instance has its other values alone.
    """
    samples: dict[int, dict[str, dict[str, Any]]] = {}
    for line in read_lines(run_dir / "samples.jsonl"):
        if line.get("phase") != "evaluation":
            kept = {name: line.get(name) for name in _COARSE}
            samples.setdefault(int(line["step"]), {})[str(line["id"])] = kept
    numbers: dict[int, dict[str, dict[str, float]]] = {}
    for line in step_lines(run_dir):
        of_step = numbers[int(line["step"])] = {}
        for key, value in line.items():
            role, _, name = key.rpartition("/")
            if name in _NUMBERS:
                of_step.setdefault(role or "actor", {})[name] = float(value)
    return {
        step: StepRecord(
            fields=dict(_COARSE),
            updates={role: f"update_{role}" for role in numbers.get(step, {})},
            samples=samples.get(step, {}),
            numbers=numbers.get(step, {}),
            exact=False,
        )
        for step in sorted(numbers.keys() | samples.keys())
    }


_NUMBERS = ("loss", "grad_norm")
_COARSE = {
    "response": "generate",
    "tokens": "generate",
    "reward": "reward",
    "status": "reward",
    "advantage": "advantage",
}


def compare_steps(one: StepRecord, other: StepRecord, batch_only: bool = False) -> list[Comparison]:
    """Everything that both records have, in the order in which a step computes it.

    With `batch_only` the second may have more samples, and no update has run.
    """
    comparisons = [_samples(one, other, batch_only)] if one.exact and other.exact else []
    shared = sorted(one.samples.keys() & other.samples.keys(), key=_order)
    for name, stage in (one.fields | other.fields).items():
        pairs = {id: (one.samples[id].get(name), other.samples[id].get(name)) for id in shared}
        values = {f"sample {id}": x for id, x in pairs.items() if not _is_missing(name, x)}
        if values:
            comparisons.append(_compared(stage, name, values))
    if batch_only:
        return comparisons
    if one.dropped or other.dropped:
        reasons = {
            f"sample {id}": (one.dropped.get(id, "trained"), other.dropped.get(id, "trained"))
            for id in shared
        }
        comparisons.append(_compared("filter", "dropped", reasons))
    for role, stage in one.updates.items():
        comparisons += _update(role, stage, one, other)
    return comparisons


def _is_missing(name: str, values: tuple[Any, Any]) -> bool:
    """Whether there is nothing to compare: a text may be lost with its instance in one run."""
    return None in values if name in TEXTS else values == (None, None)


def _samples(one: StepRecord, other: StepRecord, batch_only: bool) -> Comparison:
    """Which samples the step has."""
    stage = next(iter(one.fields.values()), "generate")
    missing = {
        f"sample {id}": ("there", "missing") for id in one.samples.keys() - other.samples.keys()
    }
    if not batch_only:
        more = other.samples.keys() - one.samples.keys()
        missing |= {f"sample {id}": ("missing", "there") for id in more}
    missing = dict(sorted(missing.items(), key=lambda pair: _order(pair[0].split()[1])))
    return replace(_compared(stage, "samples", missing), compared=len(one.samples))


def _update(role: str, stage: str, one: StepRecord, other: StepRecord) -> list[Comparison]:
    mine, others = one.numbers.get(role, {}), other.numbers.get(role, {})
    comparisons = [
        _compared(stage, name, {f"{role}'s {name}": (mine.get(name), others.get(name))})
        for name in _NUMBERS
        if name in mine or name in others
    ]
    before, after = one.weights.get(role, {}), other.weights.get(role, {})
    if before and after:
        names = [*before, *(name for name in after if name not in before)]
        values = {name: (before.get(name), after.get(name)) for name in names}
        comparisons.append(_compared(stage, "weights", values))
    return [replace(comparison, role=role) for comparison in comparisons]


def _compared(stage: str, name: str, values: Mapping[str, tuple[Any, Any]]) -> Comparison:
    differing = {key: pair for key, pair in values.items() if not _same(*pair)}
    first = next(iter(differing), "")
    return Comparison(
        stage=stage,
        name=name,
        compared=len(values),
        differing=len(differing),
        first=first,
        values=(_shown(differing[first][0]), _shown(differing[first][1])) if first else ("", ""),
        most=max((_difference(*pair) for pair in differing.values()), default=0.0),
    )


def _order(sample: str) -> tuple[Any, ...]:
    """The order of the ids of samples: 12.0 before 100.0."""
    return tuple((not x.isdecimal(), int(x) if x.isdecimal() else x) for x in sample.split("."))


def _same(one: Any, other: Any) -> bool:
    """Whether two values, or two digests, are the same bits; NaN is itself."""
    if isinstance(one, list) and isinstance(other, list):
        return bool(one[0] == other[0])
    return bool(one == other or (one != one and other != other))  # only NaN is not itself


def _difference(one: Any, other: Any) -> float:
    """How far two values are apart, relative to their size above 1."""
    a, b = _number(one), _number(other)
    if a is None or b is None or math.isnan(a - b):
        return math.inf
    return abs(a - b) / max(1.0, abs(a), abs(b))


def _number(value: Any) -> float | None:
    value = value[1] if isinstance(value, list) else value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ""  # a digest says nothing to a reader
    return repr(value) if isinstance(value, float) else str(value)[:60]
