"""The memory of a rank under each mapping of a search, by the plan that a run has of itself."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from hybridrl.config import VALUE_MODELS, Config, Device, RolloutLayoutConfig
from hybridrl.costs.generation_memory import GenerationSizes
from hybridrl.costs.image_memory import ImageSizes
from hybridrl.costs.mapping import ACTOR, DeviceMapping, GenLayout, PlannedRole, TrainLayout
from hybridrl.costs.mapping_overrides import train_config
from hybridrl.costs.memory import MemoryPlan, PoolSizes, ScoringSizes, plan_memory
from hybridrl.costs.train_memory import TrainSizes
from hybridrl.flow import Graph
from hybridrl.preflight.generation_sizes import generation_sizes, kept_id_sizes, scorer_sizes
from hybridrl.preflight.image_sizes import image_sizes
from hybridrl.preflight.memory_inputs import LongestInputs
from hybridrl.preflight.memory_plan import Room, assumed_attention, heaviest, rows_of

if TYPE_CHECKING:
    from hybridrl.preflight.mapping_roles import Shapes


class MappingMemory:
    """Plans of ranks on a device with this `room`, for the models of `shapes` by role.

    A search asks thousands of times for the same few hundred sizes, so each is counted once.
    """

    def __init__(self, config: Config, graph: Graph, shapes: "Shapes", room: Room) -> None:
        self.config, self.graph, self.shapes = copy.copy(config), graph, shapes
        self.capacity, self.reserved = room.capacity, room.reserved
        attention, _ = assumed_attention(config, shapes[ACTOR])
        self.config.model = replace(config.model, attention=attention)
        self.train_sizes = lru_cache(None)(self._train_sizes)
        self.generation_sizes = lru_cache(None)(self._generation_sizes)
        self.scoring_sizes = lru_cache(None)(self._scoring_sizes)
        self.image_sizes = lru_cache(None)(self._image_sizes)

    def _train_sizes(self, role: PlannedRole, layout: TrainLayout) -> TrainSizes:
        """Return the sizes of a trained role on the pipeline stage that needs most."""
        config = self._with_rows(layout.micro_batch_tokens)
        config.trainer.activations = layout.activations
        own, is_actor = train_config(layout), role.name == ACTOR
        trained = config.trainer if is_actor else config.value_model_of(role.name)
        lora = config.actor.lora if is_actor else config.value_model_of(role.name).lora
        rows = rows_of(own, layout.ranks, LongestInputs.of(config, self.graph))
        shape = self.shapes[role.name]
        return heaviest(config, rows, None, shape, own, lora, trained.optim, not is_actor)

    def train_peak(self, role: PlannedRole, layout: TrainLayout) -> dict[str, int]:
        """Bytes by owner at the largest moment of an update, alone on the device."""
        sizes = self.train_sizes(role, layout)
        return sizes.state | sizes.update()

    def fits_training(self, role: PlannedRole, layout: TrainLayout) -> bool:
        """Whether a rank that holds nothing else can train it."""
        peak = self.train_peak(role, layout)
        return sum(peak.values()) + self.reserved <= self.capacity

    def _generation_sizes(self, gen: GenLayout) -> GenerationSizes:
        """Return the sizes of the rollout engine, each of the stage that has most."""
        config = self._generating(self.config, gen)
        inputs = LongestInputs.of(config, self.graph)
        shape, capacity = self.shapes[ACTOR], self.capacity
        return generation_sizes(config, self.graph, shape, inputs, None, capacity)

    def _scoring_sizes(
        self, role: PlannedRole, gen: GenLayout, micro_batch_tokens: int, ranks: int
    ) -> ScoringSizes:
        """Return the sizes of a role that only scores on so many `ranks`."""
        config = self._generating(self._with_rows(micro_batch_tokens), gen)
        row = LongestInputs.of(config, self.graph).row(config.rollout.layout, ranks)
        return scorer_sizes(config, self.shapes[role.name], role.value_head, row, range(gen.pp))

    def _image_sizes(
        self,
        actor: TrainLayout,
        gen: GenLayout,
        micro_batch_tokens: int,
        ranks: int,
        home: bool,
        trained: tuple[TrainLayout, ...],
    ) -> ImageSizes | None:
        """Return the sizes of prompts' images on one of so many `ranks`; `home`: they generate.

        `trained` are the layouts of all roles that train.
        """
        config = self._laid_out(actor, gen, micro_batch_tokens)
        shape, inputs = self.shapes[ACTOR], LongestInputs.of(config, self.graph)
        layouts = list(map(train_config, trained))
        args = config, self.graph, shape, ranks, inputs, home, True, self.capacity
        return image_sizes(*args, layouts)

    def _laid_out(self, actor: TrainLayout, gen: GenLayout, micro_batch_tokens: int) -> Config:
        config = self._generating(self._with_rows(micro_batch_tokens), gen)
        config.trainer.layout = train_config(actor)
        return config

    def _with_rows(self, micro_batch_tokens: int) -> Config:
        config = copy.copy(self.config)
        config.trainer = copy.copy(config.trainer)
        config.trainer.max_tokens_per_micro_batch = micro_batch_tokens
        return config

    @staticmethod
    def _generating(config: Config, gen: GenLayout) -> Config:
        config = copy.copy(config)
        layout: RolloutLayoutConfig = replace(
            config.rollout.layout, pp=gen.pp, tp=gen.tp, ep=gen.ep
        )
        config.rollout = copy.copy(config.rollout)
        config.rollout.layout = layout
        return config

    def plans(
        self, roles: Sequence[PlannedRole], mapping: DeviceMapping
    ) -> Mapping[str, MemoryPlan]:
        """The phases of a rank of each pool, of the rank that has most."""
        by_name = {role.name: role for role in roles}
        return {
            pool: self._plan([by_name[name] for name in names], mapping, mapping.ranks[pool])
            for pool, names in mapping.pools.items()
        }

    def _plan(self, roles: Sequence[PlannedRole], mapping: DeviceMapping, ranks: int) -> MemoryPlan:
        trained = {r.name: self.train_sizes(r, mapping.train[r.name]) for r in roles if r.trained}
        tokens = max(layout.micro_batch_tokens for layout in mapping.train.values())
        home = any(role.name == ACTOR for role in roles)
        layouts = mapping.train[ACTOR], mapping.gen, tokens
        config = self._laid_out(*layouts)
        config.schedule = mapping.schedule
        sizes = PoolSizes(
            trained=trained,
            scoring={
                role.name: self.scoring_sizes(role, mapping.gen, tokens, ranks)
                for role in roles
                if not role.trained
            },
            generation=self.generation_sizes(mapping.gen) if home else None,
            from_actor={
                name
                for name in trained
                if name in VALUE_MODELS and not self.config.value_model_of(name).path
            },
            together=(tuple(trained),) if mapping.fuses and len(trained) > 1 else (),
            images=self.image_sizes(*layouts, ranks, home, tuple(mapping.train.values())),
            kept_ids=kept_id_sizes(config, self.graph, self.shapes[ACTOR], ranks),
        )
        device = self.config.cluster.device.value
        return plan_memory(sizes, device, self.capacity, self.reserved)

    def samples_held(self, gen: GenLayout) -> int:
        """Full samples that decode together on an instance; 0 where none fits."""
        sizes = self.generation_sizes(gen)
        tokens = sizes.wanted or sizes.most
        if self.config.cluster.device is Device.cuda:
            left = self.capacity - self.reserved - sizes.weights - sizes.buckets
            tokens = min(tokens, sizes.fits(left))
        return min(self.config.rollout.max_running, tokens // sizes.longest)
