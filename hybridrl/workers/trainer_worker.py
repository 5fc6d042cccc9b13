"""One rank of the actor's pool where others generate: it trains, scores, and pushes weights."""

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from hybridrl.config import Config, Push
from hybridrl.costs.memory import PoolSizes
from hybridrl.flow.executor import Computed, EarlyTrained
from hybridrl.flow.graph import Graph, Stage, UpdateStage
from hybridrl.flow.sample import NO_VERSION, SampleId
from hybridrl.layout.push import PushSource
from hybridrl.models.load import TORCH_DTYPES, end_token_ids, load_config
from hybridrl.workers.actor_shards import ActorShards
from hybridrl.workers.answers import RankDescription
from hybridrl.workers.base_worker import Published, Reply
from hybridrl.workers.critic_worker import CriticWorker
from hybridrl.workers.data_plane import DataPlane
from hybridrl.workers.dispatch import Dispatch, dispatch
from hybridrl.workers.ema import MovingAverage
from hybridrl.workers.pushed_weights import PushedShare, load_pushed, pushed_plan, save_pushed
from hybridrl.workers.sampling import SamplingTexts
from hybridrl.workers.scorers import InstanceScorer
from hybridrl.workers.sparse_pushes import DeltaSource
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
            shape = load_config(path, vision=config.model.vision)
            ends = end_token_ids(path, shape)
            texts = SamplingTexts(self.tokenizer, config.data.chat, config.stop_texts, ends)
            actor = ActorTrainer(config, path, texts.all_end_ids, self.store, self.device)
            self._trainer = self.trained["actor"] = actor
            engine = self.trainer.train_engine
            engine.memory.stays = "actor" in self.staying.names
            engine.offload()
            dtype = TORCH_DTYPES[config.rollout.dtype]
            self._push = PushSource(pushed_plan(config, shape), self.rank, dtype)
            is_sparse = config.rollout.push is Push.sparse
            self._deltas = DeltaSource(self.data_plane) if is_sparse else None
        described = RankDescription(
            process=reply.value.process, actor=self.trainer.describe(self.device)
        )
        return Reply(described, (*reply.spans, *self._reply(None).spans), reply.memory)

    def _add_scorers(self, graph: Graph, weights: Sequence[Any]) -> None:
        super()._add_scorers(graph, weights)
        for name, copy in graph.copies.items():
            if copy.update == "ewma" and name not in self.trainer.averages:
                average = MovingAverage(self.trainer.train_engine, copy.decay)
                self.trainer.averages[name] = average

    @dispatch(Dispatch.SAME)
    def compute(self, stage: Stage, ids: tuple[SampleId, ...]) -> Reply[Published[Computed]]:
        """Run a stage as any pool does; a moving average scores as the last update has left it."""
        average = self.trainer.averages.get(stage.role or "")
        if average is not None and average.moved:
            self._refresh(average, self.scorers[str(stage.role)])
        return super().compute(stage, ids)

    def _refresh(self, average: MovingAverage, scorer: InstanceScorer) -> None:
        """Copy an average into the weights that score. Collective."""
        self.residency.activate(scorer)
        engine = self.trainer.train_engine
        weights = engine.weights(shards=average.as_tensors())
        scorer.engine.take_weights(chain(weights, engine.buffers().items()))
        average.moved = False

    @dispatch(Dispatch.SAME)
    def compare(self, stage: UpdateStage, ids: tuple[SampleId, ...]) -> Reply[dict[str, float]]:
        """Compare both engines' log-probabilities of copies, which go. Collective."""
        with self._span("compare", len(ids)):
            self.residency.activate(self.trainer.train_engine)
            metrics = self.trainer.compare(stage, ids)
        self.store.drop(ids)
        return self._reply(metrics)

    @dispatch(Dispatch.SAME)
    def train_early(
        self, stage: UpdateStage, instance: int, share: UpdateShare, arriving: tuple[SampleId, ...]
    ) -> Reply[EarlyTrained]:
        """Compute the gradient of a part of an update with all ranks of the replica, on copies."""
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
            biases = self._biases()
            shards = engine.named_shards()
            arrays = self._push.pack(
                {n: shards[n] for n in self._push.names if n in shards}, engine.version
            )
            sent = {place: array for place, array in enumerate(arrays) if array is not None}
            references = {place: self.data_plane.put(array) for place, array in sent.items()}
            deltas = self._deltas.deltas(references) if self._deltas else {}
            base = max((delta.base for delta in deltas.values()), default=NO_VERSION)
            num_bytes = sum((deltas.get(p) or sent[p]).data.nbytes for p in sent)
        seconds = time.perf_counter() - start
        own = engine.version, references, num_bytes, seconds, self._push.bytes_theory, biases
        put = {place: self.data_plane.put(delta) for place, delta in deltas.items()}
        return self._reply(PushedShare(*own, base, self._push.proof_seconds, put))

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
