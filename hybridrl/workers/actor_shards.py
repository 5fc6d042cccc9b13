"""The actor's training shards on a rank, whoever generates: weights out, weights in, averages."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from hybridrl.checkpoint import distributed
from hybridrl.workers.base_worker import BaseWorker, Reply
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.trainer import ActorTrainer


class ActorShards(BaseWorker):
    """A rank of the pool `actor`."""

    @property
    def trainer(self) -> ActorTrainer:
        """The actor's shards and optimizer."""
        raise NotImplementedError

    def _actor_weights(
        self, references: Sequence[Any]
    ) -> Iterable[tuple[str, torch.Tensor]] | None:
        engine = self.trainer.train_engine
        return chain(engine.weights(), engine.buffers().items()) if engine.version else None

    @dispatch(Dispatch.SAME)
    def export_weights(self) -> Reply[tuple[tuple[str, Any], ...]]:
        """Put the actor's trained weights into the data plane, for another pool. Collective.

        Rank 0 answers with names and references, or with none where nothing has been trained.
        """
        references = []
        for name, tensor in self._actor_weights(()) or ():
            if self.rank == 0:
                references.append((name, self.data_plane.put(tensor.cpu().numpy())))
        return self._reply(tuple(references))

    @dispatch(Dispatch.SAME)
    def load_weights(self, path: str) -> Reply[None]:
        """Replace the actor's weights by those of a checkpoint, in TRAIN."""
        with self._span("load"):
            self.trainer.train_engine.load_weights(path)
        return self._reply(None)

    def _averages(self, role: str) -> distributed.NamedTensors:
        """The actor's moving averages."""
        tensors: distributed.NamedTensors = {}
        for name, average in self.trainer.averages.items() if role == "actor" else ():
            tensors |= distributed.named_average(average.as_tensors(), name)
        return tensors

    def _restore_averages(self, averages: distributed.NamedTensors) -> None:
        if averages:
            for name, average in self.trainer.averages.items():
                average.restore(distributed.average_shards(averages, name))
