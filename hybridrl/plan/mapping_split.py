"""Ranks that generate alone beside the mappings of a search: the quickest split, in virtual time.

All roles are on the ranks that train. Of each split these have the layouts whose updates are
quickest. Candidates are ordered by the bound max(G, T, A / (S + 1)) on a step: decoding on its
ranks, training and passes of models on theirs, the longest sample. T takes most of a search, so
layouts are looked for where a bound on it that asks nothing of memory could still win. Splits are
replayed by the schedule itself, as `plan schedule --rollout` does it, until no bound is below the
best. Where bounds are equal, as where the longest sample decides, the split with the least sum of
terms is tried first.
"""

import heapq
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hybridrl.config import AsyncScheduleConfig
from hybridrl.costs.mapping import ACTOR, DeviceMapping, PlannedRole
from hybridrl.costs.push import PushCosts, push_costs
from hybridrl.flow.early_updates import EarlySettings
from hybridrl.flow.executor import Scope
from hybridrl.plan.mapping_price import StepSeconds
from hybridrl.plan.mapping_search import TOLERANCE, MappingSearch, PricedMapping
from hybridrl.plan.schedule import Setting
from hybridrl.plan.search_space import allocation_step
from hybridrl.plan.separate import in_flight, replay_split

GAIN = 0.03
"""Separate ranks are chosen where their step is shorter by this share or more."""
ROLLOUT = "rollout"
"""The pool of the ranks that generate alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PricedSplit:
    """A split with its seconds, and the terms that its step is never below."""

    priced: PricedMapping
    terms: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """Planned seconds of a step."""
        return self.priced.seconds.step_s

    @property
    def max_staleness(self) -> int:
        """Steps that its generation may be ahead of training."""
        return _schedule_of(self.priced.mapping).max_staleness

    def wins(self, shared_s: float) -> bool:
        """Whether it is chosen over a step of `shared_s` on ranks that do both."""
        return self.step_s <= (1 - GAIN) * shared_s

    def reason(self, shared_s: float) -> str:
        """Why it wins or loses, in a line."""
        ranks, config = self.priced.mapping.ranks, _schedule_of(self.priced.mapping)
        verdict = "win" if self.wins(shared_s) else "lose"
        terms = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in self.terms.items())
        settings = f"max_staleness={config.max_staleness}" + ", in flight," * config.in_flight
        return (
            f"ranks that generate alone {verdict}: {ranks[ROLLOUT]} of {sum(ranks.values())} with"
            f" {settings} take {self.step_s:.3g} s a step, the best on shared ranks"
            f" {shared_s:.3g} s; chosen from {GAIN:.0%} less on. A step takes at least the longest"
            f" of {terms}"
        )


@dataclass(frozen=True, slots=True)
class SplitResults:
    """The splits of one staleness that were replayed, the quickest first."""

    splits: Sequence[PricedSplit]
    rest_s: float | None = None
    """Seconds that a step of any other split takes at least, where time ended the search first."""


class SplitSearch:
    """Finds the split of a search's ranks whose step is shortest with so much staleness.

    With `streams` groups are trained as they come, where the layout allows it.
    """

    def __init__(self, search: MappingSearch, streams: bool) -> None:
        self.search, self.prices, self.streams = search, search.prices, streams
        self.costs = search.prices.costs

    def run(self, max_staleness: int, budget_s: float = 60.0) -> SplitResults:
        """Search for so many seconds, and until a first split is replayed. None may fit."""
        started, replayed = time.monotonic(), list[PricedSplit]()
        queue = [
            (*self._order(frame), number, frame)
            for number, frame in enumerate(self._frames(max_staleness))
        ]
        heapq.heapify(queue)
        best, rest_s = float("inf"), None
        while queue:
            bound_s, _, _, number, mapping = heapq.heappop(queue)
            if best <= bound_s * (1 + TOLERANCE):
                break
            if replayed and time.monotonic() - started > budget_s:
                rest_s = bound_s
                break
            if mapping.train:
                replayed.append(self.price(mapping))
                best = min(best, replayed[-1].step_s)
            elif trained := self._trained(mapping):
                heapq.heappush(queue, (*self._order(trained), number, trained))
        return SplitResults(sorted(replayed, key=lambda one: one.step_s), rest_s)

    def _trained(self, frame: DeviceMapping) -> DeviceMapping | None:
        """A frame with the quickest training of its ranks; None where no layout fits there."""
        train = self.search.training_on(frame.ranks[ACTOR])
        return replace(frame, train=train) if train else None

    def _frames(self, max_staleness: int) -> Iterator[DeviceMapping]:
        """Every split, generation layout and way to take weights, without layouts of training."""
        search, names = self.search, tuple(role.name for role in self.search.roles)
        scores = any(not role.trained for role in search.roles)
        step = allocation_step(search.ranks, 2)
        schedules = [AsyncScheduleConfig(max_staleness=max_staleness)]
        if max_staleness:
            schedules.append(in_flight(max_staleness))
        for alone in range(step, search.ranks, step):
            ranks = search.ranks - alone
            for gen, schedule in itertools.product(search.gens_on(alone), schedules):
                if scores and ranks % gen.ranks:
                    continue
                yield DeviceMapping(
                    pools={ACTOR: names, ROLLOUT: ()},
                    ranks={ACTOR: ranks, ROLLOUT: alone},
                    train={},
                    gen=gen,
                    schedule=schedule,
                )

    def terms(self, mapping: DeviceMapping) -> dict[str, float]:
        """Seconds that a step of the mapping is never below, by what takes them.

        Without layouts of training they are for those of least bound, whether these fit or not.
        """
        decode_s, alone_s = self.prices.generation_bound(mapping.gen, self._ranks(mapping, ROLLOUT))
        if mapping.train:
            training = sum(self._updates(mapping).values()) + sum(self._passes(mapping).values())
        else:
            training = self.search.training_bound_s(mapping.ranks[ACTOR])
        steps = 1 + _schedule_of(mapping).max_staleness
        name = "the longest sample" + f" over {steps}" * (steps > 1)
        return {"decoding": decode_s, "training": training, name: alone_s / steps}

    def _order(self, mapping: DeviceMapping) -> tuple[float, bool, float]:
        """Return a key that sorts splits by their bound, then by the sum of their terms.

        Where bounds are equal, those with layouts of training come before the others.
        """
        terms = self.terms(mapping).values()
        return max(terms), not mapping.train, sum(terms)

    def price(self, mapping: DeviceMapping) -> PricedSplit:
        """Replay a split. Its memory is that of the run's own plan, which is not asked here."""
        updates, passes = self._updates(mapping), self._passes(mapping)
        outcome = replay_split(self._setting(mapping, updates, passes), _schedule_of(mapping))
        terms = self.terms(mapping)
        seconds = StepSeconds(
            switch=0.0,
            front=outcome.front_s,
            infer=passes,
            train=updates,
            training=outcome.step_s - outcome.front_s,
            reason=max(terms, key=lambda name: terms[name]),
            idle=outcome.bubbles,
            stages=outcome.stages,
        )
        bound_s = max(terms.values())
        priced = PricedMapping(mapping=mapping, seconds=seconds, bound_s=bound_s, memory={})
        return PricedSplit(priced=priced, terms=terms)

    def _setting(
        self, mapping: DeviceMapping, updates: Mapping[str, float], passes: Mapping[str, float]
    ) -> Setting:
        """The setting of `replay`: all work of the training ranks by the token."""
        prices, gen, alone = self.prices, mapping.gen, self._ranks(mapping, ROLLOUT)
        tokens = sum(sample.tokens for sample in prices.samples)
        costs = self.costs.generation(self._actor, gen, alone[: gen.ranks])
        costs = replace(
            costs,
            token_s={name: seconds / tokens for name, seconds in passes.items()},
            train_token_s=sum(updates.values()) / tokens,
        )
        is_late = not self.streams or any(layout.cp > 1 for layout in mapping.train.values())
        return Setting(
            costs=costs,
            num_instances=len(alone) // gen.ranks,
            instance_ranks=gen.ranks,
            max_held=max(1, prices.memory.samples_held(gen)),
            decode_steps=prices.decode_steps,
            chunk_tokens=mapping.train[ACTOR].micro_batch_tokens,
            scopes=dict.fromkeys(passes, Scope.POOL),
            workload=prices.workload,
            group_size=prices.group_size,
            apart=self._push(mapping),
            num_training=mapping.ranks[ACTOR],
            early=EarlySettings(obstacle="the recipe or the layout trains late" * is_late or None),
        )

    def _ranks(self, mapping: DeviceMapping, pool: str) -> range:
        """The ranks of a pool, of which only their places in nodes count."""
        return self.costs.cluster.aligned(mapping.pool_ranks[pool])

    @property
    def _actor(self) -> PlannedRole:
        return next(role for role in self.search.roles if role.name == ACTOR)

    def _updates(self, mapping: DeviceMapping) -> dict[str, float]:
        """Seconds of the updates of each role; one that is alone stays on the device."""
        seconds, ranks = {}, self._ranks(mapping, ACTOR)
        for role in self.search.roles:
            if role.trained:
                layout = mapping.train[role.name]
                seconds[role.name] = self.prices.update_s(role, layout, ranks)
                if len(self.search.roles) == 1:
                    there, back = self.costs.activate_s, self.costs.deactivate_s
                    seconds[role.name] -= there(role, layout) + back(role, layout)
        return seconds

    def _passes(self, mapping: DeviceMapping) -> dict[str, float]:
        """Seconds of each forward-only stage: trained roles score with their shards."""
        seconds, ranks = {}, self._ranks(mapping, ACTOR)
        for role in self.search.roles:
            layout = mapping.train[role.name] if role.trained else mapping.gen
            for stage in role.passes:
                seconds[stage] = self.prices.score_s(role, layout, ranks)
        return seconds

    def _push(self, mapping: DeviceMapping) -> PushCosts:
        """A push of the model in the generation dtype, or of its adapters."""
        actor, cluster, gen = self._actor, self.costs.cluster, mapping.gen
        elements = actor.adapters * actor.shape.layers or actor.shape.parameters
        return push_costs(
            elements * self.costs.layer_costs.itemsize,
            replace(
                cluster.accelerator,
                host_bytes_per_s=cluster.host.bytes_per_s,
                network_bytes_per_s=cluster.between.bytes_per_s,
            ),
            train_ranks=mapping.ranks[ACTOR],
            instance_ranks=gen.ranks,
            instances=mapping.ranks[ROLLOUT] // gen.ranks,
        )


def _schedule_of(mapping: DeviceMapping) -> AsyncScheduleConfig:
    assert isinstance(mapping.schedule, AsyncScheduleConfig), mapping.schedule
    return mapping.schedule
