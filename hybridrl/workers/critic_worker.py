"""A rank of the critic's pool: value models and judges that are models, on samples lent to them."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from hybridrl.config import Grouping
from hybridrl.flow.graph import Stage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.layout.grouping import TrainAxes, gen_positions
from hybridrl.layout.mesh import gen_mesh
from hybridrl.models.shard import GenParallel
from hybridrl.workers.base_worker import BaseWorker, Reply
from hybridrl.workers.device_residency import DeviceResidency
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.role_factory import RoleFactory
from hybridrl.workers.training import UpdateShare


class CriticWorker(BaseWorker):
    """One rank of the critic's pool (`cluster.placement=split`).

    Samples live in the actor's pool. Here is a copy of what a call reads, for the length of the
    call: it comes in `parcels`, and what is made of it goes into the data plane.
    """

    @dispatch(Dispatch.SAME)
    def setup(self, host: str, port: int) -> Reply:
        """Join the process group, whose first rank listens on `port` of `host`.

        Answers with what is worth logging.
        """
        described = self._join(host, port)
        self.residency = DeviceResidency(self.device, self._on_reading)
        self.build = RoleFactory(
            self.config, self.model_path, self.tokenizer, self.store, self.device
        )
        with self._span("load"):
            for name in self.config.judges_of("reward"):  # of evaluation, whatever the recipe has
                self._add_judge(name)
        return self._reply(described)

    @cached_property
    def _parallel(self) -> GenParallel:
        """Replicas of a judge lie as generation instances do in the actor's pool. Collective."""
        layout = self.config.rollout.layout
        axes = TrainAxes(fsdp=self.size)
        positions = gen_positions(axes, layout.pp, layout.tp, Grouping.vanilla)
        return GenParallel.make(gen_mesh(positions, layout.pp, layout.tp), self.device.type)

    def _actor_weights(self, lent: Sequence[Any]) -> Iterable[tuple[str, torch.Tensor]] | None:
        if not lent:
            return None
        # One after the other: nobody holds the whole model. DLPack takes read-only arrays.
        return ((name, from_dlpack(self.data_plane.get([ref])[0])) for name, ref in lent)

    def _add_judge(self, name: str) -> None:
        if self.config.is_neural(name) and name not in self.scorers:
            self.scorers[name] = self.build.neural_judge(name, self._parallel)

    @dispatch(Dispatch.SAME)
    def compute(self, stage: Stage, ids: tuple[SampleId, ...], parcels: tuple[Any, ...]) -> Reply:
        """As in any pool; the new tensors go into the data plane."""
        reply = super().compute(stage, ids, parcels)
        published = self._published(reply.value, ids, reply.value.tensors)
        self.store.drop(ids)
        return replace(reply, value=published)

    @dispatch(Dispatch.PER_RANK)
    def update(self, stage: UpdateStage, share: UpdateShare) -> Reply:
        """As in any pool."""
        reply = super().update(stage, share)
        self.store.drop(share.ids)
        return reply
