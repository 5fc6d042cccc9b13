"""The actor on a rank that trains and generates: both halves on one device, and the switch."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridrl.config import Config, DType
from hybridrl.flow.graph import UpdateStage
from hybridrl.layout.adapters import AdapterSwitch
from hybridrl.layout.layerwise import Fill, LayerwiseSwitch
from hybridrl.layout.parameters import gen_layout, train_layout
from hybridrl.layout.plan import Plan, plan
from hybridrl.layout.process_groups import warm_up
from hybridrl.layout.switching import Switch, plan_switch
from hybridrl.layout.weight_switch import SwitchStats, WeightSwitch, connect_peers, gather_groups
from hybridrl.models.adapters import pair_of
from hybridrl.models.buffers import copy_buffers
from hybridrl.models.load import TORCH_DTYPES, end_token_ids, load_config
from hybridrl.system.memory import MemoryReading
from hybridrl.workers.device_residency import DeviceResidency, DeviceStatus
from hybridrl.workers.generator import Generator
from hybridrl.workers.sampling import SamplingTexts
from hybridrl.workers.staying_roles import ALL_LEAVE, StayingRoles
from hybridrl.workers.store import SampleStore
from hybridrl.workers.trainer import ActorTrainer
from hybridrl.workers.training import UpdateShare


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """Weights of another time or another model: this rank's trained shards by name, on the host.

    No other snapshot has its `version`.
    """

    version: int
    shards: Mapping[str, torch.Tensor]


class ColocatedActor:
    """The actor's trainer and its generator, of which neither knows the other.

    `residency` says which of them, or which other role, has the device. Between them is the weight
    switch: a plan from the layout of training to that of generation, on the same ranks.

    Invariant: while the rollout engine is awake, its weights are those of `generator.version`.
    """

    def __init__(
        self,
        config: Config,
        model_path: str,
        tokenizer: PreTrainedTokenizerBase,
        store: SampleStore,
        device: torch.device,
        staying: StayingRoles = ALL_LEAVE,
        nodes: Sequence[str] = (),
        on_reading: Callable[[MemoryReading], None] = lambda reading: None,
    ) -> None:
        """The actor may be one of the roles that are `staying` on the device.

        `nodes` has the node of each rank; without it all are on one. `on_reading` is that of
        `DeviceResidency`.
        """
        self.config, self.device = config, device
        model_config = load_config(model_path, vision=config.model.vision)
        ends = end_token_ids(model_path, model_config)
        sampling = SamplingTexts(tokenizer, config.data.chat, config.stop_texts, ends)
        # the training shards
        self.trainer = ActorTrainer(config, model_path, sampling.all_end_ids, store, device)
        # the switch, before the rollout engine takes the memory that communicators leave
        self.switch_plan = self._plan_switch(model_config.num_hidden_layers, nodes)
        moves = self.switch_plan.plan
        warm_up(gather_groups(moves, dist.get_rank()), device)
        if device.type == "cuda":  # gloo connects all ranks when a group is made
            connect_peers(moves, device)
        kind = TORCH_DTYPES[config.rollout.dtype]
        settings = dist.get_rank(), kind, device, self._bucket_bytes
        self._switch = LayerwiseSwitch(moves, *settings)
        self.adapters = self._load_base(kind)
        # the rollout engine, which takes what the training shards leave of the device
        memory = self.trainer.train_engine.memory
        memory.stays = "actor" in staying.names
        self.trainer.train_engine.offload()
        self.generator = Generator(
            config,
            model_path,
            model_config,
            tokenizer,
            sampling,
            store,
            device,
            moves.dst,
            # What is there already, its weights, is seen in use.
            max(0, staying.reserved_bytes - memory.nbytes * memory.stays),
        )
        self.generator.rollout.sleep()
        self.residency = DeviceResidency(device, on_reading, self.generator.rollout)

    def _plan_switch(self, num_layers: int, nodes: Sequence[str]) -> Switch:
        """Plan the weight switch."""
        rollout, engine = self.config.rollout, self.trainer.train_engine
        return plan_switch(
            engine.parameters,
            engine.dims.axes,
            rollout.layout.pp,
            rollout.layout.tp,
            rollout.layout.grouping,
            engine.dims.stage_of_layer(num_layers),
            gen_ep=rollout.layout.ep,
            vocab_multiple=rollout.features.vocab_multiple,
            ascending=rollout.features.ascending,
            nodes=nodes,
        )

    def _load_base(self, dtype: torch.dtype) -> AdapterSwitch | None:
        """The switch of the adapters, with the base weights loaded; None without adapters."""
        if self.trainer.train_engine.lora is None:
            return None
        switch = self._adapter_switch(self.switch_plan.plan, dtype)
        switch.load(self.trainer.train_engine.named_shards(), self.device)
        return switch

    def _adapter_switch(self, base: Plan, dtype: torch.dtype) -> AdapterSwitch:
        """A switch of the adapters between the layouts of `base`, which moves the weights."""
        engine = self.trainer.train_engine
        layers = engine.model.config.num_hidden_layers
        assert engine.lora is not None
        stages, gen_tp = engine.dims.stage_of_layer(layers), self.config.rollout.layout.tp
        src = train_layout(engine.adapters, engine.dims.axes, stages, gen_tp)
        dst = gen_layout(engine.adapters, base.dst.mesh, layers)
        pairs = {name: pair for name in base.src.shapes if (pair := pair_of(name))[0] in src.shapes}
        settings = engine.lora.scaling, dist.get_rank(), dtype, self._bucket_bytes
        return AdapterSwitch(base, plan(src, dst), pairs, *settings)

    @property
    def _bucket_bytes(self) -> int:
        return self.config.rollout.layout.bucket_bytes(self.device.type)

    # -- who has the device --------------------------------------------------------------------

    def enter_generation(self, snapshot: WeightSnapshot | None = None) -> SwitchStats | None:
        """Have the rollout engine awake with the newest weights, or a `snapshot`. Collective.

        Returns the cost of the weight switch, None where nothing moved.
        """
        with self.residency.entering_generation(self.trainer.train_engine) as wakes:
            return self.switch_weights(wakes, snapshot)

    def enter_training(self) -> None:
        """Put the rollout engine to sleep, for the roles that train.

        A rank that has trained early is there already, with its shards and gradients.
        """
        if not self.trainer.train_engine.has_early_gradient:
            self.residency.enter_training()

    def accumulate(self, stage: UpdateStage, share: UpdateShare) -> float:
        """Compute the gradient of a part of an update that is to come; its seconds.

        In generation the rollout engine sleeps from now on, and the training shards come.
        """
        if self.residency.status is DeviceStatus.GENERATING:
            assert not self.generator.unfinished, "training while samples decode"
            self.residency.enter_training()
        self.residency.activate(self.trainer.train_engine)
        start = time.perf_counter()
        self.trainer.update_steps(stage, share).accumulate()
        return time.perf_counter() - start

    # -- the weight switch ---------------------------------------------------------------------

    def switch_weights(
        self, wakes: bool, snapshot: WeightSnapshot | None = None
    ) -> SwitchStats | None:
        """Move the newest weights to the rollout engine, or a `snapshot`, unless it has them.

        An engine that `wakes` has none. Gives the switch's cost, None where nothing moved.
        Collective.
        """
        version = self.trainer.train_engine.version if snapshot is None else snapshot.version
        if not wakes and self.generator.version == version:
            return None

        def load(fill: Fill) -> None:
            self.generator.load(fill, version)

        shards: Mapping[str, torch.Tensor] = self.trainer.train_engine.named_shards()
        if snapshot is not None:
            own = {name: shard.to(self.device) for name, shard in snapshot.shards.items()}
            shards = {**shards, **own}
        if self.adapters is None:
            stats = self._switch.switch(shards, load, self.generator.held_weights)
        else:
            stats = self.adapters.switch(shards, load, self.device)
        if (model := self.generator.shared_model) is not None:
            self.copy_biases(model)
        return stats

    # -- copies of the actor -------------------------------------------------------------------

    def copy_biases(self, model: PreTrainedModel) -> None:
        """Fill the routing biases of a `local_model` on this rank, if training moves them.

        Collective. Small next to the weights, they go through the hosts.
        """
        if self.config.trainer.router_bias_update_rate:
            copy_buffers(model, self.trainer.train_engine.buffers())

    def base_weights(self, dtype: DType) -> Mapping[str, torch.Tensor] | None:
        """The weights without adapters, as a `local_model` on this rank holds them.

        They are in host memory and must not change. None once the adapters have been trained, and
        where no base is kept in `dtype`.
        """
        rollout = self.config.rollout
        same = dtype is rollout.dtype and rollout.features.shares_weights
        if self.adapters is None or self.trainer.train_engine.version or not same:
            return None
        return self.adapters.base

    def copy_weights(
        self,
        parameters: Mapping[str, torch.Tensor],
        dtype: DType,
        shards: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Fill the `parameters` of a `local_model` on this rank. Collective.

        They get the present weights, or `shards` in the layout of the training weights.
        """
        engine = self.trainer.train_engine
        layout = gen_layout(
            engine.parameters,
            self.switch_plan.plan.dst.mesh,
            engine.model.config.num_hidden_layers,
            ep=self.config.rollout.layout.ep,
        )
        kind = TORCH_DTYPES[dtype]
        move = plan(self.switch_plan.plan.src, layout)
        present: Mapping[str, torch.Tensor] = engine.named_shards()
        if shards is not None:
            present = {name: shard.to(self.device) for name, shard in shards.items()}
        if engine.lora is None:
            WeightSwitch(move, dist.get_rank(), kind).switch(present, parameters)
        else:
            assert shards is None, "adapters have no average"
            switch = self._adapter_switch(move, kind)
            switch.load(present, self.device)
            switch.switch(present, lambda fill: fill(parameters), self.device)
