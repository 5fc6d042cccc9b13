"""The figures of a whole model from those of two depths, and how they compare with its own."""

from typing import Any

Figures = dict[str, Any]
"""The figures of a case.

`phases` has `kernels`, `collectives`, `syncs` and `copies` by function, in each phase.
"""

BY_BUCKETS = {
    "build", "switch", "switch after updates", "copy weights", "copy average", "save"
}  # fmt: skip
"""Phases that move weights between ranks, or to a file, in buckets of a fixed size. A bucket has
parts of several layers, so their figures do not grow by the same number each layer."""
TOLERANCE, FEW = 0.1, 8
"""In those: 70B on 64 ranks is 6.4 % off. Adapters fill few buckets: 32B has 7, by its line 1."""
OVER_LIMIT = "hybridrl/checkpoint/distributed.py write_data: wait"
"""torch waits once for all that a rank writes, or for each tensor where that is above 10 MB.
Adapters of a few layers have less, those of a whole model may have more: see `_may_wait_more`."""
ADAPTER_TENSORS = 7 * 2 * 3
"""What a layer's adapters are saved as: seven products of two factors, each with two moments."""


def multiplied(few: Figures, more: Figures, depths: tuple[int, int], layers: int) -> Figures:
    """The figures of `layers` layers, on the line through those of two depths.

    A negative figure does not follow from the depth. The second model has then found something that
    the first one left in the process.
    """
    shallow, deep = depths
    steps = (layers - shallow) / (deep - shallow)

    def whole(first: int, second: int, what: str) -> int:
        number = round(first + steps * (second - first))
        assert number >= 0, f"{what}: {first} and {second} of two depths give {number}"
        return number

    phases = {}
    for name, a in few["phases"].items():
        b = more["phases"][name]
        figures: Figures = {}
        for key in ("kernels", "collectives"):
            figures[key] = whole(a[key], b[key], f"{name}, {key}")
            figures[f"{key}_per_layer"] = round((b[key] - a[key]) / (deep - shallow), 2)
        for key in ("replays", "replayed"):
            if key in a:
                figures[key] = whole(a[key], b[key], f"{name}, {key}")
        for key in ("syncs", "copies"):
            one, other = a.get(key, {}), b.get(key, {})
            counts = {
                x: whole(one.get(x, 0), other.get(x, 0), f"{name}, {x}")
                for x in sorted({*one, *other})
            }
            if counts or key == "syncs":
                figures[key] = counts
        phases[name] = figures
    return {"layers": layers, "phases": phases}


def differences(name: str, table: Figures, counted: Figures) -> list[str]:
    """A line for each figure of a whole model that is not the table's."""
    lines = [
        f"{name}: phase {phase} is in one of the two only"
        for phase in table["phases"].keys() ^ counted["phases"].keys()
    ]
    for phase in table["phases"].keys() & counted["phases"].keys():
        wanted, got = table["phases"][phase], counted["phases"][phase]
        wanted, got = _flat(wanted), _flat(got)
        for kind in wanted.keys() | got.keys():
            first, second = wanted.get(kind, 0), got.get(kind, 0)
            if kind == OVER_LIMIT and _may_wait_more(name, phase, first):
                differs = not 1 <= second <= 1 + ADAPTER_TENSORS * table["layers"]
            else:
                limit = max(TOLERANCE * second, FEW) if _moves_buckets(name, phase) else 0
                differs = abs(first - second) > limit
            if differs:
                lines.append(f"{name}, {phase}: {kind} {first} -> {second}")
    return lines


def _flat(figures: Figures) -> dict[str, int]:
    """The figures of a phase by their kind, or by function."""
    counts = {kind: figures[kind] for kind in ("kernels", "collectives")}
    return counts | figures["syncs"] | figures.get("copies", {})


def _may_wait_more(case: str, phase: str, waits: int) -> bool:
    """Whether the whole model may wait for each tensor, where a few layers' adapters wait once."""
    return phase == "save" and "adapters" in case and waits == 1


def _moves_buckets(case: str, phase: str) -> bool:
    """Muon's update moves whole matrices to their owners and back: 4.7 % off."""
    return phase in BY_BUCKETS or ("muon" in case and "update" in phase)
