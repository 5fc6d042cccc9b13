"""One rank of the actor's pool where others generate: it trains, scores, and pushes weights."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from hybridrl.config import Config
from hybridrl.costs.memory import PoolSizes
from hybridrl.flow.executor import EarlyTrained
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.layout.push import PushSource
from hybridrl.models.load import TORCH_DTYPES, end_token_ids
from hybridrl.workers.actor_shards import ActorShards
from hybridrl.workers.answers import RankDescription
from hybridrl.workers.base_worker import Reply
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.pushed_weights import PushedShare, load_pushed, pushed_plan, save_pushed
from hybridrl.workers.sampling import SamplingTexts
from hybridrl.workers.trainer import ActorTrainer
from hybridrl.workers.training import UpdateShare


class TrainerWorker(ActorShards, CriticWorker):
    """The actor's training shards, and the roles of their pool, on copies of samples.

    `push` puts the actor's weights into the data plane, in the layout of generation.
    """

    def __init__(
        self, rank: int, size: int, config: Config, model_path: str, data_plane: DataPlane
    ) -> None:
        super().__init__(rank, size, config, model_path, data_plane, pool="actor")

    @dispatch(Dispatch.SAME)
    def setup(self, host: str, port: int, sizes: PoolSizes | None = None) -> Reply[RankDescription]:
        """Join the process group, whose first rank listens on `port` of `host`; load the actor."""
        reply = super().setup(host, port, sizes)
        config, path = self.config, self.model_path
        with self._span("load"):
            shape = AutoConfig.from_pretrained(path)
            ends = end_token_ids(path, shape)
            texts = SamplingTexts(self.tokenizer, config.data.chat, config.stop_texts, ends)
            actor = ActorTrainer(config, path, texts.all_end_ids, self.store, self.device)
            self._trainer = self.trained["actor"] = actor
            engine = self.trainer.train_engine
            engine.memory.stays = "actor" in self.staying.names
            engine.offload()
            dtype = TORCH_DTYPES[config.rollout.dtype]
            self._push = PushSource(pushed_plan(config, shape), self.rank, dtype)
        described = RankDescription(
            process=reply.value.process, actor=self.trainer.describe(self.device)
        )
        return Reply(described, (*reply.spans, *self._reply(None).spans), reply.memory)

    @dispatch(Dispatch.SAME)
    def train_early(
        self, stage: UpdateStage, instance: int, share: UpdateShare, arriving: tuple[SampleId, ...]
    ) -> Reply[EarlyTrained]:
        """Compute the gradient of a part of an update with all ranks of the replica, on copies."""
        self._fetch(share.parcels, arriving)
        with self._span("early backward", len(share.ids)):
            self.residency.activate(self.trainer.train_engine)
            start = time.perf_counter()
            self.trainer.update_steps(stage, share).accumulate()
            seconds = time.perf_counter() - start
        self.store.drop(share.ids)
        self._early_s += seconds
        return self._reply(EarlyTrained(stage.name, instance, share.ids, seconds))

    @property
    def trainer(self) -> ActorTrainer:
        """The actor's shards and optimizer."""
        return self._trainer

    @dispatch(Dispatch.SAME)
    def push(self, version: int | None = None) -> Reply[PushedShare]:
        """Put the present weights into the data plane, unless they are those of `version`."""
        engine = self.trainer.train_engine
        if engine.version == version:
            return self._reply(PushedShare(engine.version, {}, 0, 0.0))
        engine.discard()  # what a step that failed before its update has left
        start = time.perf_counter()
        with self._span("push"):
            self.residency.activate(engine)
            shards = engine.named_shards()
            arrays = self._push.pack(
                {n: shards[n] for n in self._push.names if n in shards}, engine.version
            )
            sent = {place: array for place, array in enumerate(arrays) if array is not None}
            references = {place: self.data_plane.put(array) for place, array in sent.items()}
            num_bytes = sum(array.data.nbytes for array in sent.values())
            biases = self._biases()
        seconds = time.perf_counter() - start
        own = engine.version, references, num_bytes, seconds, self._push.bytes_theory
        return self._reply(PushedShare(*own, biases))

    @dispatch(Dispatch.SAME)
    def save_pushed(self, path: str, shares: Mapping[int, PushedShare]) -> Reply[None]:
        """Write what this rank has pushed of older versions, from which samples go on."""
        with self._span("save"):
            save_pushed(Path(path), self.rank, shares, self.data_plane)
        return self._reply(None)

    @dispatch(Dispatch.SAME)
    def load_pushed(self, path: str) -> Reply[dict[int, PushedShare]]:
        """Put what `save_pushed` has written back into the data plane."""
        with self._span("load"):
            return self._reply(load_pushed(Path(path), self.rank, self.data_plane))

    def _biases(self) -> Any:
        """A reference to the routing biases, of the first rank, if training moves them."""
        if not self.config.trainer.router_bias_update_rate:
            return None
        buffers = self.trainer.train_engine.buffers()  # collective
        if self.rank:
            return None
        return self.data_plane.put({name: x.cpu() for name, x in buffers.items()})
