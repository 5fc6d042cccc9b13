"""Makes the roles of a rank: the class for a name, and the weights that it starts with."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from hybridrl.config import Config, Vision
from hybridrl.flow.graph import Graph
from hybridrl.models.load import load_config
from hybridrl.models.shard import GenParallel
from hybridrl.system.memory import free_cached_memory
from hybridrl.workers.colocated import ColocatedActor
from hybridrl.workers.ema import MovingAverage
from hybridrl.workers.scorers import (
    InstanceScorer,
    NeuralReward,
    OldPolicyScorer,
    ReferenceScorer,
    TeachersBySource,
)
from hybridrl.workers.store import SampleStore
from hybridrl.workers.value_model import Critic, LearnedReward, ValueModel


@dataclass(frozen=True)
class RoleFactory:
    """Makes roles over the samples of `store`; the actor's model is at `model_path`.

    All ranks make the same roles in the same order. A new role has left the device, or stays there.
    """

    config: Config
    model_path: str
    tokenizer: PreTrainedTokenizerBase
    store: SampleStore
    device: torch.device

    def value_model(
        self,
        name: str,
        weights: Iterable[tuple[str, torch.Tensor]] | None,
        reverse: bool = False,
        stays: bool = False,
    ) -> ValueModel:
        """A model with a value head; it starts with `weights` unless it has its own path.

        With `reverse` its pipeline runs from the last rank to the first. One that `stays` does not
        leave the device.
        """
        kind = LearnedReward if name == "reward" else Critic
        model = kind(name, self.config, self.model_path, self.store, self.device, reverse)
        if self.config.value_model_of(name).path is None and weights is not None:
            model.train_engine.take_weights(weights)
        model.train_engine.memory.stays = stays
        model.train_engine.offload()
        free_cached_memory(self.device)  # the rollout engine may be awake
        return model

    def neural_judge(self, name: str, parallel: GenParallel) -> NeuralReward:
        """A sequence classifier whose score is the reward, or the cost."""
        scorer = NeuralReward(
            self.config,
            str(self.config.judge_of(name).model),
            parallel,
            self.device,
            self.store,
            self.tokenizer,
            key=f"{name}.model",
        )
        scorer.offload()
        return scorer

    def copy_or_teacher(
        self,
        name: str,
        parallel: GenParallel,
        weights: Iterable[tuple[str, torch.Tensor]] | None,
    ) -> ReferenceScorer:
        """A role that only scores, in a pool without the actor.

        The teacher's own model, or the actor's with its present `weights`, whole parameters; None
        where they are those of its file.
        """
        if name == "teacher":
            return self._teacher(parallel, lambda: self._copy(parallel, weights))
        return self._copy(parallel, weights)

    def _copy(
        self, parallel: GenParallel, weights: Iterable[tuple[str, torch.Tensor]] | None
    ) -> ReferenceScorer:
        return self.frozen(self.model_path, parallel, present=weights)

    def _teacher(
        self, parallel: GenParallel, actor: Callable[[], ReferenceScorer]
    ) -> ReferenceScorer:
        """The teacher, or one for each of `teacher.by_source`; those of one path are one.

        A teacher without a path is the `actor` as it is.
        """
        teacher = self.config.teacher
        path, sources = teacher.path, teacher.by_source
        rest = actor() if path is None else self.frozen(path, parallel, key="teacher.path")
        if not sources:
            return rest
        scorers = {} if path is None else {path: rest}
        for source, own in sources.items():
            if own not in scorers:
                scorers[own] = self.frozen(own, parallel, key=f"teacher.by_source.{source}")
        return TeachersBySource(rest, {source: scorers[own] for source, own in sources.items()})

    def frozen(
        self,
        path: str,
        parallel: GenParallel,
        *,
        key: str = "model.path",
        shared: Mapping[str, torch.Tensor] | None = None,
        present: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> ReferenceScorer:
        """The weights at `path`, or `shared` ones, or whole parameters that are `present`."""
        scorer = ReferenceScorer(
            self.config,
            path,
            parallel,
            self.device,
            self.store,
            key=key,
            weights=shared,
            num_likeliest=load_config(self.model_path).vocab_size,
            vision=self.config.model.vision if path == self.model_path else Vision.frozen,
        )
        if present is not None:
            scorer.engine.take_weights(present)
            scorer.engine.keep_once()
        scorer.offload()
        return scorer


@dataclass(frozen=True)
class ActorRoleFactory(RoleFactory):
    """Makes roles besides the `actor`, while none is active on its device."""

    actor: ColocatedActor

    def scorer(self, name: str, graph: Graph) -> InstanceScorer:
        """A role that only scores: the teacher, or the actor as it is now."""
        if name == "teacher":
            return self._teacher(self.actor.generator.parallel, self.frozen_copy)
        copy = graph.copies.get(name)
        assert name == "reference" or (copy and copy.of == "actor"), name
        if copy and copy.update == "ewma":
            trainer = self.actor.trainer
            trainer.averages[name] = MovingAverage(trainer.train_engine, copy.decay)
        return self.frozen_copy()

    def old_policy(self) -> OldPolicyScorer | None:
        """A scorer over the generation weights, where the engine shares them."""
        generator = self.actor.generator
        model = generator.shared_model
        if model is None:
            return None
        return OldPolicyScorer(self.config, model, generator.parallel, self.device, self.store)

    def frozen_copy(self) -> ReferenceScorer:
        """The actor as it is now.

        Before its first step an actor with adapters is its base, which needs no second copy.
        """
        if base := self.actor.base_weights(self.config.model.compute_dtype):
            return self._frozen(self.model_path, "model.path", base)
        scorer = self._frozen(self.model_path, "model.path")
        if self.actor.trainer.train_engine.version:  # a warm start has trained the file's weights
            self.actor.residency.activate(scorer)
            self.actor.copy_weights(scorer.parameters(), self.config.model.compute_dtype)
            self.actor.copy_biases(scorer.engine.model)
            scorer.engine.keep_once()
            self.actor.residency.activate(None)
        return scorer

    def _frozen(
        self, path: str, key: str, weights: Mapping[str, torch.Tensor] | None = None
    ) -> ReferenceScorer:
        return self.frozen(path, self.actor.generator.parallel, key=key, shared=weights)
