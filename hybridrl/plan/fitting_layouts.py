"""Training layouts that fit together, and what does not fit."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hybridrl.costs.mapping import ACTOR, DeviceMapping, TrainLayout
from hybridrl.costs.memory import GIB, MemoryPlan

NamedLayouts = tuple[tuple[str, TrainLayout], ...]
"""The layout of each role of a pool that is trained, hashable."""
BoundedLayouts = Sequence[tuple[float, TrainLayout]]
"""Layouts of a role by the bound on its updates, the least first."""


class DoesNotFit(Exception):
    """No layout of a role fits, or no mapping."""

    @classmethod
    def of(cls, role: str, sizes: Mapping[str, int], available: int, where: str) -> "DoesNotFit":
        """Return the error for bytes by owner on a rank that has `available`."""
        missing = total(sizes) - available
        if missing <= 0:  # only where not all roles may share all ranks
            return cls(
                "no placement that is allowed leaves each role the ranks that hold it: on all of"
                f" them, {role} {where} needs {total(sizes) / GIB:.1f} GiB of"
                f" {available / GIB:.1f} on a rank, the most of all roles"
            )
        owner = max(sizes, key=lambda name: sizes[name])
        return cls(
            f"{role} {where} needs {total(sizes) / GIB:.1f} GiB on a rank, {missing / GIB:.1f} GiB"
            f" more than there is; most of it, {sizes[owner] / GIB:.1f} GiB, are {owner}"
        )


def check_fits(plans: Mapping[str, MemoryPlan]) -> None:
    """Raise DoesNotFit for a mapping that a rank cannot hold."""
    for pool, plan in plans.items():
        if not plan.fits:
            peak = plan.peak
            work, _, role = peak.name.partition(" ")
            name = role if work in ("train", "score", "save") else ACTOR
            available = plan.capacity - plan.reserved
            where = f"in pool {pool}, phase {peak.name},"
            raise DoesNotFit.of(name, peak.sizes, available, where)


def smaller_layouts(
    pool: DeviceMapping,
    plan: Callable[[DeviceMapping], MemoryPlan],
    layouts: Mapping[str, BoundedLayouts],
) -> Mapping[str, TrainLayout]:
    """Other layouts of a pool's roles, which fit together, or the nearest to it.

    `plan` gives the memory of its ranks, `layouts` the choice for each role. One role gets its
    first layout that is enough. Where none is, the one that lowers the largest phase most goes
    first.
    """
    peak = plan(pool).peak.total
    while layouts:
        enough: list[tuple[float, str, DeviceMapping]] = []
        lower: list[tuple[int, str, DeviceMapping]] = []
        for name, choice in layouts.items():
            bounds = {layout: bound for bound, layout in choice}
            for layout, bound in bounds.items():
                changed = replace(pool, train={**pool.train, name: layout})
                planned = plan(changed)
                if planned.fits:
                    enough.append((bound - bounds[pool.train[name]], name, changed))
                    break
                lower.append((planned.peak.total, name, changed))
        if enough:
            return min(enough, key=lambda one: one[:2])[2].train
        least = min(lower, key=lambda one: one[:2])
        if least[0] >= peak:
            break
        peak, _, pool = least
    return pool.train


def total(sizes: Mapping[str, int]) -> int:
    """Bytes of all owners."""
    return sum(sizes.values())
