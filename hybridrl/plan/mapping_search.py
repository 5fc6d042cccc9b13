"""The search for a mapping of models to devices (HybridFlow, arXiv 2409.19256, section 6).

Algorithm 1 there: for every placement (a partition of the roles into pools) and every allocation of
ranks to the pools, find each role's best layout and add up. Algorithm 2 finds the layout, cached by
role and ranks. Here a mapping also has a generation layout and a schedule. Candidates are
ordered by a bound on their step, so that few are priced:

    0  frame      placement and allocation: the least training and generation that they allow; small
                  micro-batches apart, by a bound that asks nothing of memory
    1  bound      training by a closed form, generation in the largest batches without a gap
    2  priced     updates pipeline by pipeline, the weight switch by the bytes that must move
    3  replayed   the scheduler that runs, in virtual time, the switch by its plan

The candidate with the least seconds so far goes on to its next level. The search ends when none
that is left could be quicker than the results by more than `TOLERANCE`. Of mappings that differ in
training's layouts and settings alone, only the one with the least priced seconds is replayed.

Invariants: a level's seconds are never below those of the level before, but where updates that were
bounded apart turn out quicker in one plan. Then they have the bound of one plan. Results are ranked
by the seconds that are printed. Every result fits into the memory of its ranks. Results differ in
placement, allocation, generation layout or schedule.
"""

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hybridrl.config import ActivationMode
from hybridrl.costs.fused_plans import can_share_a_plan
from hybridrl.costs.mapping import (
    ACTOR,
    DeviceMapping,
    GenLayout,
    PlannedRole,
    TrainLayout,
)
from hybridrl.costs.memory import MemoryPlan
from hybridrl.plan.fitting_layouts import (
    DoesNotFit,
    NamedLayouts,
    check_fits,
    smaller_layouts,
    total,
)
from hybridrl.plan.mapping_price import MappingPrices, StepSeconds
from hybridrl.plan.search_space import SearchSpace, allocation_step, allocations, set_partitions

if TYPE_CHECKING:
    from hybridrl.preflight.mapping_memory import MappingMemory

TOLERANCE = 0.03
"""The tolerance as a share of a step's seconds.

To prove the last percents takes most of a search.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedMapping:
    """A mapping with its seconds and bytes."""

    mapping: DeviceMapping
    seconds: StepSeconds
    bound_s: float
    """Seconds that no mapping of this kind could fall below."""
    memory: Mapping[str, MemoryPlan]


@dataclass(frozen=True, kw_only=True, slots=True)
class MappingResults:
    """The best mappings, and how much was tried."""

    best: Sequence[PricedMapping]
    num_candidates: int = 1
    num_priced: int = 1
    num_replayed: int = 1
    seconds: float = 0.0
    is_complete: bool = True
    """Whether nothing that is left could be better than the last of the best, by `TOLERANCE`."""
    rest_s: float | None = None
    """The least bound of what is left; None where nothing is, 0 where some has none yet."""


@dataclass(order=True, slots=True)
class _Candidate:
    """What is known of a mapping so far: `level` 0 to 3, and seconds that it takes at least.

    Level 0 has no layouts yet; it becomes all candidates of its placement and allocation, with
    micro-batches of so many `tokens`.
    """

    seconds: float
    number: int
    level: int = field(compare=False)
    mapping: DeviceMapping = field(compare=False)
    priced: StepSeconds | None = field(compare=False, default=None)
    bound_s: float = field(compare=False, default=0.0)
    tokens: Sequence[int] = field(compare=False, default=())

    @property
    def key(self) -> tuple[object, ...]:
        """What results differ in."""
        mapping = self.mapping
        kind = mapping.schedule.kind
        return tuple(mapping.pools.values()), tuple(mapping.ranks.values()), mapping.gen, kind


class MappingSearch:
    """Finds mappings of `roles` to `ranks` ranks: see the module.

    Example: `MappingSearch(roles, prices, memory, 16, space).run(10)`.
    """

    def __init__(
        self,
        roles: Sequence[PlannedRole],
        prices: MappingPrices,
        memory: "MappingMemory",
        ranks: int,
        space: SearchSpace,
    ) -> None:
        self.roles, self.prices, self.memory = roles, prices, memory
        self.ranks, self.space = ranks, space
        self._by_name = {role.name: role for role in roles}
        self._numbers = itertools.count()
        self._sorted = lru_cache(None)(self._sorted_layouts)
        self._least = lru_cache(None)(lambda *key: next(self._layouts(*key), None))
        self._best = lru_cache(None)(self._best_layout)
        self._filled = lru_cache(None)(self._least_filled_s)
        self.gens_on = lru_cache(None)(self._gen_layouts)
        self._fitting = lru_cache(None)(memory.fits_training)
        self._holds = lru_cache(None)(self._holds_scorer)
        self._smaller = lru_cache(None)(self._smaller_layouts)
        self.training_on = lru_cache(None)(self._training_on)
        self.training_bound_s = lru_cache(None)(self._training_bound_s)

    def run(
        self,
        number: int,
        budget_s: float = 60.0,
        on_progress: Callable[[int, int], None] = lambda replayed, candidates: None,
    ) -> MappingResults:
        """The best `number` of mappings, the best first, or what `budget_s` seconds are enough for.

        Half of them at most are for bounds of placements, the colocated one first. Raises
        DoesNotFit where a role fits nowhere, or no mapping does.
        """
        started = time.monotonic()
        frames, queue = self._frames(), list[_Candidate]()
        for frame in frames:
            queue.append(frame)
            if time.monotonic() - started > budget_s / 2:
                break
        all_bounded = next(frames, None) is None
        if not queue:
            raise self._obstacle()
        heapq.heapify(queue)
        counts = {1: 0, 2: 0, 3: 0}
        replayed: dict[tuple[object, ...], _Candidate] = {}
        best: list[_Candidate] = []
        unfit: DoesNotFit | None = None
        while queue:
            candidate = queue[0]
            if len(best) == number and best[-1].seconds <= candidate.seconds * (1 + TOLERANCE):
                break
            if time.monotonic() - started > budget_s:
                if replayed:
                    break
                # One at least is replayed: that which is furthest.
                candidate = max(queue, key=lambda one: (one.level, -one.seconds))
                queue.remove(candidate)
                heapq.heapify(queue)
            else:
                heapq.heappop(queue)
            if candidate.level and candidate.key in replayed:
                continue
            try:
                following = list(self._next_level(candidate))
            except DoesNotFit as error:
                unfit = unfit or error
                continue
            for better in following:
                counts[better.level] += 1
                if better.level < 3:
                    heapq.heappush(queue, better)
                else:
                    replayed[better.key] = better
                    best = heapq.nsmallest(number, replayed.values())
            on_progress(counts[3], counts[1])
        if not best:
            raise unfit or self._obstacle()
        rest_s = queue[0].seconds if queue else None
        if not all_bounded:
            rest_s = 0.0
        least = float("inf") if rest_s is None else rest_s * (1 + TOLERANCE)
        settled = sum(one.seconds <= least for one in best)
        return MappingResults(
            best=[self._result(one) for one in best],
            num_candidates=counts[1],
            num_priced=counts[2],
            num_replayed=counts[3],
            seconds=time.monotonic() - started,
            is_complete=rest_s is None or settled == number,
            rest_s=rest_s,
        )

    def price(
        self, mapping: DeviceMapping, memory: Mapping[str, MemoryPlan] | None = None
    ) -> PricedMapping:
        """One mapping as it is, by the scheduler.

        `memory` is what is known of a mapping that fits. Without it the closed form counts, and
        raises DoesNotFit.
        """
        if memory is None:
            memory = self.memory.plans(self.roles, mapping)
            check_fits(memory)
        seconds = self.prices.replayed(mapping, self.prices.priced(mapping))
        bound_s = self._bound_s(mapping)
        return PricedMapping(mapping=mapping, seconds=seconds, bound_s=bound_s, memory=memory)

    def _bound_s(self, mapping: DeviceMapping) -> float:
        """The least seconds of a step.

        In one plan the work of other roles fills a pipeline's gaps.
        """
        bound_of = self.prices.filled_bound_s if mapping.fuses else self.prices.update_bound_s
        updates = {
            name: bound_of(self._by_name[name], layout, mapping.ranks_of(name))
            for name, layout in mapping.train.items()
        }
        return self.prices.bound(mapping, updates).step_s

    def _result(self, candidate: _Candidate) -> PricedMapping:
        assert candidate.priced is not None, "a result that was not replayed"
        return PricedMapping(
            mapping=candidate.mapping,
            seconds=candidate.priced,
            bound_s=candidate.bound_s,
            memory=self.memory.plans(self.roles, candidate.mapping),
        )

    # Candidates and their levels

    def _frames(self) -> Iterator[_Candidate]:
        """Every placement with every allocation, by a bound on all of its mappings."""
        names = sorted((r.name for r in self.roles), key=lambda name: name != ACTOR)
        for partition in set_partitions(names):
            pools = self.space.pools(partition)
            if pools is None or len(pools) > self.ranks:
                continue
            step = allocation_step(self.ranks, len(pools))
            for sizes in allocations(self.ranks, len(pools), step):
                ranks = dict(zip(pools, sizes, strict=True))
                frame = DeviceMapping(
                    pools=pools,
                    ranks=ranks,
                    train={},
                    gen=GenLayout(),
                    schedule=self.space.schedules[0],
                )
                if gens := self._gens_of(frame):
                    front = min(self.prices.front_bound_s(gen, frame) for gen in gens)
                    for training, tokens in self._frame_training(frame):
                        seconds = training + front
                        yield _Candidate(seconds, next(self._numbers), 0, frame, tokens=tokens)

    def _frame_training(self, frame: DeviceMapping) -> Iterator[tuple[float, Sequence[int]]]:
        """The least training of a frame, of usual micro-batches and of small ones.

        Nothing where nothing fits; for small ones that is found out once they could win.
        """
        usual = self.space.micro_batch_tokens
        settings = list(self._shared_layouts(frame, usual))
        if settings:
            all_seconds = ({name: s for name, (s, _) in least.items()} for least in settings)
            yield min(_longest_pool(frame, seconds) for seconds in all_seconds), usual
        if self.space.small_micro_batches:
            aligned = self.prices.costs.cluster.aligned
            trained = [role for role in self.roles if role.trained]
            least_s = {r.name: self._filled(r, aligned(frame.ranks_of(r.name))) for r in trained}
            yield _longest_pool(frame, least_s), self.space.small_micro_batches

    def _least_filled_s(self, role: PlannedRole, ranks: range) -> float:
        """Seconds that no layout is below, in one plan or apart.

        They are for fewer rows and more memory than any layout has, or for ranks that share the
        longest sample.
        """
        space = self.space
        keeps = min(space.activations, key=lambda mode: mode is not ActivationMode.keep)
        shared = [tokens for tokens in space.small_micro_batches if tokens < space.longest]
        seconds = (
            self.prices.filled_bound_s(role, layout, ranks)
            for tokens in (max(space.micro_batch_tokens), *shared)
            for _, layout in self._sorted(role, ranks, keeps, tokens)
        )
        return min(seconds, default=float("inf"))

    def _gens_of(self, frame: DeviceMapping) -> list[GenLayout]:
        gens = self.gens_on(len(frame.ranks_of(ACTOR)))
        return [gen for gen in gens if self._suits(frame, gen)]

    def _shared_layouts(
        self, frame: DeviceMapping, micro_batch_tokens: Sequence[int]
    ) -> Iterator[dict[str, tuple[float, TrainLayout]]]:
        """For each of the settings that all roles share the layouts of least bound, with it."""
        trained = [role for role in self.roles if role.trained]
        aligned = self.prices.costs.cluster.aligned
        for shared in itertools.product(self.space.activations, micro_batch_tokens):
            least = {}
            for role in trained:
                first = self._least(role, aligned(frame.ranks_of(role.name)), *shared)
                if first is None:
                    break
                least[role.name] = first
            else:
                yield least

    def _mappings(self, frame: DeviceMapping, tokens: Sequence[int]) -> Iterator[_Candidate]:
        """Yield mappings of a placement and an allocation, with training layouts of least bound."""
        gens = self._gens_of(frame)
        for least in self._shared_layouts(frame, tokens):
            bounds = {name: seconds for name, (seconds, _) in least.items()}
            train = {name: layout for name, (_, layout) in least.items()}
            for gen, schedule in itertools.product(gens, self.space.schedules):
                mapping = replace(frame, train=train, gen=gen, schedule=schedule)
                bound = self.prices.bound(mapping, bounds).step_s
                yield _Candidate(bound, next(self._numbers), 1, mapping, bound_s=bound)

    def _suits(self, frame: DeviceMapping, gen: GenLayout) -> bool:
        """Whether a pool of roles that score is a number of instances, and a rank holds them."""
        for role in self.roles:
            if role.trained:
                continue
            ranks = len(frame.ranks_of(role.name))
            if ranks % gen.ranks or not self._holds(role, gen, ranks):
                return False
        return True

    def _holds_scorer(self, role: PlannedRole, gen: GenLayout, ranks: int) -> bool:
        """Whether a rank that holds nothing else can score with a role."""
        used = sum(self._scorer_sizes(role, gen, ranks).values()) + self.memory.reserved
        return used <= self.memory.capacity

    def _scorer_sizes(self, role: PlannedRole, gen: GenLayout, ranks: int) -> Mapping[str, int]:
        sizes = self.memory.scoring_sizes(role, gen, min(self.space.all_tokens), ranks)
        return {"scoring weights": sizes.weights, "activations": sizes.activations}

    def _next_level(self, candidate: _Candidate) -> Iterator[_Candidate]:
        """Raises DoesNotFit where no layouts of the candidate fit together."""
        mapping = candidate.mapping
        if candidate.level == 0:
            yield from self._mappings(mapping, candidate.tokens)
            return
        if candidate.level == 1:
            first = next(iter(mapping.train.values()))
            shared = first.activations, first.micro_batch_tokens
            train = dict[str, TrainLayout]()
            for name in mapping.train:
                ranks = self.prices.costs.cluster.aligned(mapping.ranks_of(name))
                train[name] = self._best(self._by_name[name], ranks, *shared)
            mapping = self._fitting_together(replace(mapping, train=train))
            priced = self.prices.priced(mapping)
        else:
            assert candidate.priced is not None
            mapping, priced = self._replayed(mapping, candidate.priced)
        # The closed forms are bounds; a difference in the last digits does not count.
        seconds, bound_s = max(candidate.seconds, priced.step_s), candidate.bound_s
        if mapping.fuses and not candidate.mapping.fuses:  # they are bounds of separate updates
            seconds, bound_s = priced.step_s, self._bound_s(mapping)
        yield _Candidate(seconds, candidate.number, candidate.level + 1, mapping, priced, bound_s)

    def _replayed(
        self, mapping: DeviceMapping, priced: StepSeconds
    ) -> tuple[DeviceMapping, StepSeconds]:
        """The mapping with updates in one plan or apart, whichever is quicker, and its seconds."""
        apart = self.prices.replayed(mapping, priced)
        if not self.space.fuses or not self._may_fuse(mapping):
            return mapping, apart
        fused = replace(mapping, fuses=True)
        if not all(plan.fits for plan in self.memory.plans(self.roles, fused).values()):
            return mapping, apart
        seconds = self.prices.replayed(fused, priced)
        return (fused, seconds) if seconds.step_s < apart.step_s else (mapping, apart)

    def _may_fuse(self, mapping: DeviceMapping) -> bool:
        """Whether the trained roles of some pool can share a plan."""
        pools = ([self._by_name[name] for name in names] for names in mapping.pools.values())
        trained = ([role for role in roles if role.trained] for roles in pools)
        return any(can_share_a_plan(roles, mapping.train) for roles in trained)

    # Layouts, by role and ranks (algorithm 2)

    def _sorted_layouts(
        self, role: PlannedRole, ranks: range, activations: ActivationMode, tokens: int
    ) -> list[tuple[float, TrainLayout]]:
        """Layouts by the bound on their updates, the least first."""
        bounded = [
            (self.prices.update_bound_s(role, layout, ranks), layout)
            for layout in self._train_layouts(role, len(ranks), activations, tokens)
        ]
        bounded.sort(key=lambda pair: (pair[0], pair[1].pp, pair[1].tp))
        return bounded

    def _layouts(
        self, role: PlannedRole, ranks: range, activations: ActivationMode, tokens: int
    ) -> Iterator[tuple[float, TrainLayout]]:
        """Yield the layouts that fit, by their bounds; whether one does is asked once."""
        bounded = self._sorted(role, ranks, activations, tokens)
        return (pair for pair in bounded if self._fitting(role, pair[1]))

    def _best_layout(
        self, role: PlannedRole, ranks: range, activations: ActivationMode, tokens: int
    ) -> TrainLayout:
        """The layout with the quickest update: those are priced whose bound is less than that."""
        best = float("inf"), TrainLayout()
        for bound, layout in self._layouts(role, ranks, activations, tokens):
            if bound >= best[0]:
                break
            seconds = self.prices.update_s(role, layout, ranks)
            if seconds < best[0]:
                best = seconds, layout
        return best[1]

    def _training_on(self, ranks: int) -> Mapping[str, TrainLayout] | None:
        """The layouts of all trained roles whose updates on so many ranks are quickest in turn.

        None where some role fits in no layout.
        """
        within, quickest = self.prices.costs.cluster.aligned(range(ranks)), float("inf")
        best: dict[str, TrainLayout] | None = None
        trained = [role for role in self.roles if role.trained]
        for shared in itertools.product(self.space.activations, self.space.all_tokens):
            bounds = [self._sorted(role, within, *shared)[:1] for role in trained]
            if not all(bounds):
                continue
            # Whether a layout fits takes longer than its bound.
            if sum(least for ((least, _),) in bounds) >= quickest:
                continue
            if not all(self._least(role, within, *shared) for role in trained):
                continue
            train = {role.name: self._best(role, within, *shared) for role in trained}
            seconds = sum(self.prices.update_s(role, train[role.name], within) for role in trained)
            if seconds < quickest:
                quickest, best = seconds, train
        return best

    def _training_bound_s(self, ranks: int) -> float:
        """Seconds that all updates on so many ranks are never below, whatever fits.

        Models that stay on the device; infinite where a role has no layout.
        """
        within, costs = self.prices.costs.cluster.aligned(range(ranks)), self.prices.costs
        least = 0.0
        for role in (role for role in self.roles if role.trained):
            least += min(
                (
                    bound - costs.activate_s(role, layout) - costs.deactivate_s(role, layout)
                    for shared in itertools.product(self.space.activations, self.space.all_tokens)
                    for bound, layout in self._sorted(role, within, *shared)
                ),
                default=float("inf"),
            )
        return least

    def _fitting_together(self, mapping: DeviceMapping) -> DeviceMapping:
        """The mapping, in other training layouts where a rank cannot hold these.

        A pool's ranks hold its roles one after the other. But the switch has both of the actor's
        layouts, and ranks on CPUs have all roles. Raises DoesNotFit.
        """
        plans = self.memory.plans(self.roles, mapping)
        train = dict(mapping.train)
        for pool, names in mapping.pools.items():
            if not plans[pool].fits:
                ranks = self.prices.costs.cluster.aligned(mapping.pool_ranks[pool])
                layouts = tuple((name, train[name]) for name in names if name in train)
                train |= self._smaller(names, ranks, mapping.gen, layouts)
        mapping = replace(mapping, train=train)
        check_fits(self.memory.plans(self.roles, mapping))
        return mapping

    def _smaller_layouts(
        self, names: tuple[str, ...], ranks: range, gen: GenLayout, layouts: NamedLayouts
    ) -> Mapping[str, TrainLayout]:
        """Layouts of a pool's roles that fit together, or the nearest to it."""
        pool = DeviceMapping(
            pools={ACTOR: names},
            ranks={ACTOR: len(ranks)},
            train=dict(layouts),
            gen=gen,
            schedule=self.space.schedules[0],
        )
        return smaller_layouts(
            pool,
            lambda mapping: self.memory.plans(self.roles, mapping)[ACTOR],
            {
                name: [
                    *self._layouts(
                        self._by_name[name], ranks, now.activations, now.micro_batch_tokens
                    )
                ]
                for name, now in layouts
            },
        )

    def _train_layouts(
        self, role: PlannedRole, ranks: int, activations: ActivationMode, tokens: int
    ) -> Iterator[TrainLayout]:
        """Yield training layouts with even chunks of a pipeline, and with borders by cost."""
        per_node = self.prices.costs.cluster.per_node
        for layout in self.space.train_layouts(role, ranks, per_node, activations, tokens):
            both = layout, self.prices.balanced(role, layout, range(ranks))
            yield from dict.fromkeys(both)

    def _gen_layouts(self, ranks: int) -> list[GenLayout]:
        """Return layouts of instances that hold a full sample at least."""
        return [gen for gen in self._allowed_gens(ranks) if self.memory.samples_held(gen)]

    def _allowed_gens(self, ranks: int) -> list[GenLayout]:
        """Return layouts of instances that can run, whatever their memory."""
        return self.space.gen_layouts(
            self._by_name[ACTOR], ranks, self.prices.costs.cluster.per_node
        )

    # What does not fit

    def _obstacle(self) -> DoesNotFit:
        """Why there is no candidate: what misses most on all ranks, in the layouts that miss least.

        Generation's layout is that of roles that score, too.
        """
        memory = self.memory
        least: list[tuple[Mapping[str, int], str, str]] = []
        settings = list(itertools.product(self.space.activations, self.space.all_tokens))
        for role in self.roles:
            layouts = [
                layout
                for shared in settings
                for layout in self._train_layouts(role, self.ranks, *shared)
                if role.trained
            ]
            peaks = [memory.train_peak(role, layout) for layout in layouts]
            if peaks:
                where = f"trained on {self.ranks} ranks"
                least.append((min(peaks, key=total), role.name, where))
        allowed = self._allowed_gens(self.ranks)
        generating = [memory.generation_sizes(gen).of_one_sample() for gen in allowed]
        if generating:
            where = "with a full sample in generation"
            least.append((min(generating, key=total), ACTOR, where))
        scorers = [role for role in self.roles if not role.trained]
        scoring = [
            max(
                ((self._scorer_sizes(r, gen, self.ranks), r.name) for r in scorers),
                key=lambda x: total(x[0]),
            )
            for gen in self.gens_on(self.ranks) or allowed
            if scorers
        ]
        if scoring:
            sizes, name = min(scoring, key=lambda x: total(x[0]))
            least.append((sizes, name, "that scores in the layout of generation"))
        sizes, name, where = max(least, key=lambda one: total(one[0]))
        return DoesNotFit.of(name, sizes, memory.capacity - memory.reserved, where)


def _longest_pool(frame: DeviceMapping, updates: Mapping[str, float]) -> float:
    """Pools train at the same time, the roles of one in turn."""
    return max(
        sum(updates[name] for name in names if name in updates) for names in frame.pools.values()
    )
