"""The stages of a step under a device mapping: their scopes, pools and seconds.

`SimulatedExecutor` asks it in place of seconds a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from hybridrl.config import ConfigError
from hybridrl.costs.fused_plans import can_share_a_plan, shared_score_s, updates_s
from hybridrl.costs.instance import Costs
from hybridrl.costs.mapping import ACTOR, DeviceMapping, PlannedRole, SampleLength, TrainLayout
from hybridrl.costs.model import CostModel
from hybridrl.flow.executor import Scope
from hybridrl.flow.graph import Stage
from hybridrl.flow.sample import Sample
from hybridrl.flow.workload import Workload


@dataclass(frozen=True, kw_only=True)
class MappedWork:
    """A mapping, its roles, and their seconds.

    Invariant: every role is in one pool, and every trained role has a layout of its pool's ranks.
    """

    costs: CostModel
    mapping: DeviceMapping
    roles: Sequence[PlannedRole]
    mini_batches: int = 1
    epochs: int = 1

    def __post_init__(self) -> None:
        """Raises ConfigError where pools, layouts and ranks do not fit each other."""
        mapping = self.mapping
        names = [role.name for role in self.roles]
        placed = sorted(role for roles in mapping.pools.values() for role in roles)
        if placed != sorted(names):
            raise ConfigError("mapping.pools", placed, f"each of {sorted(names)} once")
        if sum(mapping.ranks.values()) > self.costs.cluster.ranks:
            allowed = f"at most the {self.costs.cluster.ranks} ranks of the cluster"
            raise ConfigError("mapping.ranks", dict(mapping.ranks), allowed)
        for role in self.roles:
            if role.trained and mapping.train[role.name].ranks != len(mapping.ranks_of(role.name)):
                ranks = len(mapping.ranks_of(role.name))
                allowed = f"pp x replicas x fsdp x tp = {ranks}, the ranks of its pool"
                raise ConfigError(f"mapping.train.{role.name}", mapping.train[role.name], allowed)
        if len(mapping.ranks_of(ACTOR)) % mapping.gen.ranks:
            allowed = f"pp x tp that divides {len(mapping.ranks_of(ACTOR))} ranks"
            raise ConfigError("mapping.gen", mapping.gen, allowed)

    @cached_property
    def _by_stage(self) -> dict[str, PlannedRole]:
        return {stage: role for role in self.roles for stage in role.passes}

    @property
    def trained(self) -> list[PlannedRole]:
        """The roles that are trained, in the order of their updates."""
        return [role for role in self.roles if role.trained]

    @property
    def home(self) -> str:
        """The pool of the actor and its instances."""
        return self.mapping.pool_of(ACTOR)

    @property
    def scopes(self) -> dict[str, Scope]:
        """The scopes of forward-only stages, by their names."""
        scopes = {}
        for stage, role in self._by_stage.items():
            layout, home = self.costs.stage_layout(role, self.mapping)
            here = Scope.WORLD if isinstance(layout, TrainLayout) else Scope.INSTANCE
            scopes[stage] = here if home else Scope.POOL
        return scopes

    def flow_costs(self, samples: Sequence[SampleLength]) -> Costs:
        """Return the costs for the scheduler, whose choices need seconds a token.

        `samples` are those of a step. An instance generates and scores a share of them; updates
        take all, in their mini-batches and epochs, as `CostMeter.saw_train` measures them.
        """
        model, mapping = self.costs, self.mapping
        (actor,) = [role for role in self.roles if role.name == ACTOR]
        share = samples[:: mapping.instances]
        tokens = sum(sample.tokens for sample in share)
        token_s, call_s = {}, {}
        for stage, role in self._by_stage.items():
            # Of one more row of these samples, and of none.
            one, two = (model.stage_s(role, mapping, [*share] * n) for n in (1, 2))
            token_s[stage] = max(0.0, two - one) / tokens
            layout, _ = model.stage_layout(role, mapping)
            call_s[stage] = max(0.0, 2 * one - two) + model.activate_s(role, layout)
        return replace(
            model.generation(actor, mapping.gen, mapping.ranks_of(ACTOR)),
            token_s=token_s,
            stage_call_s=call_s,
            train_token_s=self._updates_s(samples) / sum(sample.tokens for sample in samples),
            switch_s=model.to_generation_s(actor, mapping),
        )

    def _updates_s(self, samples: Sequence[SampleLength]) -> float:
        """Seconds of the updates of all roles on these samples; pools train at once."""
        longest = 0.0
        for names in self.mapping.pools.values():
            together = [role for role in self.trained if role.name in names]
            fuses = self.mapping.fuses and can_share_a_plan(together, self.mapping.train)
            calls = [together] if fuses else [[role] for role in together]
            longest = max(longest, sum(self._roles_update_s(roles, samples) for roles in calls))
        return longest

    def pool(self, stage: Stage) -> str:
        """Return the pool of a stage's role; a verifier has the actor's."""
        role = stage.role
        is_known = any(role in roles for roles in self.mapping.pools.values())
        return self.mapping.pool_of(role) if role is not None and is_known else self.home

    def has_pass(self, stage: Stage) -> bool:
        """Whether a stage is a forward pass of a role."""
        return stage.name in self._by_stage

    def pass_s(self, stage: Stage, samples: Sequence[Sample]) -> float:
        """Seconds of one call: on an instance, or on all ranks of the role's pool."""
        return self.costs.stage_s(self._by_stage[stage.name], self.mapping, lengths_of(samples))

    def onload_s(self, stage: Stage) -> float:
        """Seconds until a forward pass's role is on the device; generation keeps the actor."""
        role = self._by_stage[stage.name]
        if role.name == ACTOR and not role.scores_with_shards:
            return 0.0
        layout, _ = self.costs.stage_layout(role, self.mapping)
        return self.costs.activate_s(role, layout)

    def fuses(self, stages: Sequence[Stage], stage: Stage) -> bool:
        """Whether a stage of a trained role shares the plan of `stages`, of other roles."""
        roles = self._roles_of([*stages, stage])
        names = [role.name for role in roles]
        pools = {self.mapping.pool_of(name) for name in names}
        apart = len(set(names)) == len(names) and len(pools) == 1
        return self.mapping.fuses and apart and can_share_a_plan(roles, self.mapping.train)

    def passes_s(self, stages: Sequence[Stage], samples: Sequence[Sample]) -> float:
        """Seconds of one call of forward passes that share a plan (`fuses`)."""
        roles = self._roles_of(stages)
        ranks = self.mapping.ranks_of(roles[0].name)
        return shared_score_s(self.costs, roles, self.mapping.train, ranks, lengths_of(samples))

    def update_s(self, stages: Sequence[Stage], samples: Sequence[Sample]) -> float:
        """Seconds of the updates of a role, or of several that share a plan: see `updates_s`."""
        return self._roles_update_s(self._roles_of(stages), lengths_of(samples))

    def _roles_update_s(
        self, roles: Sequence[PlannedRole], samples: Sequence[SampleLength]
    ) -> float:
        return updates_s(
            self.costs,
            roles,
            self.mapping.train,
            self.mapping.ranks_of(roles[0].name),
            samples,
            mini_batches=self.mini_batches,
            epochs=self.epochs,
        )

    def _roles_of(self, stages: Sequence[Stage]) -> list[PlannedRole]:
        """Return the roles of the stages, the actor first, as plans count directions."""
        by_name = {role.name: role for role in self.roles}
        roles = [by_name[stage.role or ACTOR] for stage in stages]
        return sorted(roles, key=lambda role: role.name != ACTOR)


def lengths_of(samples: Sequence[Sample]) -> list[SampleLength]:
    """Tokens of each sample's prompt and response."""
    return [SampleLength(sample.prompt_tokens, sample.response_tokens) for sample in samples]


def step_samples(workload: Workload, group_size: int) -> list[SampleLength]:
    """Return the lengths of the first step's samples, `group_size` a prompt."""
    return [
        SampleLength(group.prompt_tokens, group.lengths[k % len(group.lengths)])
        for group in workload.groups[: workload.prompts_per_step]
        for k in range(group_size)
    ]
