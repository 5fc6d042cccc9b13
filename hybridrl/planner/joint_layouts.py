"""Training layouts that pay only together: those of roles whose updates share a plan.

Alone the best layout has few stages, since a pipeline has gaps. In one plan other roles fill them
(RLHFuse, arXiv 2409.13221, section 5), so there pipelines may pay, by less traffic and memory.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from hybridrl.config import ActivationMode
from hybridrl.planner.fused_plans import can_share_a_plan
from hybridrl.planner.mapping import PlannedRole, TrainLayout
from hybridrl.planner.mapping_memory import MappingMemory
from hybridrl.planner.mapping_price import MappingPrices

Bounded = Sequence[tuple[float, TrainLayout]]
"""Layouts of a role, by the bound on its updates alone, the least first."""
Joint = tuple[float, Mapping[str, TrainLayout]]
"""Seconds of all updates of several roles, and their layouts."""

NEAR = 0.03
"""A choice is taken where no other could be quicker by more than this share."""
_MOST_PRICED, _MOST_KEPT = 32, 256


class JointLayouts:
    """Of roles of one pool, for given settings of micro-batches.

    `layouts(role, ranks, activations, tokens)` gives what a role may have. Of each pp, tp and
    pipeline schedule the first that fits is tried, and the first without replicas: it takes less.
    """

    def __init__(
        self,
        prices: MappingPrices,
        memory: MappingMemory,
        layouts: Callable[[PlannedRole, range, ActivationMode, int], Bounded],
    ) -> None:
        self._prices, self._memory, self._layouts = prices, memory, layouts
        self._known = lru_cache(None)(self._options)
        self._fastest = lru_cache(None)(self._quickest)

    def bound(
        self, roles: Sequence[PlannedRole], ranks: range, activations: ActivationMode, tokens: int
    ) -> Joint | None:
        """Seconds that no choice is below, with the layouts of one; None where none fits."""
        options = self._known(tuple(roles), ranks, activations, tokens)
        return min(options, key=lambda option: option[0], default=None)

    def best(
        self, roles: Sequence[PlannedRole], ranks: range, activations: ActivationMode, tokens: int
    ) -> Joint | None:
        """The quickest in one plan, by `NEAR`, of 32 that are priced; None where none fits."""
        return self._fastest(tuple(roles), ranks, activations, tokens)

    def _quickest(
        self,
        roles: tuple[PlannedRole, ...],
        ranks: range,
        activations: ActivationMode,
        tokens: int,
    ) -> Joint | None:
        best: Joint | None = None
        options = self._known(roles, ranks, activations, tokens)
        num_priced = 0
        for bound, train in options:
            if best is not None and best[0] <= bound * (1 + NEAR):
                continue
            num_priced += 1
            if num_priced > _MOST_PRICED:
                break
            seconds = self._prices.fused_update_s(roles, train, ranks)
            if best is None or seconds < best[0]:
                best = seconds, train
        return best

    def _options(
        self,
        roles: tuple[PlannedRole, ...],
        ranks: range,
        activations: ActivationMode,
        tokens: int,
    ) -> list[Joint]:
        """By their bounds in steps of five percent; of those alike the fewest stages come first.

        Three roles have tens of thousands: the first ones are kept, and the one of least bound.
        """
        own = [self._of_role(role, ranks, activations, tokens) for role in roles]
        options: list[Joint] = []
        for tp in own[0].keys() & own[-1].keys():  # one plan has one tp
            for layouts in itertools.product(*(of_tp.get(tp, ()) for of_tp in own)):
                train = {role.name: x for role, (_, _, x) in zip(roles, layouts, strict=True)}
                peak = sum(nbytes for _, nbytes, _ in layouts) + self._memory.reserved
                if peak <= self._memory.capacity and can_share_a_plan(roles, train):
                    options.append((sum(bound for bound, _, _ in layouts), train))
        options.sort(
            key=lambda option: (
                round(math.log(option[0], 1.05)),
                sum(layout.pp for layout in option[1].values()),
                option[0],
            )
        )
        least = sorted(options, key=lambda option: option[0])[:1]
        return options[:_MOST_KEPT] + least

    def _of_role(
        self, role: PlannedRole, ranks: range, activations: ActivationMode, tokens: int
    ) -> dict[int, list[tuple[float, int, TrainLayout]]]:
        """By tp: what is tried, with its bound in a plan and its bytes at the largest moment."""
        by_tp: dict[int, list[tuple[float, int, TrainLayout]]] = {}
        kinds = set()
        for _, layout in self._layouts(role, ranks, activations, tokens):
            kind = layout.pp, layout.tp, layout.schedule, layout.replicas == 1
            if kind not in kinds:
                peak = sum(self._memory.train_peak(role, layout).values())
                if peak + self._memory.reserved <= self._memory.capacity:
                    kinds.add(kind)
                    bound = self._prices.filled_bound_s(role, layout, ranks)
                    by_tp.setdefault(layout.tp, []).append((bound, peak, layout))
        return by_tp
