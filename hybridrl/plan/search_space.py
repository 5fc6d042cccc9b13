"""What a search for a mapping may try: placements, schedules, layouts, tokens of a micro-batch."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hybridrl.config import (
    ActivationMode,
    PipelineSchedule,
    ScheduleConfig,
    TrainLayoutConfig,
)
from hybridrl.costs.mapping import GenLayout, PlannedRole, TrainLayout
from hybridrl.layout.grouping import TrainAxes

Pools = Mapping[str, tuple[str, ...]]
PoolNaming = Callable[[Sequence[Sequence[str]]], Pools | None]
"""The pools of a partition by name, the actor's first; None for one that is not to be tried."""

_MOST_PP = 16
_MOST_GEN_PP = 4
_USUAL_TOKENS = 4096
_ROUND = 256
"""Tokens of a micro-batch are a multiple of it."""
_SHARES = 16
"""Pools of a large cluster have sixteenths of it."""

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What may be tried."""

    pools: PoolNaming
    """Partitions that a run can have."""
    schedules: Sequence[ScheduleConfig]
    micro_batch_tokens: Sequence[int]
    small_micro_batches: Sequence[int] = ()
    """Fewer tokens, which take less memory and give pipelines more rows; none is quicker else."""
    longest: int = 0
    """Tokens of the longest sample: ranks of cp share it where a micro-batch has fewer."""
    activations: Sequence[ActivationMode] = (ActivationMode.keep, ActivationMode.recompute)
    pipelines: Sequence[PipelineSchedule] = tuple(PipelineSchedule)
    allows_train: Callable[[PlannedRole, TrainLayout], bool] = lambda role, layout: True
    """Whether a role's model can be trained in a layout; heads and layers are checked besides."""
    allows_gen: Callable[[PlannedRole, GenLayout], bool] = lambda role, gen: True
    fuses: bool = False
    """Whether updates, and passes by training shards, may share a plan (`DeviceMapping.fuses`)."""
    splits_tokens: Callable[[PlannedRole], bool] = lambda role: True
    """Whether `sequence_parallel` is there for a model: it takes less memory for the same traffic.
    """

    @property
    def all_tokens(self) -> Sequence[int]:
        """Tokens of a micro-batch to try, small ones first."""
        return *self.small_micro_batches, *self.micro_batch_tokens

    def train_layouts(
        self,
        role: PlannedRole,
        ranks: int,
        per_node: int,
        activations: ActivationMode,
        tokens: int,
    ) -> Iterator[TrainLayout]:
        """Yield the layouts of a role on so many `ranks`, with even chunks of a pipeline."""
        shape = role.shape
        for pp, tp in itertools.product(_doublings(_MOST_PP), _doublings(per_node)):
            data, rest = divmod(ranks, pp * tp)
            if rest or pp > shape.layers or not divides(shape.heads, shape.kv_heads, tp):
                continue
            for axes in self._over_data(role, pp, data, tp, tokens, per_node):
                for schedule in self.pipelines if pp > 1 else self.pipelines[:1]:
                    layout = TrainLayout(
                        pp=pp,
                        replicas=axes.replicas,
                        fsdp=axes.fsdp,
                        tp=tp,
                        ep=axes.ep,
                        ep_near=TrainAxes.of(axes).ep_near,
                        cp=axes.cp,
                        schedule=schedule,
                        activations=activations,
                        sequence_parallel=tp > 1 and self.splits_tokens(role),
                        micro_batch_tokens=tokens,
                    )
                    zigzags = layout.zigzag and activations is ActivationMode.recompute
                    if layout.chunks > shape.layers or zigzags:
                        continue
                    if self.allows_train(role, layout):
                        yield layout

    def _over_data(
        self, role: PlannedRole, pp: int, data: int, tp: int, tokens: int, per_node: int
    ) -> Iterator[TrainLayoutConfig]:
        """Yield the axes over so many `data` ranks; cp is the least that rows of `tokens` need."""
        cp = 1
        while tokens * cp < self.longest:
            cp *= 2
        for replicas in _doublings(data):
            fsdp = data // replicas
            if data % replicas or fsdp % cp:
                continue
            for ep in _doublings(min(fsdp * tp, role.shape.experts or 1)):
                if fsdp * tp % ep == 0:
                    axes = TrainLayoutConfig(
                        pp=pp, replicas=replicas, fsdp=fsdp, tp=tp, ep=ep, cp=cp
                    )
                    axes.place_experts(pp * data * tp, per_node)
                    yield axes

    def gen_layouts(self, actor: PlannedRole, ranks: int, per_node: int) -> list[GenLayout]:
        """Return the layouts of the actor's rollout instances on so many `ranks`."""
        shape = actor.shape
        layouts = []
        for pp, tp in itertools.product(_doublings(_MOST_GEN_PP), _doublings(per_node)):
            fits_model = pp <= shape.layers and divides(shape.heads, shape.kv_heads, tp)
            if ranks % (pp * tp) == 0 and fits_model:
                eps = {1, tp} if shape.experts else {1}
                choices = (GenLayout(pp=pp, tp=tp, ep=ep) for ep in sorted(eps))
                layouts += [gen for gen in choices if self.allows_gen(actor, gen)]
        return layouts


def micro_batch_choices(
    longest: int, samples: int, at_least: int = 0, shares: bool = False
) -> tuple[list[int], list[int]]:
    """Tokens of a micro-batch to try, small and usual, for `samples` of `longest` tokens at most.

    Usual are the next power of two from 4,096 on, twice and four times as much. Small are the
    longest sample, in multiples of 256, and four times as much where that is below. None is more
    than one that holds all samples of the step, or less than `at_least`. Where ranks may share a
    sample (`shares`), its halves, quarters, ... are small ones too, down to 4,096 tokens.

    Example: samples of 5,120 tokens give 5,120; 8,192, 16,384 and 32,768.
    """
    whole = max(longest * samples, at_least)
    least = max(-(-longest // _ROUND) * _ROUND, at_least)
    power = 2 ** (max(least, _USUAL_TOKENS) - 1).bit_length()
    small = [tokens for tokens in (least, 4 * least) if tokens < power]
    for parts in _doublings(longest // _USUAL_TOKENS if shares else 1):
        if parts > 1:
            small.insert(0, -(-longest // parts // _ROUND) * _ROUND)
    usual = [power, 2 * power, 4 * power]
    largest = next((tokens for tokens in (*small, *usual) if tokens >= whole), usual[-1])
    small, usual = ([n for n in tokens if n <= largest] for tokens in (small, usual))
    return (small, usual) if usual else (small[:-1], small[-1:])


def divides(heads: int, kv_heads: int, tp: int) -> bool:
    """Whether tp ranks have equal numbers of heads, or several share one of keys and values."""
    return heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0)


def _doublings(most: int) -> Iterator[int]:
    """1, 2, 4, ... up to `most`."""
    number = 1
    while number <= most:
        yield number
        number *= 2


def set_partitions(items: Sequence[_Item]) -> Iterator[list[list[_Item]]]:
    """Every way to divide items into sets that are not empty: 1, 2, 5, 15, ... (Bell numbers).

    The first item is in the first set. HybridFlow, section 6, algorithm 1.
    """
    if not items:
        yield []
        return
    *others, last = items
    for sets in set_partitions(others):
        for index in range(len(sets)):
            yield [*sets[:index], [*sets[index], last], *sets[index + 1 :]]
        yield [*sets, [last]]


def allocations(ranks: int, pools: int, step: int) -> Iterator[tuple[int, ...]]:
    """Every way to deal `ranks` to pools, in multiples of `step`, none of them empty."""
    if pools == 1:
        yield (ranks,)
        return
    for first in range(step, ranks - step * (pools - 1) + 1, step):
        for others in allocations(ranks - first, pools - 1, step):
            yield (first, *others)


def allocation_step(ranks: int, pools: int) -> int:
    """Ranks by which the sizes of pools differ: one on few ranks, else a sixteenth of them."""
    step = max(1, ranks // _SHARES)
    return step if pools * step <= ranks else 1
