"""Seconds of a step under a mapping: bounded, priced, and replayed by the scheduler that runs.

A step switches to generation, generates and infers, then trains. Pools work at the same time, the
roles of a pool one after the other (HybridFlow, section 6, algorithm 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hybridrl.costs.instance import Costs
from hybridrl.costs.mapping import (
    ACTOR,
    ClusterShape,
    DeviceMapping,
    GenLayout,
    PlannedRole,
    SampleLength,
    SampleTotals,
    TrainLayout,
)
from hybridrl.costs.model import CostModel
from hybridrl.flow.mapped_work import MappedWork, step_samples
from hybridrl.flow.workload import Workload
from hybridrl.plan.schedule import mapped_setting, replay

if TYPE_CHECKING:
    from hybridrl.preflight.mapping_memory import MappingMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """Seconds of a step by phase; `infer` and `train` by role, those of a pool in sequence."""

    switch: float
    front: float
    """Generation and inference, from the arrival of the weights to the barrier."""
    infer: Mapping[str, float]
    """Inference alone; under schedules that overlap it, it is in `front` only in part."""
    train: Mapping[str, float]
    training: float
    """From the barrier to the step's end: pools at once, the roles of a pool in turn."""
    reason: str
    """What the front cannot be quicker than."""
    idle: float = 0.0
    """Share of the instances' time before the update in which they are idle, once replayed."""
    stages: Mapping[str, float] = field(default_factory=dict)
    """Once replayed: of each stage and change of phase, by its name in a run's records."""

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.switch + self.front + self.training

    @property
    def bound_by(self) -> str:
        """The longest phase, and what holds it up."""
        longest = max(self.switch, self.front, self.training)
        if longest == self.front:
            return self.reason
        if longest == self.training:
            return f"training, most of it {max(self.train, key=lambda role: self.train[role])}"
        return "weight switch"


class MappingPrices:
    """Prices mappings for the samples of a step.

    `workload` has the groups of one step, `group_size` samples a prompt; `decode_steps` are those
    of a call. An update is `epochs` times over `mini_batches` equal parts of the samples, where a
    role has no numbers of its own.
    """

    def __init__(
        self,
        costs: CostModel,
        memory: "MappingMemory",
        roles: Sequence[PlannedRole],
        workload: Workload,
        *,
        decode_steps: int = 64,
        epochs: int = 1,
        mini_batches: int = 1,
    ) -> None:
        self.costs, self.memory, self.roles, self.workload = costs, memory, roles, workload
        self.decode_steps, self.epochs, self.mini_batches = decode_steps, epochs, mini_batches
        self.group_size = workload.group_size
        self._by_name = {role.name: role for role in roles}
        self.samples = step_samples(workload, self.group_size)
        self._totals = {role: SampleTotals.of(self._mini_batch(role)) for role in roles}
        self._longest_first = sorted(self.samples, key=lambda sample: -sample.tokens)
        self._updates = lru_cache(None)(self._update_s)
        self._bounds = lru_cache(None)(self._update_bound_s)
        self._borders = lru_cache(None)(self._chunk_layers)
        self.score_s = lru_cache(None)(self._score_s)
        self.generation_bound = lru_cache(None)(self._generation_bound)
        self._dealt = lru_cache(None)(self._dealt_bound)

    def on(self, cluster: ClusterShape) -> "MappingPrices":
        """Return these prices on another cluster, or with other places of its ranks."""
        return MappingPrices(
            self.costs.on(cluster),
            self.memory,
            self.roles,
            self.workload,
            decode_steps=self.decode_steps,
            epochs=self.epochs,
            mini_batches=self.mini_batches,
        )

    def in_order(self, order: Sequence[int]) -> "MappingPrices":
        """Return these prices with `DeviceMapping.rank_order`; an empty one changes nothing."""
        return self.on(self.costs.cluster.ordered(order)) if order else self

    # Updates

    def update_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        """Seconds of all of a role's updates in a step, with its way onto the device and off."""
        return self._updates(role, layout, self.costs.cluster.aligned(ranks))

    def update_bound_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        """A closed form that `update_s` is never below."""
        return self._bounds(role, layout, self.costs.cluster.aligned(ranks))

    def filled_bound_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        """A role's part of a closed form that `fused_update_s` is never below."""
        ranks = self.costs.cluster.aligned(ranks)
        each = self.costs.bound_of(role, layout, ranks, self._totals[role], filled=True)
        return self._all_updates(role, layout, each)

    def balanced(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> TrainLayout:
        """The layout with chunk borders by cost, which may be where they are."""
        # How data ranks are divided into replicas changes nothing within a pipeline.
        same = replace(layout, replicas=1, fsdp=layout.data_ranks)
        sizes = self._borders(role, same, self.costs.cluster.aligned(ranks))
        return replace(layout, chunk_layers=sizes)

    def _chunk_layers(
        self, role: PlannedRole, layout: TrainLayout, ranks: range
    ) -> tuple[int, ...]:
        return self.costs.balanced_layers(role, layout, ranks, self._totals[role])

    def _update_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        each = self.costs.update_s(role, layout, ranks, self._mini_batch(role))
        return self._all_updates(role, layout, each)

    def _mini_batch(self, role: PlannedRole) -> list[SampleLength]:
        """The first one of a role's update."""
        number = role.mini_batches or self.mini_batches
        return self.samples[: max(1, len(self.samples) // number)]

    def _update_bound_s(self, role: PlannedRole, layout: TrainLayout, ranks: range) -> float:
        each = self.costs.bound_of(role, layout, ranks, self._totals[role])
        return self._all_updates(role, layout, each)

    def _all_updates(self, role: PlannedRole, layout: TrainLayout, each: float) -> float:
        steps = (role.epochs or self.epochs) * (role.mini_batches or self.mini_batches)
        seconds = each * steps
        there = self.costs.activate_s(role, layout)
        return seconds + there + self.costs.deactivate_s(role, layout)

    # The three levels

    def bound(self, mapping: DeviceMapping, updates: Mapping[str, float]) -> StepSeconds:
        """The least seconds of a step, whatever the schedule; `updates` are seconds by role."""
        home = mapping.ranks_of(ACTOR)
        place, dealt = (mapping.gen, self.costs.cluster.aligned(home)), 0.0
        decode, alone = self.generation_bound(*place)
        infer = self._infer(mapping)
        # Inference by who does it: instances, all of the actor's ranks after generation, a pool.
        shared, after, pools = 0.0, 0.0, dict[str, float]()
        for role in self.roles:
            seconds, pool = infer.get(role.name, 0.0), mapping.pool_of(role.name)
            if pool != mapping.pool_of(ACTOR):
                pools[pool] = pools.get(pool, 0.0) + seconds
            elif isinstance(self.costs.stage_layout(role, mapping)[0], TrainLayout):
                after += seconds
            else:
                shared += seconds
        decoding = f"decoding on {mapping.instances} instances"
        if not mapping.schedule.entry.overlaps:  # one stage after the other
            rest = sum(infer.values())
            bounds = {decoding: decode + rest, "the longest sample": alone + rest}
            dealt = self._dealt(*place) + rest
        else:
            bounds = {decoding: decode + shared + after, "the longest sample": alone + after}
            bounds |= {f"inference in pool {name}": seconds for name, seconds in pools.items()}
        reason = max(bounds, key=lambda name: bounds[name])
        return StepSeconds(
            switch=0.0,
            front=max(dealt, bounds[reason]),
            infer=infer,
            train=dict(updates),
            training=self._longest_pool(mapping, updates),
            reason=reason,
        )

    def priced(self, mapping: DeviceMapping) -> StepSeconds:
        """Like the bound, with updates action by action and the bytes that a switch must move."""
        updates = {
            name: self.update_s(self._by_name[name], layout, mapping.ranks_of(name))
            for name, layout in mapping.train.items()
        }
        switch = self.costs.to_generation_bound_s(self._by_name[ACTOR], mapping)
        return replace(self.bound(mapping, updates), switch=switch)

    def replayed(self, mapping: DeviceMapping, priced: StepSeconds) -> StepSeconds:
        """A step as the schedule has it, in virtual time: `SimulatedExecutor` under the mapping."""
        work = MappedWork(
            costs=self.costs,
            mapping=mapping,
            roles=self.roles,
            mini_batches=self.mini_batches,
            epochs=self.epochs,
        )
        # A schedule that moves the tail has learned lengths and costs after its first step.
        steps = 2 if mapping.schedule.entry.moves_samples else 1
        setting = mapped_setting(
            work,
            replace(self.workload, num_steps=steps),
            self.group_size,
            max_held=max(1, self.memory.samples_held(mapping.gen)),
            decode_steps=self.decode_steps,
        )
        outcome = replay(setting, mapping.schedule)
        switch = outcome.stages["to_generate"]
        return replace(
            priced,
            switch=switch,
            front=outcome.front_s,
            train={name: outcome.stages[f"update_{name}"] for name in mapping.train},
            training=outcome.step_s - switch - outcome.front_s,
            idle=outcome.bubbles,
            stages=outcome.stages,
        )

    # Their pieces

    def _longest_pool(self, mapping: DeviceMapping, updates: Mapping[str, float]) -> float:
        """Roles of a pool are trained one after the other."""
        return max(
            sum(updates[name] for name in names if name in updates)
            for names in mapping.pools.values()
        )

    def _infer(self, mapping: DeviceMapping) -> dict[str, float]:
        """Seconds of the forward-only stages of each role, on the ranks that they take."""
        seconds = {}
        for role in self.roles:
            if role.passes:
                layout, _ = self.costs.stage_layout(role, mapping)
                ranks = self.costs.cluster.aligned(mapping.ranks_of(role.name))
                seconds[role.name] = len(role.passes) * self.score_s(role, layout, ranks)
                if role.name != ACTOR or role.scores_with_shards:  # else its weights are there
                    seconds[role.name] += self.costs.activate_s(role, layout)
        return seconds

    def _score_s(self, role: PlannedRole, layout: TrainLayout | GenLayout, ranks: range) -> float:
        """Seconds of one stage; copies of a role that only scores share the samples evenly."""
        if isinstance(layout, TrainLayout):
            return self.costs.score_s(role, layout, ranks, self.samples)
        share = self._longest_first[:: len(ranks) // layout.ranks]
        return self.costs.score_s(role, layout, ranks[: layout.ranks], share)

    def front_bound_s(self, gen: GenLayout, frame: DeviceMapping) -> float:
        """The least seconds of generation and inference, for all schedules and training layouts."""
        home = frame.pool_of(ACTOR)
        decode, alone = self.generation_bound(
            gen, self.costs.cluster.aligned(frame.ranks_of(ACTOR))
        )
        pools = dict.fromkeys(frame.pools, 0.0)
        for role in self.roles:
            if role.passes and not role.trained:
                ranks = self.costs.cluster.aligned(frame.ranks_of(role.name))
                seconds = len(role.passes) * self.score_s(role, gen, ranks)
                pools[frame.pool_of(role.name)] += seconds
        return max(decode + pools.pop(home), alone, *pools.values())

    def _generation_bound(self, gen: GenLayout, ranks: range) -> tuple[float, float]:
        """Decoding in the largest batches without a gap, and the longest sample alone."""
        costs, held = self._instance(gen, ranks)
        instances = len(ranks) // gen.ranks
        groups = self.workload.groups[: self.workload.prompts_per_step]
        work = sum(costs.prefill_token_s * group.prompt_tokens for group in groups)
        work += sum(costs.rows_s(s.prompt, s.response) for s in self.samples)
        work += sum(sample.response for sample in self.samples) * costs.step_s / held
        prompt, longest = max(self.samples, key=lambda sample: sample.response)
        ends = float(costs.pace(1, prompt)), float(costs.pace(1, prompt + longest))
        return work / instances, longest * sum(ends) / 2

    def _dealt_bound(self, gen: GenLayout, ranks: range) -> float:
        """Decoding by the instance that takes longest, where prompts are dealt to them in turn.

        It makes its longest sample step by step, and all of them in its largest batches.
        """
        costs, held = self._instance(gen, ranks)
        instances, most = len(ranks) // gen.ranks, 0.0
        for first in range(instances):
            groups = self.workload.groups[: self.workload.prompts_per_step][first::instances]
            work = sum(costs.prefill_token_s * group.prompt_tokens for group in groups)
            numbers = range(first, self.workload.prompts_per_step, instances)
            samples = [
                sample
                for number in numbers
                for sample in self.samples[number * self.group_size :][: self.group_size]
            ]
            work += sum(costs.rows_s(sample.prompt, sample.response) for sample in samples)
            responses = [sample.response for sample in samples]
            steps = max(max(responses, default=0), sum(responses) / held)
            most = max(most, work + steps * costs.step_s)
        return most

    def _instance(self, gen: GenLayout, ranks: range) -> tuple[Costs, int]:
        """The costs of a rollout instance, and the rows that it holds."""
        costs = self.costs.generation(self._by_name[ACTOR], gen, ranks[: gen.ranks])
        return costs, max(1, self.memory.samples_held(gen))
