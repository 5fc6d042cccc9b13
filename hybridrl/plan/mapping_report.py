"""The mappings that a search chose, as a table, as remarks and as data."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hybridrl.config import AsyncScheduleConfig
from hybridrl.costs.mapping import TrainLayout
from hybridrl.costs.memory import GIB
from hybridrl.plan.mapping_search import MappingResults, PricedMapping


@dataclass(frozen=True, slots=True)
class MappingReport:
    """The mappings that a run can have, the best first, with the overrides of each."""

    result: MappingResults
    overrides: Sequence[list[str]]
    refused: Sequence[str]
    """Why mappings that the search chose are left out."""
    user_args: Sequence[str]
    source: str
    """Where the seconds come from."""
    assumed: Sequence[str] = ()
    """What they assume of the lengths, and of a mapping by hand."""
    separate: Sequence[str] = ()
    """Why ranks that generate alone are chosen, or not, by staleness."""
    separate_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds of a step with ranks that generate alone, by `schedule.max_staleness`."""
    separate_rest_s: Mapping[int, float | None] = field(default_factory=dict)
    """Seconds that splits which time has left out take at least; None where the search ended."""
    shared_s: float | None = None
    """Seconds of a step of the best mapping on shared ranks, which `separate_s` compares with."""

    def table(self) -> list[tuple[str, ...]]:
        """A header, then a line for each mapping."""
        head = ("", "step s", "switch", "front", "training", "memory", "bound by")
        lines: list[tuple[str, ...]] = [head]
        for number, one in enumerate(self.result.best, 1):
            seconds = one.seconds
            numbers = (seconds.step_s, seconds.switch, seconds.front, seconds.training)
            texts = [f"{n:.3g}" for n in numbers]
            lines.append((str(number), *texts, _memory_text(one), seconds.bound_by))
        return lines

    def remarks(self) -> list[str]:
        """Below the table; the last line is the command."""
        result = self.result
        lines = [f"{number}  {describe(one)}" for number, one in enumerate(result.best, 1)]
        lines += [
            f"{result.num_candidates} candidates, {result.num_priced} priced,"
            f" {result.num_replayed} replayed in {result.seconds:.0f} s; seconds by {self.source}",
        ]
        if not result.is_complete and result.rest_s is not None:
            lines.append(unfinished(result.rest_s))
        lines += self.separate
        lines += [f"left out: {reason}" for reason in self.refused]
        lines += [f"assumed: {assumption}" for assumption in self.assumed]
        command = shlex.join(["hybridrl", "train", *self.user_args, *self.overrides[0]])
        return [*lines, command]

    def record(self) -> dict[str, Any]:
        """As JSON data."""
        result = self.result
        return {
            "source": self.source,
            "candidates": result.num_candidates,
            "priced": result.num_priced,
            "replayed": result.num_replayed,
            "search_s": result.seconds,
            "complete": result.is_complete,
            "rest_s": result.rest_s,
            "separate": list(self.separate),
            "separate_s": dict(self.separate_s),
            "separate_rest_s": dict(self.separate_rest_s),
            "shared_s": self.shared_s,
            "refused": list(self.refused),
            "assumed": list(self.assumed),
            "mappings": [
                _record(one, settings)
                for one, settings in zip(result.best, self.overrides, strict=True)
            ],
        }


def unfinished(rest_s: float) -> str:
    """Say that time has ended a search, and what its other candidates take at least."""
    left = f"what is left takes {rest_s:.3g} s a step at least"
    if not rest_s:
        left = "it has not looked at all placements"
    return f"the search was not through: {left}; --seconds gives it longer"


def describe(one: PricedMapping) -> str:
    """Placement, generation, schedule and training in one line."""
    mapping = one.mapping
    pools = " | ".join(
        f"{mapping.ranks[pool]}: {', '.join(roles) or 'generation'}"
        for pool, roles in mapping.pools.items()
    )
    trained = "; ".join(f"{role} {_axes_text(x)}" for role, x in mapping.train.items())
    others = {"pp": mapping.gen.pp, "ep": mapping.gen.ep}
    gen = f"tp {mapping.gen.tp}" + "".join(f" {x} {n}" for x, n in others.items() if n > 1)
    first = next(iter(mapping.train.values()))
    shared = f"{first.activations.value}, {first.micro_batch_tokens} tokens"
    shared += ", updates in one plan" * mapping.fuses
    shared += f", ranks in the order {list(mapping.rank_order)}" * bool(mapping.rank_order)
    schedule = mapping.schedule.kind.value
    if isinstance(mapping.schedule, AsyncScheduleConfig):
        schedule += f" with max_staleness={mapping.schedule.max_staleness}"
        schedule += ", in flight" * mapping.schedule.in_flight
    return f"{pools}; {schedule}, generation {gen}; {trained}; {shared}"


def _memory_text(one: PricedMapping) -> str:
    """The largest phase of a rank of each pool, by its name where there are several."""
    peaks = {pool: plan.peak for pool, plan in one.memory.items()}
    return "; ".join(
        f"{pool}: " * (len(peaks) > 1) + f"{peak.total / GIB:.3g} GiB, {peak.name}"
        for pool, peak in peaks.items()
    )


def _axes_text(layout: TrainLayout) -> str:
    axes = ("pp", "replicas", "fsdp", "tp", "ep", "cp")
    sizes = [f"{axis} {getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1]
    order = f" {layout.schedule.value}" * (layout.pp > 1)
    if layout.chunk_layers:
        order += f" layers {'+'.join(map(str, layout.chunk_layers))}"
    return (" ".join(sizes) or "whole") + order


def _record(one: PricedMapping, settings: Sequence[str]) -> dict[str, Any]:
    seconds = one.seconds
    return {
        "step_s": seconds.step_s,
        "bound_s": one.bound_s,
        "seconds": asdict(seconds),
        "bound_by": seconds.bound_by,
        "pools": {pool: list(roles) for pool, roles in one.mapping.pools.items()},
        "ranks": dict(one.mapping.ranks),
        "memory": {pool: plan.record() for pool, plan in one.memory.items()},
        "overrides": list(settings),
    }
