"""One rank of another pool than the actor's: models that train or score, on copies of samples."""

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from hybridrl.config import Config, Grouping, JudgeHome
from hybridrl.costs.memory import PoolSizes
from hybridrl.flow.executor import Computed
from hybridrl.flow.graph import Graph, Stage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.layout.grouping import TrainAxes, gen_positions
from hybridrl.layout.mesh import gen_mesh
from hybridrl.models.shard import GenParallel
from hybridrl.workers.answers import RankDescription
from hybridrl.workers.base_worker import BaseWorker, Published, Reply
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.device_residency import DeviceResidency
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.role_factory import RoleFactory
from hybridrl.workers.training import UpdateShare

logger = logging.getLogger(__name__)


class CriticWorker(BaseWorker):
    """One rank of a pool without the actor (`cluster.placement`, `cluster.pool_of`).

    It hosts value models, which it trains, neural judges, the reference and the teacher. It never
    generates. Samples live in the pool that does: `fetch` brings copies of those that a call reads,
    and the call drops them when it ends. New tensors go into the data plane.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        config: Config,
        model_path: str,
        data_plane: DataPlane,
        *,
        pool: str,
    ) -> None:
        """`rank` of `size` in the `pool`."""
        super().__init__(rank, size, config, model_path, data_plane)
        self.pool = pool

    @dispatch(Dispatch.SAME)
    def setup(self, host: str, port: int, sizes: PoolSizes | None = None) -> Reply[RankDescription]:
        """Join the process group, whose first rank listens on `port` of `host`."""
        process = self._join(host, port, sizes)
        self.residency = DeviceResidency(self.device, self._on_reading)
        self.build = RoleFactory(
            self.config, self.model_path, self.tokenizer, self.store, self.device
        )
        with self._span("load"):
            for name in self.config.eval_judges:  # in every recipe
                self._add_judge(name)
        return self._reply(RankDescription(process=process))

    @cached_property
    def _parallel(self) -> GenParallel:
        """Replicas of roles that only score, as generation instances are laid out. Collective."""
        layout = self.config.rollout.layout
        axes = TrainAxes(fsdp=self.size)
        positions = gen_positions(axes, layout.pp, layout.tp, Grouping.vanilla)
        mesh = gen_mesh(positions, layout.pp, layout.tp)
        return GenParallel.make(mesh, self.device.type, layout.ep)

    def _actor_weights(
        self, references: Sequence[Any]
    ) -> Iterable[tuple[str, torch.Tensor]] | None:
        if not references:
            return None
        # One after the other: no rank holds the whole model. DLPack takes read-only arrays.
        return ((name, from_dlpack(self.data_plane.get([ref])[0])) for name, ref in references)

    def _add_judge(self, name: str) -> None:
        home = self.config.home_of(name)
        is_here = home is JudgeHome.pool and self.config.pool_of(name) == self.pool
        if is_here and name not in self.scorers:
            self.scorers[name] = self.build.neural_judge(name, self._parallel)
            logger.debug("neural judge %s made", name)

    def _add_scorers(self, graph: Graph, weights: Sequence[Any]) -> None:
        for name in graph.roles:
            if name not in self.trained and name not in self.scorers:
                start = self._actor_weights(weights)
                self.scorers[name] = self.build.copy_or_teacher(name, self._parallel, start)
                logger.debug("scorer %s made", name)

    @dispatch(Dispatch.SAME)
    def compute(self, stage: Stage, ids: tuple[SampleId, ...]) -> Reply[Published[Computed]]:
        """Run a stage that all ranks of the pool take part in; it publishes the new tensors."""
        reply = self._run_stage(stage, ids)
        published = self._published(reply.value, ids, reply.value.tensors)
        self.store.drop(ids)
        return Reply(published, reply.spans, reply.memory)

    @dispatch(Dispatch.PER_RANK)
    def update(
        self, stages: tuple[UpdateStage, ...], shares: tuple[UpdateShare, ...]
    ) -> Reply[list[dict[str, float]]]:
        """Train as in any pool, then drop the copies of samples."""
        reply = super().update(stages, shares)
        for share in shares:
            self.store.drop(share.ids)
        return reply
