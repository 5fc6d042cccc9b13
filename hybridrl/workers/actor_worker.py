"""One rank of the actor's pool: its samples, its phases, and the roles besides the actor."""

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from hybridrl.config import JudgeHome
from hybridrl.costs.memory import PoolSizes
from hybridrl.flow.executor import Computed, EarlyTrained, Phase
from hybridrl.flow.graph import Graph, Stage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.actor_shards import ActorShards
from hybridrl.workers.answers import EnteredPhase, RankDescription
from hybridrl.workers.base_worker import Published, Reply
from hybridrl.workers.colocated import ColocatedActor
from hybridrl.workers.device_residency import DeviceStatus
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.generator import Generator
from hybridrl.workers.role_factory import ActorRoleFactory
from hybridrl.workers.sample_worker import SampleWorker
from hybridrl.workers.scorers import ReferenceScorer
from hybridrl.workers.trainer import ActorTrainer
from hybridrl.workers.training import UpdateShare

logger = logging.getLogger(__name__)


class ActorWorker(ActorShards, SampleWorker):
    """One rank of the actor's pool, where its ranks generate: often the only pool.

    It hosts the actor (training shard and rollout engine) and the verifiers, and of the other roles
    those that are not in another pool. All samples live in this pool.

    In GENERATE the rollout engine holds the actor's newest weights, and every instance works alone.
    It decodes. Without samples it may release its KV cache and score with a forward-only role
    (`infer`). Then it may decode again. `residency` says which weights are on the device.
    """

    build: ActorRoleFactory

    # -- life --------------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def setup(self, host: str, port: int, sizes: PoolSizes | None = None) -> Reply[RankDescription]:
        """Join the process group, whose first rank listens on `port` of `host`; load the actor."""
        process = self._join(host, port, sizes)
        with self._span("load"):
            model = (self.config, self.model_path, self.tokenizer, self.store, self.device)
            nodes = [process.node] * self.size
            dist.all_gather_object(nodes, process.node)
            self.actor = actor = ColocatedActor(*model, self.staying, nodes, self._on_reading)
            self.residency = actor.residency
            self.build = ActorRoleFactory(*model, actor)
            self.trained["actor"] = actor.trainer
            if old_policy := self.build.old_policy():
                self.scorers["actor"] = old_policy
            for name in self.config.eval_judges:  # in every recipe
                self._add_judge(name)
        self._begin_records()
        instance = actor.generator.describe(actor.switch_plan.grouping.value)
        trained = actor.trainer.describe(self.device)
        return self._reply(RankDescription(process=process, actor=trained, instance=instance))

    @property
    def generator(self) -> Generator:
        """The actor's part that generates."""
        return self.actor.generator

    @property
    def trainer(self) -> ActorTrainer:
        """The actor's part that trains."""
        return self.actor.trainer

    def _add_judge(self, name: str) -> None:
        super()._add_judge(name)
        if name not in self.scorers and self.config.home_of(name) is JudgeHome.instance:
            self.scorers[name] = self.build.neural_judge(name, self.generator.parallel)
            logger.debug("neural judge %s made", name)

    def _add_scorers(self, graph: Graph, weights: Sequence[Any]) -> None:
        known = {*self.trained, *self.verifiers, *self.scorers, *graph.judges}
        for name in graph.roles:
            if name not in known:
                self.scorers[name] = self.build.scorer(name, graph)
                logger.debug("scorer %s made", name)

    # -- generation --------------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def enter(self, phase: Phase) -> Reply[EnteredPhase]:
        """Change phase; into GENERATE this is the weight switch. Answers with its cost."""
        switch = None
        with self._span("switch" if phase is Phase.GENERATE else "to_train"):
            if phase is Phase.TRAIN:
                self.actor.enter_training()
            else:
                self._discard_early()
                if self.residency.status is DeviceStatus.TRAINING:
                    self._refresh_averages()
                switch = self.actor.enter_generation()
        return self._reply(EnteredPhase(version=self.generator.version, switch=switch))

    def _before_decoding(self) -> None:
        assert self.residency.status is DeviceStatus.GENERATING, "generation outside its phase"
        self.residency.activate(None)

    # -- per-sample stages -------------------------------------------------------------------

    @dispatch(Dispatch.SAME)
    def compute(self, stage: Stage, ids: tuple[SampleId, ...]) -> Reply[Computed]:
        """Run a stage that all ranks of the pool take part in; new tensors stay here."""
        return self._run_stage(stage, ids)

    @dispatch(Dispatch.SAME)
    def compute_together(
        self, stages: tuple[Stage, ...], ids: tuple[SampleId, ...]
    ) -> Reply[list[Computed]]:
        """Run stages of several trained roles as one, on samples that live here."""
        return self._reply(self._score(stages, ids))

    @dispatch(Dispatch.SAME)
    def infer(
        self,
        stage: Stage,
        instance: int,
        ids: tuple[SampleId, ...],
        arriving: tuple[SampleId, ...],
        parcels: tuple[Any, ...],
    ) -> Reply[Published[Computed]]:
        """Run a forward-only stage with the other ranks of the instance; `ids` are this rank's.

        Those that are `arriving` from other instances are in `parcels`, among others.
        """
        self._fetch(parcels, arriving)
        assert stage.role is not None
        start = time.perf_counter()
        with self._span(stage.name, len(ids)):
            self.residency.release_idle_cache()
            self.residency.activate(self.scorers[stage.role])
            scalars, tensors = self.scorers[stage.role].compute(stage, ids)
        seconds = time.perf_counter() - start
        value = Computed(stage.name, ids, scalars, tensors, instance, seconds)
        return self._reply(self._published(value, ids, tensors))

    @dispatch(Dispatch.SAME)
    def train_early(
        self, stage: UpdateStage, instance: int, share: UpdateShare, arriving: tuple[SampleId, ...]
    ) -> Reply[EarlyTrained]:
        """Compute the gradient of a part of an update with the other ranks of the instance alone.

        It is in GENERATE, where it has no unfinished sample, or trains already. The rollout engine
        sleeps, and the training shards come, as for the update itself. Those of the share that are
        `arriving` from other instances are in its parcels, among others.
        """
        self._fetch(share.parcels, arriving)
        with self._span("early backward", len(share.ids)):
            seconds = self.actor.accumulate(stage, share)
        self._early_s += seconds
        return self._reply(EarlyTrained(stage.name, instance, share.ids, seconds))

    def _discard_early(self) -> None:
        """Throw away the gradients of a step that has not come to its update."""
        self.actor.trainer.train_engine.discard()
        self._early_s = 0.0

    def _refresh_averages(self) -> None:
        """Copy moving averages that have changed into their scorers. Collective."""
        for name, average in self.actor.trainer.averages.items():
            if average.moved:
                scorer = self.scorers[name]
                assert isinstance(scorer, ReferenceScorer)
                self.residency.activate(scorer)
                dtype = self.config.model.compute_dtype
                self.actor.copy_weights(scorer.parameters(), dtype, average.shards)
                self.actor.copy_biases(scorer.engine.model)
                average.moved = False
